"""onnx's backend tests against hybridc: `make onnx-suite`.

Fails if a test that passed does not pass any more, if one passes that is not in the list of those that do,
or if a result is wrong or an error hybridc's own. `--update` writes the list.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import onnx

from tests.onnx_suite.pool import run_tests
from tests.onnx_suite.record import (
    Outcome,
    Verdict,
    expected,
    file_stem,
    reasons,
    surprises,
    table,
    to_json,
    write_expected,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.onnx_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        default="avx2",
        help="with a GPU, which is emulated, every node runs there (default: avx2)",
    )
    parser.add_argument("--only", metavar="REGEX", help="tests whose names contain this; records nothing")
    parser.add_argument("--listed", action="store_true", help="tests that pass for avx2 alone")
    parser.add_argument("--update", action="store_true", help="write the list of tests that are to pass")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one test (default: 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every verdict")
    given = parser.parse_args()

    def wanted(names: list[str]) -> Iterable[str]:
        of_avx2 = expected("avx2") if given.listed else set(names)
        return [name for name in names if name in of_avx2 and re.search(given.only or "", name)]

    done = 0

    def told(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if verdict.outcome is not Outcome.PASS:
            print(f"{verdict.test}: {verdict.outcome}: {verdict.reason}", file=sys.stderr, flush=True)
        if done % 100 == 0:
            print(f"{done} tests", file=sys.stderr, flush=True)

    verdicts = run_tests(given.target, wanted, workers=given.workers, limit_seconds=given.seconds, told=told)
    print(table(verdicts))
    print("\nNot passed, by reason:")
    for reason, count in reasons(verdicts).most_common(40):
        print(f"{count:5}  {reason}")
    if given.json is not None:
        rows = [[each.test, each.outcome, each.operator, each.reason] for each in verdicts]
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    if given.only is None:
        record = to_json(given.target, time.strftime("%Y-%m-%d"), onnx.__version__, verdicts)
        path = RESULTS / f"onnx_suite_{file_stem(given.target)}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        if given.update:
            write_expected(given.target, verdicts)
    found = surprises(verdicts, expected(given.target))
    if found:
        print(f"\n{len(found)} surprises:", *found, sep="\n  ")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
