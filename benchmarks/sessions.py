"""Sessions side by side: runs a second of one session, of two in one process, of two in two processes.

    python benchmarks/sessions.py [--target avx512] [--model mobilenet_v2] [--seconds 5]

Every session may use every core. Two of them side by side should together get as many runs done as one
alone; each figure is the median of several rounds, in which the three take turns. Results go to
benchmarks/results/sessions.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import suite_feeds, write_result

from hybridc import models
from hybridc.compiler import compile_model
from hybridc.options import CompileOptions
from hybridc.runtime import Session, load
from hybridc.targets import parse_target

ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="avx512")
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return _work(arguments.worker, arguments.seconds)
    model = models.build(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        artifact, feeds = Path(folder) / "model.hyb", Path(folder) / "feeds.npz"
        compile_model(model, artifact, CompileOptions(target=parse_target(arguments.target)))
        np.savez(feeds, **suite_feeds(model))
        rounds = [_round(artifact, arguments.seconds) for _ in range(ROUNDS)]
    rates = {name: round(statistics.median(r[name] for r in rounds), 1) for name in rounds[0]}
    row = {"model": arguments.model, "target": arguments.target, "runs_per_second": rates}
    print(row)
    print("written to", write_result("sessions", [row]))
    return 0


def _round(artifact: Path, seconds: float) -> dict[str, float]:
    return {
        "one session": _in_process(artifact, seconds, 1),
        "two sessions, one process": _in_process(artifact, seconds, 2),
        "two processes": _in_processes(artifact, seconds),
    }


def _in_process(artifact: Path, seconds: float, count: int) -> float:
    feeds = dict(np.load(artifact.with_name("feeds.npz")))
    sessions = [load(artifact) for _ in range(count)]
    rates = [0.0] * count

    def work(i: int) -> None:
        rates[i] = _rate(sessions[i], feeds, seconds)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    return sum(rates)


def _in_processes(artifact: Path, seconds: float) -> float:
    command = [sys.executable, __file__, "--worker", str(artifact), "--seconds", str(seconds)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(worker.communicate()[0]) for worker in workers)


def _work(artifact: Path, seconds: float) -> int:
    with load(artifact) as session:
        print(_rate(session, dict(np.load(artifact.with_name("feeds.npz"))), seconds))
    return 0


def _rate(session: Session, feeds: dict[str, np.ndarray], seconds: float) -> float:
    """Runs a second, after a quarter of the time to warm up."""
    _runs(session, feeds, seconds / 4)
    return _runs(session, feeds, seconds)


def _runs(session: Session, feeds: dict[str, np.ndarray], seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        session.run(None, feeds)
        count += 1
    return count / elapsed


if __name__ == "__main__":
    sys.exit(main())
