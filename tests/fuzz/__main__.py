"""All harnesses, one after the other: `make fuzz MINUTES=60`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.fuzz import artifacts, feeds, models, training
from tests.fuzz.driver import fuzz

HARNESSES = (models.HARNESS, feeds.HARNESS, artifacts.HARNESS, training.HARNESS)


def main() -> int:
    """Returns 1 if there were faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all harnesses together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what was found")
    given = parser.parse_args()
    reports, started = [], time.monotonic()
    for harness in HARNESSES:
        seconds = 60 * given.minutes / len(HARNESSES)
        report = fuzz(harness, given.seed, seconds=seconds, workers=given.workers).to_json()
        reports.append(report)
        print(
            ", ".join(
                f"{name} {value}" for name, value in report.items() if not isinstance(value, dict | list)
            )
        )
        sys.stdout.flush()
    if given.json is not None:
        minutes = round((time.monotonic() - started) / 60, 1)
        given.json.write_text(json.dumps({"minutes": minutes, "harnesses": reports}, indent=1) + "\n")
    return int(any(report["finds"] for report in reports))


if __name__ == "__main__":
    raise SystemExit(main())
