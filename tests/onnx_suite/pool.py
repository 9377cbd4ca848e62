"""Workers that may die or hang: each test's verdict, whatever it does to its process."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.onnx_suite.record import Outcome, Verdict

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
"""For a worker to load the suite, which computes its expected outputs."""


def command(target: str) -> list[str]:
    """Starts a worker for a target."""
    return [sys.executable, "-m", "tests.onnx_suite.worker", target]


class Worker:
    """A process that runs one test after the other, started again where it ends."""

    def __init__(self, target: str, folder: str, limit_seconds: float) -> None:
        self._target, self._folder, self._limit_seconds = target, folder, limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self.tests: list[str] = []
        """Those that the suite has, once it is started."""

    def start(self) -> None:
        """Start the process, unless it runs. Raises RuntimeError if it cannot load the suite."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            command(self._target),
            cwd=ROOT,
            env=os.environ | {"ONNX_HOME": self._folder, "TVM_NUM_THREADS": "1", "TMPDIR": self._folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        line = self._line(START_SECONDS)
        if line is None:
            raise RuntimeError("the worker cannot load the suite")
        self.tests = json.loads(line)

    def run(self, test: str) -> Verdict:
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{test}\n".encode())
        self._process.stdin.flush()
        start = time.monotonic()
        line = self._line(self._limit_seconds)
        if line is not None:
            found = json.loads(line)
            return Verdict(**found | {"outcome": Outcome(found["outcome"])})
        late = time.monotonic() - start >= self._limit_seconds
        code = self.stop()
        if late:
            return Verdict(test, Outcome.TIMEOUT, f"takes more than {self._limit_seconds:g} s")
        return Verdict(test, Outcome.CRASH, f"the process ended with {code}")

    def stop(self) -> int:
        """End the process; returns its exit code."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.kill()
        process.communicate()
        return process.returncode

    def _line(self, seconds: float) -> bytes | None:
        """The next line that the process writes; None if it ends, or does not within `seconds`."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line and ready:
            self._process.wait()
        return line or None


def run_tests(
    target: str,
    wanted: Callable[[list[str]], Iterable[str]],
    *,
    workers: int,
    limit_seconds: float,
    told: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Verdicts of the tests that `wanted` chooses among all, by name; `told` hears each as it is found."""
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="hybridc-onnx-suite-") as folder:
        first = Worker(target, folder, limit_seconds)
        first.start()
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in wanted(first.tests):
            waiting.put(name)

        def work(worker: Worker) -> None:
            try:
                while True:
                    verdict = worker.run(waiting.get_nowait())
                    found.append(verdict)
                    told(verdict)
            except queue.Empty:
                pass
            finally:
                worker.stop()

        pool = [first, *(Worker(target, folder, limit_seconds) for _ in range(workers - 1))]
        threads = [threading.Thread(target=work, args=(worker,)) for worker in pool]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sorted(found, key=lambda verdict: verdict.test)
