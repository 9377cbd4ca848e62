"""Limits of a busy server, and its end: what was taken is answered, and the rest refused."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hybridc.cli.main import main
from tests.support.process import PATIENCE_SECONDS
from tests.support.serving import Server, needs_kserve

pytest.importorskip("tritonclient")
grpc = pytest.importorskip("grpc")

pytestmark = needs_kserve

X = np.arange(6, dtype=np.float32).reshape(1, 6)
IDS = np.array([[0, 1]])
PATH = "/v2/models/pair/infer"
BODY = json.dumps(
    {
        "inputs": [
            {"name": "x", "shape": [1, 6], "datatype": "FP32", "data": X.tolist()},
            {"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": IDS.tolist()},
        ]
    }
).encode()
JSON = {"Content-Type": "application/json"}
SLOW = ("--batch", "N", "--batch-delay", "600")
"""Requests wait for others until the server is stopped."""


def ask_http(server: Server) -> str:
    """`OK`, or the status."""
    status, _ = server.request("POST", PATH, BODY, JSON)
    return "OK" if status == 200 else str(status)


def ask_grpc(server: Server) -> str:
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name="pair")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 6])
    request.inputs.add(name="ids", datatype="INT64", shape=[1, 2])
    request.raw_input_contents.extend([X.tobytes(), IDS.tobytes()])
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


@contextmanager
def begun_request(server: Server) -> Iterator[socket.socket]:
    """A connection on which most of a request's body does not come."""
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert (
            server.request("GET", "/v2/health/ready")[0] == 200
        )  # so that the server has read what was sent
        yield connection


ASK = {"http": ask_http, "grpc": ask_grpc}


def asked(pool: ThreadPoolExecutor, server: Server, count: int) -> list[Future[str]]:
    """Requests over both protocols in turn."""
    return [pool.submit(ASK[("http", "grpc")[i % 2]], server) for i in range(count)]


def test_full_queue_refuses_and_nothing_that_was_taken_is_lost(
    artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        Server([artifact("pair")], *SLOW, "--queue", "6", log=tmp_path / "log") as server,
        ThreadPoolExecutor(16) as pool,
    ):
        taken = asked(pool, server, 6)
        server.waits_until("hybridc_requests_waiting", 6)
        status, answer = server.request("POST", PATH, BODY, JSON)
        assert status == 429 and "try again" in json.loads(answer)["error"]
        assert ask_grpc(server) == "RESOURCE_EXHAUSTED"
        assert server.metric("hybridc_requests_refused_total") == 2
        assert server.request("GET", "/v2/health/ready")[0] == 200
        server.terminate()
        server.stops_soon()
        assert [each.result() for each in taken] == ["OK"] * 6
        assert server.process.wait(PATIENCE_SECONDS) == 0


def test_requests_at_the_end_are_answered_or_refused(artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """Clients that go on asking: what they began before the signal is answered, all else is so or refused."""
    outcomes: list[tuple[float, str]] = []

    def go_on(protocol: str) -> None:
        while True:
            begun = time.monotonic()
            try:
                outcome = ASK[protocol](server)
            except OSError as error:
                outcome = type(error).__name__
            outcomes.append((begun, outcome))
            if outcome != "OK":
                return

    with (
        Server([artifact("pair")], "--batch", "N", log=tmp_path / "log") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        clients = [pool.submit(go_on, protocol) for protocol in ASK for _ in range(4)]
        server.waits_until("hybridc_requests_per_run_sum", 100)
        signalled = time.monotonic()
        server.terminate()
        for each in clients:
            each.result()
        assert server.process.wait(PATIENCE_SECONDS) == 0
    assert {outcome for begun, outcome in outcomes if begun < signalled} == {"OK"}
    refused = {"503", "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}
    refused |= {"UNAVAILABLE", "CANCELLED"}  # as gRPC ends what comes while it stops
    assert {outcome for _, outcome in outcomes} <= {"OK"} | refused


def test_second_signal_ends_at_once(artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """While the first one lets it wait for the rest of a request."""
    with Server([artifact("pair")], log=tmp_path / "log") as server, begun_request(server):
        server.terminate()
        server.stops_soon()
        assert server.stop() == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def impatient(artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Gives requests up before they run, and reads small ones only."""
    log = tmp_path_factory.mktemp("impatient") / "log"
    with Server([artifact("pair")], *SLOW, "--timeout", "0.5", "--request-size", "1KiB", log=log) as running:
        yield running


def test_request_that_waits_too_long_is_given_up(impatient: Server) -> None:
    assert ask_http(impatient) == "504"
    assert ask_grpc(impatient) == "DEADLINE_EXCEEDED"
    assert impatient.metric("hybridc_requests_per_run_sum") == 0


def test_body_that_does_not_come_is_given_up(impatient: Server) -> None:
    with begun_request(impatient) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_only_requests_of_the_size_told_are_read(impatient: Server) -> None:
    assert impatient.request("POST", PATH, BODY + b" " * 1024, JSON)[0] == 413


@pytest.mark.parametrize(
    ("options", "code", "remedy"),
    [
        (["--http-port", "70000"], "HC513", "65535"),
        (["--timeout", "0"], "HC518", "positive"),
        (["--grace", "soon"], "HC518", "0.5"),
        (["--runs", "pair=2"], "HC500", "--gpu-memory"),
        (["other/pair.hyb"], "HC514", "differ"),
    ],
)
def test_wrong_options_are_refused(
    artifact: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: str,
    remedy: str,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pair.hyb").symlink_to(artifact("pair"))
    monkeypatch.chdir(tmp_path)
    assert main(["serve", str(artifact("pair")), *options]) == 2
    told = capsys.readouterr().err
    assert f"error[{code}]" in told and remedy in told


def test_what_the_server_cannot_do_is_refused_before_it_starts(artifact: Callable[[str], Path]) -> None:
    """In one process of its own, which imports KServe."""
    pair, any_port = str(artifact("pair")), ["--http-port", "0", "--grpc-port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        lines = [
            ("HC598", "--dim M=", [pair, "--batch", "M"]),
            ("HC598", "of another type", [str(artifact("narrow"))]),
            ("HC599", "--host", [pair, "--host", "no.such.host.invalid"]),
            ("HC599", "--http-port", [pair, *any_port, "--http-port", port]),
            ("HC599", "--grpc-port", [pair, *any_port, "--grpc-port", port]),
        ]
        program = f"""
from hybridc.cli.main import main
for words in {[words for _, _, words in lines]}:
    print(main(["serve", *words]))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["2"] * len(lines), done.stderr
    assert re.findall(r"error\[(\w+)\]", done.stderr) == [code for code, _, _ in lines]
    for _, remedy, _ in lines:
        assert remedy in done.stderr


def test_serving_without_its_packages_names_the_extra(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kserve", None)  # as if it were not installed
    assert main(["serve", str(artifact("pair"))]) == 2
    told = capsys.readouterr().err
    assert "error[HC597]" in told and "pip install 'hybridc[serve]'" in told
