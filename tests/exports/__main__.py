"""Networks that torch exports, compiled by hybridc and held against onnxruntime.

    python -m tests.exports --target avx2 --json exports.json

Each network is exported, compiled and run in a process that is replaced where it dies or hangs. With a GPU
in the target, which is emulated, the budget is half of what the network needs there. The file keeps what it
has of other networks and targets.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.exports.export import VARIANTS
from tests.exports.judge import Outcome, Verdict
from tests.support.answering import Answering, NoAnswer
from tests.support.network_records import write_rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.exports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="avx2", help="such as cuda:sm_80+avx2 (default: avx2)")
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="networks whose ARCHITECTURE/EXPORTER/FORM contains this"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one network (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every verdict")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="has exports of earlier runs")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    names = [name for name in VARIANTS if re.search(given.only, name)]
    found = []
    for verdict in verdicts(names, given.target, given.seconds, given.keep):
        found.append(verdict)
        print(_line(verdict), flush=True)
        if given.json is not None:
            write_rows(given.json, "exports", found)
    print(f"\n{given.target}:", ", ".join(f"{n} {o}" for o, n in Counter(v.outcome for v in found).items()))
    return int(any(v.outcome in (Outcome.DIFFERS, Outcome.FAILED) for v in found))


def verdicts(
    names: Iterable[str], target: str, limit_seconds: float, keep: Path | None = None
) -> Iterator[Verdict]:
    """What becomes of the networks of these names, one after the other."""
    command = [sys.executable, "-m", "tests.exports.worker", target, *([] if keep is None else [str(keep)])]
    worker = Answering(command, {"TVM_NUM_THREADS": "1"}, limit_seconds)
    try:
        for name in names:
            try:
                found = json.loads(worker.ask(name))
                yield Verdict(**found | {"outcome": Outcome(found["outcome"])})
            except NoAnswer as error:
                yield Verdict(name, target, Outcome.FAILED, VARIANTS[name].opset, str(error))
    finally:
        worker.stop()


def _line(verdict: Verdict) -> str:
    text = verdict.reason or f"{verdict.error:.1e}"
    if verdict.peer_error:
        text += f" (onnxruntime {verdict.peer_error:.1e})"
    if verdict.gpu_kernels:
        text += f", {verdict.gpu_kernels} kernels on the GPU"
    return f"{verdict.name:40} {verdict.opset} {verdict.outcome:12} {text}"


if __name__ == "__main__":
    raise SystemExit(main())
