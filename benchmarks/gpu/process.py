"""Measurements of `gpu.py` as processes of their own, with a time limit; one that fails gives a row, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
"""Where `python -m gpu.PART` finds its part."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a process gave no result, and what it had printed until then."""

    reason: str
    printed: str

    @property
    def row(self) -> Row:
        return {"failed": self.reason}


def python(*command: object, limit_s: float) -> str | Failure:
    """What a fresh interpreter prints."""
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        ran = subprocess.run(
            [sys.executable, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout.decode() if isinstance(expired.stdout, bytes) else ""
        return Failure(f"more than {limit_s:g} s", printed)
    if ran.returncode == 0:
        return ran.stdout
    return Failure(f"exit code {ran.returncode}: {ran.stderr[-1500:]}", ran.stdout)


def json_of(ran: str | Failure, row: Row) -> Row:
    return row | (ran.row if isinstance(ran, Failure) else json.loads(ran))


def json_lines(ran: str | Failure, row: Row) -> Iterator[Row]:
    printed = ran.printed if isinstance(ran, Failure) else ran
    for line in printed.splitlines():
        if line.startswith("{"):
            yield json.loads(line) | row
    if isinstance(ran, Failure):
        yield row | ran.row
