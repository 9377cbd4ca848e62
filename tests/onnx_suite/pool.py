"""Workers that may die or hang: each test's verdict, whatever it does to its process."""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable

from tests.onnx_suite.record import Outcome, Verdict
from tests.support.answering import Answering, NoAnswer


def command(target: str) -> list[str]:
    """Starts a worker for a target."""
    return [sys.executable, "-m", "tests.onnx_suite.worker", target]


class Worker:
    """A process that runs one test after the other, started again where it ends."""

    def __init__(self, target: str, folder: str, limit_seconds: float) -> None:
        environment = {"ONNX_HOME": folder, "TVM_NUM_THREADS": "1", "TMPDIR": folder}
        self._process = Answering(command(target), environment, limit_seconds)

    def tests(self) -> list[str]:
        """Those that the suite has. Raises RuntimeError if the process cannot load it."""
        self._process.start()
        return json.loads(self._process.greeting)

    def run(self, test: str) -> Verdict:
        try:
            found = json.loads(self._process.ask(test))
        except NoAnswer as error:
            return Verdict(test, Outcome.TIMEOUT if error.late else Outcome.CRASH, str(error))
        return Verdict(**found | {"outcome": Outcome(found["outcome"])})

    def stop(self) -> None:
        self._process.stop()


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
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in wanted(first.tests()):
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
