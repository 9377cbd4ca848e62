"""Records of what became of networks, a row for each and each target."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, benchmark: str, found: Iterable[Any]) -> None:
    """Rows of this run replace those of the same network and target: dataclasses with `name`, `target` and
    `outcome`."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if path.exists():
        rows = {(row["name"], row["target"]): row for row in json.loads(path.read_text())["rows"]}
    rows |= {(verdict.name, verdict.target): dataclasses.asdict(verdict) for verdict in found}
    totals: dict[str, Counter[str]] = {}
    for row in rows.values():
        totals.setdefault(row["target"], Counter())[row["outcome"]] += 1
    record = {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        "total": totals,
        "rows": [rows[key] for key in sorted(rows)],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
