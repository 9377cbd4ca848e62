"""A server of artifacts in a process of its own: KServe and tritonclient describe the same protocol to
protobuf, which takes it once in a process."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import PATIENCE_SECONDS

needs_kserve = pytest.mark.skipif(
    importlib.util.find_spec("kserve") is None,  # importing it would keep tritonclient out
    reason="needs kserve, of the extra serve",
)


class Server:
    """`hybridc serve`, ready for requests. Use as a context manager, which ends it."""

    def __init__(self, artifacts: Sequence[Path], *options: str, log: Path) -> None:
        command = [sys.executable, "-m", "hybridc", "serve", *map(str, artifacts), *options]
        command += ["--http-port", "0", "--grpc-port", "0", "--json"]
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            told = self._first_line()
        except BaseException:
            self.process.kill()
            raise
        self.http, self.grpc = told["http"], told.get("grpc", "")
        self.models: list[str] = told["models"]

    def _first_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.log.read_text())
        return json.loads(line)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        self.terminate()
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()

    def stops_soon(self) -> None:
        """Until it says that no more should be asked of it, or takes no more connections."""
        with contextlib.suppress(OSError):
            while self.request("GET", "/v2/health/ready")[0] == 200:
                time.sleep(0.01)

    def resident_bytes(self) -> int:
        """Of its memory, as Linux counts it."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        """Status and body of the answer to a request that no client would send."""
        connection = http.client.HTTPConnection(self.http, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """A value of `/metrics`, or the sum of all that have these labels; 0 if there is none yet."""
        _, body = self.request("GET", "/metrics")
        values = [
            float(line.rpartition(" ")[2])
            for line in body.decode().splitlines()
            if line.split("{")[0].split(" ")[0] == name
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        ]
        return sum(values)

    def waits_until(self, name: str, value: float, **labels: str) -> None:
        """Until a metric is as large as that."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.metric(name, **labels) < value:
            assert time.monotonic() < end, f"{name} stays below {value}"
            time.sleep(0.01)
