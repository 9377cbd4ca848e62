"""Requests of the Open Inference Protocol, answered by hybridc and by onnxruntime behind its server.

    python benchmarks/serve.py [--model lenet] [--target avx2] [--requests 200000] [--seconds 600]

16 clients of tritonclient, each in a thread, ask one after the other, over HTTP and over gRPC, for at most so
many requests and seconds of each server and protocol. Both servers are `hybridc.serving` with the same limits
and batching; they run at once and are asked in turns, so what their clients and the server cost beside the
model is the same. Every result is compared with onnxruntime's of its own. Latencies are what clients see.
Memory is the server's resident set after the warm-up and at the end. Results go to
benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import onnx
import onnxruntime
from common import write_result

import hybridc
from hybridc import models
from hybridc.cli.support.tolerance import deviation

LARGEST_BATCH = 16
BATCH = "N"
FEEDS = 16
"""Different requests, of one sample each."""
WARM_UP = 2000
SLICES = 4
"""In which the servers are asked in turns, of each protocol."""
QUEUE, TIMEOUT_S, GRACE_S = 64, 30.0, 30.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lenet", help="one whose builder has dynamic_batch")
    parser.add_argument("--target", default="avx2")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--onnxruntime", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.onnxruntime is not None:
        return _serve_onnxruntime(arguments.onnxruntime, arguments.threads)
    model = models.build(arguments.model, dynamic_batch=True)
    with tempfile.TemporaryDirectory() as folder:
        path, artifact = Path(folder) / f"{arguments.model}.onnx", Path(folder) / f"{arguments.model}.hyb"
        onnx.save(model, path)
        options: dict[str, Any] = {"target": arguments.target, "threads": arguments.threads}
        hybridc.compile(path, artifact, dims={BATCH: f"1..{LARGEST_BATCH}"}, **options)
        rows = _measure(path, artifact, arguments)
    for row in rows:
        print(row)
    print("written to", write_result("serve", rows))
    return 0


def _measure(path: Path, artifact: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ours = ["-m", "hybridc", "serve", str(artifact), "--http-port", "0", "--grpc-port", "0", "--json"]
    ours += ["--batch", BATCH, "--queue", str(QUEUE), "--threads", str(arguments.threads)]
    theirs = [__file__, "--onnxruntime", str(path), "--threads", str(arguments.threads)]
    work = Work.of(path)
    with Server(ours) as hybridc_server, Server(theirs) as onnxruntime_server:
        servers = {"hybridc": hybridc_server, "onnxruntime": onnxruntime_server}
        rows = []
        for protocol in ("http", "grpc"):
            loads = {name: Load(server, protocol, work) for name, server in servers.items()}
            for load in loads.values():
                load.go_on(arguments.clients, WARM_UP, 60.0)
                load.begin()
            for _ in range(SLICES):
                for load in loads.values():
                    load.go_on(arguments.clients, arguments.requests // SLICES, arguments.seconds / SLICES)
            rows += [{"server": name, **load.row(arguments)} for name, load in loads.items()]
    return rows


@dataclass(frozen=True)
class Work:
    """What is asked for, and what the answers must be."""

    model: str
    feeds: list[np.ndarray]
    answers: list[np.ndarray]

    @classmethod
    def of(cls, path: Path) -> Work:
        session = onnxruntime.InferenceSession(path)
        [port] = session.get_inputs()
        random = np.random.default_rng(0)
        shape = (1, *port.shape[1:])
        feeds = [random.standard_normal(shape).astype(np.float32) for _ in range(FEEDS)]
        return cls(path.stem, feeds, [session.run(None, {port.name: each})[0] for each in feeds])


class Server:
    """A server in a process of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.addresses = json.loads(self.process.stdout.readline())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(2 * GRACE_S)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def metric(self, name: str) -> float:
        with urlopen(f"http://{self.addresses['http']}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@dataclass
class Load:
    """What clients of one server saw over one protocol."""

    server: Server
    protocol: str
    work: Work
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    seconds: float = 0.0
    before: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Count from now on, after the warm-up."""
        self.latencies_s, self.seconds = [], 0.0
        self.before = self._counts() | {"resident": self.server.resident_bytes()}

    def _counts(self) -> dict[str, float]:
        names = ("hybridc_requests_per_run_sum", "hybridc_requests_per_run_count")
        return {name: self.server.metric(name) for name in names}

    def go_on(self, clients: int, requests: int, seconds: float) -> None:
        """Ask for so many requests, or so long."""
        end = time.perf_counter() + seconds
        threads = [
            threading.Thread(target=self._ask, args=(number, -(-requests // clients), end))
            for number in range(clients)
        ]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds += time.perf_counter() - begun

    def _ask(self, number: int, requests: int, end: float) -> None:
        import tritonclient.grpc
        import tritonclient.http

        library = {"http": tritonclient.http, "grpc": tritonclient.grpc}[self.protocol]
        latencies, wrong = [], 0
        with library.InferenceServerClient(self.server.addresses[self.protocol]) as client:
            for i in range(requests):
                which = (number + i) % FEEDS
                begun = time.perf_counter()
                if begun > end:
                    break
                given = library.InferInput("x", list(self.work.feeds[which].shape), "FP32")
                given.set_data_from_numpy(self.work.feeds[which])
                try:
                    result = client.infer(self.work.model, [given]).as_numpy("logits")
                except Exception as error:
                    self.errors.append(str(error))
                    continue
                latencies.append(time.perf_counter() - begun)
                wrong += deviation("logits", result, self.work.answers[which]).elements_off > 0
        self.latencies_s += latencies
        self.wrong += wrong

    def row(self, arguments: argparse.Namespace) -> dict[str, Any]:
        after, mib = self._counts(), 1 << 20
        joined, runs = (after[name] - self.before[name] for name in after)
        milliseconds = 1e3 * np.percentile(self.latencies_s, [50, 99])
        return {
            "protocol": self.protocol,
            "model": arguments.model,
            "target": arguments.target,
            "clients": arguments.clients,
            "requests": len(self.latencies_s),
            "seconds": round(self.seconds, 1),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "wrong_results": self.wrong,
            "requests_per_second": round(len(self.latencies_s) / self.seconds, 1),
            "p50_ms": round(float(milliseconds[0]), 3),
            "p99_ms": round(float(milliseconds[1]), 3),
            "requests_per_run": round(joined / runs, 2),
            "resident_mib_before": round(self.before["resident"] / mib, 1),
            "resident_mib_after": round(self.server.resident_bytes() / mib, 1),
        }


@dataclass(frozen=True)
class _Port:
    """As `hybridc.runtime.NodeArg`."""

    name: str
    type: str
    shape: list[int]
    open: dict[int, str]


@dataclass(frozen=True)
class _Bucket:
    sizes: dict[str, tuple[int, int]]


class _OnnxRuntime:
    """A session of onnxruntime as the server knows those of hybridc."""

    def __init__(self, path: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options)

    def get_inputs(self) -> list[_Port]:
        return [_port(each) for each in self._session.get_inputs()]

    def get_outputs(self) -> list[_Port]:
        return [_port(each) for each in self._session.get_outputs()]

    def buckets(self) -> list[_Bucket]:
        return [_Bucket({BATCH: (1, LARGEST_BATCH)})]

    def memory(self) -> dict[Any, Any]:
        return {}

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return self._session.run(names, feeds)


def _port(given: Any) -> _Port:
    is_open = {axis: str(size) for axis, size in enumerate(given.shape) if not isinstance(size, int)}
    shape = [LARGEST_BATCH if axis in is_open else size for axis, size in enumerate(given.shape)]
    return _Port(given.name, given.type, shape, is_open)


def _serve_onnxruntime(path: Path, threads: int) -> int:
    from hybridc.serving.server import serve
    from hybridc.serving.settings import Settings

    settings = Settings("127.0.0.1", 0, 0, QUEUE, TIMEOUT_S, None, BATCH, 0.0, GRACE_S)
    runners = {path.stem: _OnnxRuntime(path, threads)}
    serve(
        runners,
        settings,
        lambda at: print(json.dumps({"http": at.http, "grpc": at.grpc}), flush=True),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
