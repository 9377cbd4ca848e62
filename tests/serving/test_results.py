"""tritonclient, as it comes, gets over HTTP and gRPC what onnxruntime computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.support.serving import Server, needs_kserve

pytest.importorskip("tritonclient")
http = pytest.importorskip("tritonclient.http")
grpc = pytest.importorskip("tritonclient.grpc")
utils = pytest.importorskip("tritonclient.utils")

pytestmark = needs_kserve

PROTOCOLS = {"http": http, "grpc": grpc}
CLIENTS, REQUESTS = 12, 40


def client(server: Server, protocol: str) -> Any:
    return PROTOCOLS[protocol].InferenceServerClient(getattr(server, protocol))


def infer(
    asked: Any,
    protocol: str,
    model: str,
    feeds: Mapping[str, np.ndarray],
    names: Sequence[str] = (),
    binary: bool = True,
) -> dict[str, np.ndarray]:
    """What the client gets; `binary` says for HTTP how inputs and outputs are sent."""
    library = PROTOCOLS[protocol]
    only_http = {"binary_data": binary} if protocol == "http" else {}
    inputs = []
    for name, array in feeds.items():
        inputs.append(library.InferInput(name, list(array.shape), utils.np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array, **only_http)
    outputs = [library.InferRequestedOutput(name, **only_http) for name in names]
    result = asked.infer(model, inputs, outputs=outputs or None)
    response = result.get_response()
    described = response["outputs"] if protocol == "http" else response.outputs
    got = [each["name"] if protocol == "http" else each.name for each in described]
    return {name: result.as_numpy(name) for name in got}


def drawn_pair(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, 6)).astype(np.float32)
    return {"x": x, "ids": random.integers(0, 5, (rows, 2))}


def expected(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def assert_agree(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["pair", "listed"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_results_are_those_of_onnxruntime(
    server: Server, models: dict[str, onnx.ModelProto], protocol: str, model: str, rows: int
) -> None:
    feeds = drawn_pair(rows)
    with client(server, protocol) as asked:
        found = infer(asked, protocol, model, feeds)
    assert list(found) == ["y", "rows"]
    assert_agree(found, expected(models[model], feeds))


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_travel_as_json_and_in_binary(
    server: Server, models: dict[str, onnx.ModelProto], binary: bool
) -> None:
    feeds = drawn_pair(2)
    with client(server, "http") as asked:
        found = infer(asked, "http", "pair", feeds, ["rows", "y"], binary=binary)
    assert list(found) == ["rows", "y"]
    assert_agree(found, expected(models["pair"], feeds))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_types_and_single_outputs(
    server: Server, models: dict[str, onnx.ModelProto], protocol: str
) -> None:
    feeds = {
        "choice": np.array([[True, False, True], [False, True, False]]),
        "half": np.array([[0.5, 1, -2], [65504, 0, 3]], np.float16),
        "small": np.array([[1, 2, 3], [255, 0, 9]], np.uint8),
    }
    wanted = expected(models["types"], feeds)
    with client(server, protocol) as asked:
        assert_agree(infer(asked, protocol, "types", feeds), wanted)
        found = infer(asked, protocol, "types", feeds, ["no"])
    assert list(found) == ["no"]
    assert_agree(found, wanted)


def test_float16_is_not_sent_as_json(server: Server) -> None:
    feeds = {
        "choice": np.ones((2, 3), bool),
        "half": np.ones((2, 3), np.float16),
        "small": np.ones((2, 3), np.uint8),
    }
    inputs = []
    for name, array in feeds.items():
        inputs.append(http.InferInput(name, [2, 3], utils.np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    wanted = [http.InferRequestedOutput("chosen", binary_data=False)]
    with client(server, "http") as asked, pytest.raises(utils.InferenceServerException, match=r"400.*FP16"):
        asked.infer("types", inputs, outputs=wanted)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_not_a_number_passes_in_binary(
    server: Server, models: dict[str, onnx.ModelProto], protocol: str
) -> None:
    feeds = drawn_pair(3)
    feeds["x"][1] = np.nan
    with client(server, protocol) as asked:
        found = infer(asked, protocol, "pair", feeds)
    assert np.isnan(found["y"][1]).all()
    assert_agree(found, expected(models["pair"], feeds))


def test_not_a_number_is_null_in_json(server: Server) -> None:
    body = {
        "inputs": [
            {"name": "x", "shape": [1, 6], "datatype": "FP32", "data": [float("nan")] * 6},
            {"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [[0, 1]]},
        ]
    }
    headers = {"Content-Type": "application/json"}
    status, answer = server.request("POST", "/v2/models/pair/infer", json.dumps(body).encode(), headers)
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"] == [None] * 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_health_and_metadata(server: Server, protocol: str) -> None:
    with client(server, protocol) as asked:
        assert asked.is_server_live() and asked.is_server_ready() and asked.is_model_ready("pair")
        about = asked.get_model_metadata("pair", **({"as_json": True} if protocol == "grpc" else {}))
        named = asked.get_server_metadata(**({"as_json": True} if protocol == "grpc" else {}))
        with pytest.raises(utils.InferenceServerException, match="other"):
            asked.get_model_metadata("other")
    assert named["name"] == "hybridc"
    shapes = {each["name"]: [int(n) for n in each["shape"]] for each in about["inputs"]}
    assert shapes == {"x": [-1, 6], "ids": [-1, 2]}
    assert {each["name"]: each["datatype"] for each in about["outputs"]} == {"y": "FP32", "rows": "FP32"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_clients_get_their_own_results(
    server: Server, models: dict[str, onnx.ModelProto], protocol: str
) -> None:
    """Some of their requests wrong, which must not be those of others that they are joined with."""
    session = onnxruntime.InferenceSession(models["pair"].SerializeToString())

    def ask(number: int) -> None:
        with client(server, protocol) as asked:
            for i in range(REQUESTS):
                feeds = drawn_pair(1 + (number + i) % 3, seed=1000 * number + i)
                if i % 10 == number % 10:
                    feeds["ids"][-1, 0] = 5
                    with pytest.raises(utils.InferenceServerException, match="HC560"):
                        infer(asked, protocol, "pair", feeds)
                    continue
                found = infer(asked, protocol, "pair", feeds)
                wanted = session.run(["y", "rows"], feeds)
                assert_agree(found, dict(zip(["y", "rows"], wanted, strict=True)))

    before = server.metric("hybridc_requests_per_run_sum", model_name="pair")
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(CLIENTS)))
    asked_for = server.metric("hybridc_requests_per_run_sum", model_name="pair") - before
    assert asked_for == CLIENTS * REQUESTS


def test_waiting_requests_are_joined(
    artifact: Callable[[str], Path], models: dict[str, onnx.ModelProto], tmp_path: Path
) -> None:
    """Eight of two rows, which are two runs of eight rows: a full run waits for no more."""
    options = ("--batch", "N", "--batch-delay", "600", "--timeout", "600")
    with Server([artifact("pair")], *options, log=tmp_path / "log") as server:

        def ask(number: int) -> None:
            feeds = drawn_pair(2, number)
            with client(server, "http") as asked:
                found = infer(asked, "http", "pair", feeds)
            assert_agree(found, expected(models["pair"], feeds))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        assert server.metric("hybridc_requests_per_run_sum", model_name="pair") == 8
        assert server.metric("hybridc_requests_per_run_count", model_name="pair") == 2
        assert server.metric("hybridc_memory_bytes", model_name="pair", device="cpu") > 0


@pytest.mark.parametrize(("warm_up", "more"), [(200, 400), pytest.param(500, 2500, marks=pytest.mark.slow)])
def test_memory_does_not_grow(server: Server, warm_up: int, more: int) -> None:
    """Between the requests in front of the first measurement and those behind it."""
    with client(server, "http") as over_http, client(server, "grpc") as over_grpc:
        feeds = drawn_pair(8)
        for i in range(warm_up + more):
            if i == warm_up:
                before = server.resident_bytes()
            asked, protocol = ((over_http, "http"), (over_grpc, "grpc"))[i % 2]
            infer(asked, protocol, "pair", feeds)
    assert server.resident_bytes() - before < 16 << 20
