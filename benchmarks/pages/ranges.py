"""Artifacts for a range of sizes, of benchmarks/ranges.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import RESULTS

from pages.results import read

Row = Mapping[str, Any]


def range_tables() -> list[str]:
    """At drawn sizes, at the bounds of buckets, and what they cost to compile, if there is a record."""
    if not (RESULTS / "ranges.json").exists():
        return []
    result = read("ranges")
    rows = result["rows"]
    drawn = [row for row in rows if "onnxruntime_us" in row]
    compiled = [row for row in rows if "compile_ratio" in row]
    bounds = [row for row in rows if "over_exact" in row and "onnxruntime_us" not in row]
    origin = {key: result[key] for key in ("date", "processor")}
    drawn, compiled, bounds = ([origin | row for row in each] for each in (drawn, compiled, bounds))
    return [
        f"One artifact for all sizes in a range ({result['cores']} cores; `benchmarks/ranges.py`), at sizes "
        "that are drawn from it, each as likely as its double: its time over that of an artifact for these "
        "sizes alone, and the time of ONNX Runtime, which takes any, over its own:",
        _drawn_table(drawn),
        "At the largest sizes of each bucket, and for drawn sizes inside of one over its largest ones:",
        _bound_table(bounds),
        "What eight buckets cost to compile, in seconds of a processor, over the largest one alone:",
        _compile_table(compiled),
    ]


def _origin(row: Row) -> str:
    return f"{row['date']}, {row['processor']}"


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one model and target."""
    names = dict.fromkeys((row["model"], row["target"]) for row in rows)
    return [[row for row in rows if (row["model"], row["target"]) == name] for name in names]


def _drawn_table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | target | sizes | over an exact artifact, median | most | ONNX Runtime's time, median "
        "| least | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in _groups(rows):
        exact = sorted(row["over_exact"] for row in group)
        peer = sorted(row["onnxruntime_over_range"] for row in group)
        middle = len(group) // 2
        lines.append(
            f"| {group[0]['model']} | {group[0]['target']} | {len(group)} | {exact[middle]:.2f} "
            f"| {exact[-1]:.2f} | {peer[middle]:.2f} | {peer[0]:.2f} "
            f"| {_origin(group[0])} |"
        )
    return "\n".join(lines)


def _bound_table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | target | buckets | over an exact artifact, most | inside over the bound, least | most "
        "| measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in _groups(rows):
        inside = [each["of_bound"] for row in group for each in row["inside"]] or [1.0]
        lines.append(
            f"| {group[0]['model']} | {group[0]['target']} | {len(group)} "
            f"| {max(row['over_exact'] for row in group):.2f} | {min(inside):.2f} | {max(inside):.2f} "
            f"| {_origin(group[0])} |"
        )
    return "\n".join(lines)


def _compile_table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | target | buckets | range | largest | ratio | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['target']} | {row['buckets']} | {row['range_s']:.1f} s "
        f"| {row['largest_s']:.1f} s | {row['compile_ratio']:.2f} "
        f"| {_origin(row)} |"
        for row in rows
    ]
    return "\n".join(lines)
