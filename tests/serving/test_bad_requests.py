"""What no server should compute is refused with the protocol's errors, and does no harm."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.support.serving import Server, needs_kserve

pytest.importorskip("tritonclient")
grpc = pytest.importorskip("grpc")

pytestmark = needs_kserve

X = np.arange(12, dtype=np.float32).reshape(2, 6)
IDS = np.array([[0, 1], [4, 2]], np.int64)
INFER = "/v2/models/pair/infer"
JSON = {"Content-Type": "application/json"}


def tensor(name: str, array: np.ndarray, datatype: str, **others: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(array.shape),
        "datatype": datatype,
        "data": array.ravel().tolist(),
    } | others


def good(**others: Any) -> dict[str, Any]:
    """A request of JSON alone, with other fields."""
    return {"inputs": [tensor("x", X, "FP32"), tensor("ids", IDS, "INT64")]} | others


def with_x(**others: Any) -> dict[str, Any]:
    """The same with other fields of the first input."""
    return good(inputs=[tensor("x", X, "FP32") | others, tensor("ids", IDS, "INT64")])


def without(key: str) -> dict[str, Any]:
    changed = with_x()
    del changed["inputs"][0][key]
    return changed


@dataclass(frozen=True)
class Http:
    """A request and the status it must be answered with."""

    status: int
    body: Any = field(default_factory=good)
    path: str = INFER
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    method: str = "POST"

    def bytes(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def binary(size: Any, raw: bytes = X.tobytes(), header: str | None = None, **others: Any) -> Http:
    """A request with the first input in binary, which is told to have so many bytes."""
    x = {"name": "x", "shape": [2, 6], "datatype": "FP32", "parameters": {"binary_data_size": size}} | others
    head = json.dumps({"inputs": [x, tensor("ids", IDS, "INT64")]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)) if header is None else header}
    return Http(400, head + raw, headers=headers)


HTTP = {
    "unknown_model": Http(404, path="/v2/models/other/infer"),
    "unknown_version": Http(501, path="/v2/models/pair/versions/7/infer"),
    "unknown_route": Http(404, path="/v2/models/pair/explode"),
    "older_protocol": Http(404, path="/v1/models/pair:predict"),
    "wrong_method": Http(405, path=INFER, method="DELETE"),
    "load": Http(501, path="/v2/repository/models/pair/load"),
    "unload": Http(501, path="/v2/repository/models/pair/unload"),
    "empty_body": Http(400, b""),
    "broken_json": Http(400, b'{"inputs": ['),
    "broken_json_without_type": Http(400, b'{"inputs": [', headers={}),
    "no_text": Http(400, b"\xff\xfe\x00{"),
    "deep_json": Http(400, b'{"inputs": ' + b"[" * 100_000),
    "json_list": Http(400, []),
    "json_number": Http(400, 7),
    "no_inputs": Http(400, {}),
    "inputs_are_text": Http(400, good(inputs="x")),
    "inputs_are_empty": Http(400, good(inputs=[])),
    "missing_input": Http(400, good(inputs=good()["inputs"][:1])),
    "unknown_input": Http(400, good(inputs=[*good()["inputs"], tensor("z", X, "FP32")])),
    "input_twice": Http(400, good(inputs=[*good()["inputs"], tensor("x", X, "FP32")])),
    "input_without_name": Http(400, without("name")),
    "input_without_shape": Http(400, without("shape")),
    "input_without_datatype": Http(400, without("datatype")),
    "input_without_data": Http(400, without("data")),
    "wrong_datatype": Http(400, with_x(datatype="FP64")),
    "unknown_datatype": Http(400, with_x(datatype="FP31")),
    "texts_for_numbers": Http(400, with_x(data=["1"] * 12)),
    "text_data": Http(400, with_x(datatype="BYTES", data=["a"] * 12)),
    "long_text": Http(400, with_x(data=["a" * 100_000] + [0] * 11)),
    "null_data": Http(400, with_x(data=[None] * 12)),
    "dictionary_data": Http(400, with_x(data=[{}] * 12)),
    "booleans_for_numbers": Http(400, with_x(data=[True] * 12)),
    "data_is_number": Http(400, with_x(data=3)),
    "too_few_elements": Http(400, with_x(data=[0.0] * 11)),
    "too_many_elements": Http(400, with_x(data=[0.0] * 13)),
    "ragged_data": Http(400, with_x(data=[[0.0] * 7, [0.0] * 5])),
    "fraction_for_integer": Http(
        400, good(inputs=[tensor("x", X, "FP32"), tensor("ids", IDS + 0.5, "INT64")])
    ),
    "huge_integer": Http(
        400, good(inputs=[tensor("x", X, "FP32"), tensor("ids", IDS, "INT64", data=[2**70, 0, 0, 0])])
    ),
    "wrong_rank": Http(400, with_x(shape=[12])),
    "wrong_extent": Http(400, with_x(shape=[3, 4])),
    "empty_batch": Http(400, with_x(shape=[0, 6], data=[])),
    "batch_beyond_range": Http(400, with_x(shape=[9, 6], data=[0.0] * 54)),
    "negative_extent": Http(400, with_x(shape=[-2, 6])),
    "two_negative_extents": Http(400, with_x(shape=[-2, -6])),
    "huge_extent": Http(400, with_x(shape=[2**62, 2**62])),
    "fractional_extent": Http(400, with_x(shape=[2.5, 6])),
    "shape_is_text": Http(400, with_x(shape="2x6")),
    "different_batches": Http(400, with_x(shape=[1, 6], data=[0.0] * 6)),
    "index_beyond_bounds": Http(400, good(inputs=[tensor("x", X, "FP32"), tensor("ids", IDS + 3, "INT64")])),
    "unknown_output": Http(400, good(outputs=[{"name": "z"}])),
    "output_twice": Http(400, good(outputs=[{"name": "y"}, {"name": "y"}])),
    "output_without_name": Http(400, good(outputs=[{}])),
    "classification": Http(400, good(outputs=[{"name": "y", "parameters": {"classification": 3}}])),
    "binary_is_text": Http(400, good(outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}])),
    "compressed": Http(415, headers={"Content-Encoding": "gzip"}),
    "too_long": Http(413, b"[" + b" " * (65 << 20)),
    "binary_too_short": binary(48, X.tobytes()[:40]),
    "binary_too_long": binary(48, X.tobytes() + b"more"),
    "binary_of_other_size": binary(44, X.tobytes()[:44]),
    "binary_size_negative": binary(-1),
    "binary_size_huge": binary(2**63),
    "binary_size_text": binary("48"),
    "binary_size_fraction": binary(48.5),
    "binary_and_data": binary(48, X.tobytes(), data=[0.0] * 12),
    "header_length_text": binary(48, header="many"),
    "header_length_negative": binary(48, header="-1"),
    "header_length_beyond": binary(48, header="1000000"),
    "header_length_short": binary(48, header="5"),
    "json_float16": Http(
        400,
        {"inputs": [{"name": "half", "shape": [2, 3], "datatype": "FP16", "data": [0.0] * 6}]},
        path="/v2/models/types/infer",
    ),
}


@pytest.mark.parametrize("name", HTTP)
def test_bad_request_is_refused_over_http(server: Server, name: str) -> None:
    case = HTTP[name]
    status, answer = server.request(case.method, case.path, case.bytes(), case.headers)
    assert status == case.status, answer
    assert_is_error(answer)
    assert_still_serves(server)


def assert_is_error(answer: bytes) -> None:
    """The protocol's error: one text, and of one line."""
    told = json.loads(answer)
    assert list(told) == ["error"] and told["error"]
    assert "\n" not in told["error"] and len(told["error"]) < 1000


def assert_still_serves(server: Server) -> None:
    status, answer = server.request("POST", INFER, json.dumps(good()).encode(), JSON)
    assert status == 200, answer
    assert np.isfinite(json.loads(answer)["outputs"][0]["data"]).all()


def test_bool_of_other_bytes_is_refused(server: Server) -> None:
    raw = {"choice": b"\2" * 6, "half": b"\0" * 12, "small": b"\0" * 6}
    types = {"choice": "BOOL", "half": "FP16", "small": "UINT8"}
    inputs = [
        {"name": n, "shape": [2, 3], "datatype": types[n], "parameters": {"binary_data_size": len(b)}}
        for n, b in raw.items()
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    status, answer = server.request("POST", "/v2/models/types/infer", head + b"".join(raw.values()), headers)
    assert status == 400
    assert "BOOL" in json.loads(answer)["error"]


def test_body_of_untold_length_is_not_read_beyond_the_limit(server: Server) -> None:
    """In chunks, of which the server cannot know how many come."""
    host, port = server.http.rsplit(":", 1)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    before = server.resident_bytes()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(66 * 16):  # 66 MiB
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413")
    assert server.resident_bytes() - before < 200 << 20
    assert_still_serves(server)


def test_what_is_no_http_is_refused(server: Server) -> None:
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(struct.pack("<64Q", *range(64)))
        answer = connection.recv(1 << 16)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert_still_serves(server)


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Any]:
    """The service as tritonclient has it, without what its client checks."""
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@dataclass(frozen=True)
class Grpc:
    """A request and the status it must be answered with."""

    status: str
    model: str = "pair"
    version: str = ""
    names: tuple[str, ...] = ("x", "ids")
    types: tuple[str, ...] = ("FP32", "INT64")
    shapes: tuple[list[int], ...] = ([2, 6], [2, 2])
    raw: tuple[bytes, ...] = (X.tobytes(), IDS.tobytes())
    contents: tuple[dict[str, list[Any]], ...] = ()
    outputs: tuple[str, ...] = ()

    def message(self) -> Any:
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelInferRequest(model_name=self.model, model_version=self.version)
        for i, name in enumerate(self.names):
            given = request.inputs.add(name=name, datatype=self.types[i], shape=self.shapes[i])
            for field_name, values in self.contents[i].items() if self.contents else ():
                getattr(given.contents, field_name).extend(values)
        request.raw_input_contents.extend(self.raw)
        for name in self.outputs:
            request.outputs.add(name=name)
        return request


INVALID = Grpc("INVALID_ARGUMENT")
TYPED = replace(INVALID, raw=(), contents=({"fp32_contents": [0.0] * 12}, {"int64_contents": [0] * 4}))

GRPC = {
    "unknown_model": Grpc("NOT_FOUND", model="other"),
    "no_model": Grpc("NOT_FOUND", model=""),
    "unknown_version": Grpc("UNIMPLEMENTED", version="7"),
    "missing_input": replace(INVALID, names=("x",), raw=(X.tobytes(),)),
    "unknown_input": replace(INVALID, names=("x", "other")),
    "input_twice": replace(INVALID, names=("x", "x"), types=("FP32", "FP32"), shapes=([2, 6], [2, 6])),
    "no_inputs": replace(INVALID, names=(), raw=()),
    "wrong_datatype": replace(INVALID, types=("INT32", "INT64")),
    "unknown_datatype": replace(INVALID, types=("FP31", "INT64")),
    "bfloat16": replace(INVALID, types=("BF16", "INT64")),
    "no_datatype": replace(INVALID, types=("", "INT64")),
    "wrong_rank": replace(INVALID, shapes=([12], [2, 2])),
    "wrong_extent": replace(INVALID, shapes=([3, 4], [2, 2])),
    "negative_extent": replace(INVALID, shapes=([-2, 6], [2, 2])),
    "huge_extent": replace(INVALID, shapes=([2**62, 2**62], [2, 2])),
    "batch_beyond_range": replace(INVALID, shapes=([9, 6], [9, 2]), raw=(b"\0" * 216, b"\0" * 144)),
    "empty_batch": replace(INVALID, shapes=([0, 6], [0, 2]), raw=(b"", b"")),
    "different_batches": replace(INVALID, shapes=([1, 6], [2, 2]), raw=(X.tobytes()[:24], IDS.tobytes())),
    "too_few_bytes": replace(INVALID, raw=(X.tobytes()[:-1], IDS.tobytes())),
    "too_many_bytes": replace(INVALID, raw=(X.tobytes() + b"\0", IDS.tobytes())),
    "bytes_of_one_input": replace(INVALID, raw=(X.tobytes(),)),
    "bytes_of_three_inputs": replace(INVALID, raw=(X.tobytes(), IDS.tobytes(), b"")),
    "no_data": replace(INVALID, raw=()),
    "data_twice": replace(TYPED, raw=(X.tobytes(), IDS.tobytes())),
    "data_of_other_type": replace(
        TYPED, contents=({"int64_contents": [0] * 12}, {"int64_contents": [0] * 4})
    ),
    "too_few_elements": replace(TYPED, contents=({"fp32_contents": [0.0] * 11}, {"int64_contents": [0] * 4})),
    "index_beyond_bounds": replace(INVALID, raw=(X.tobytes(), (IDS + 3).tobytes())),
    "unknown_output": replace(INVALID, outputs=("z",)),
    "output_twice": replace(INVALID, outputs=("y", "y")),
    "too_long": Grpc("RESOURCE_EXHAUSTED", raw=(b"\0" * (65 << 20), IDS.tobytes())),
}


@pytest.mark.parametrize("name", GRPC)
def test_bad_request_is_refused_over_grpc(server: Server, stub: Any, name: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(GRPC[name].message())
    assert refused.value.code().name == GRPC[name].status, refused.value.details()
    assert refused.value.details() and "Traceback" not in refused.value.details()
    assert_still_serves(server)


def test_good_requests_of_these_tables_are_answered(stub: Any) -> None:
    for case in (INVALID, TYPED):
        assert stub.ModelInfer(case.message()).outputs[0].name == "y"


@pytest.mark.parametrize("call", ["RepositoryModelLoad", "RepositoryModelUnload"])
def test_models_are_not_changed_over_grpc(stub: Any, call: str) -> None:
    from tritonclient.grpc import service_pb2

    request = getattr(service_pb2, f"{call}Request")(model_name="pair")
    with pytest.raises(grpc.RpcError) as refused:
        getattr(stub, call)(request)
    assert refused.value.code().name == "UNIMPLEMENTED"
