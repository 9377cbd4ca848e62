"""The table of published experiments."""

from __future__ import annotations

from typing import Any

from common import RESULTS

from pages.results import read


def published_tables() -> list[str]:
    """Published figures beside ours, and what was not repeated."""
    if not (RESULTS / "published.json").exists():
        return []
    result = read("published")
    repeated = [row for row in result["rows"] if "not_repeated" not in row]
    lines = ["| experiment | unit | published | ours | notes |", "|---" * 5 + "|", *map(_line, repeated)]
    missing = [row for row in result["rows"] if "not_repeated" in row]
    return [
        "## Published experiments",
        "With the constants of each paper (`benchmarks/published`, which says where its figures come from; "
        f"{result['date']}); a figure that is not in the sources that were at hand is left out:",
        "\n".join(lines),
        *("Not repeated: " + f"{row['experiment']}, as {row['not_repeated']}." for row in missing),
    ]


def _line(row: dict[str, Any]) -> str:
    if row["unit"] == "samples":
        again = f"{row['ours_at_no_extra_cost']} where only what costs nothing, as pooling, is made again"
        return _cells(row, _shown(row["published"]), str(row["ours"]), again)
    if row["unit"] == "tokens/s":
        notes = (
            f"measured by its authors; {row['their_policy_by_their_model']:.2f} by their model for their "
            f"policy, {row['their_programme_repeated']:.2f} for the best that their programme finds here "
            f"({row['their_programme_policy']}); ours is predicted with the same speeds, weights fetched "
            "beside kernels"
        )
        return _cells(row, _shown(row["published"]), f"{row['ours']:.2f}", notes)
    published = "" if row["published"] is None else f"{row['published']:.1%}"
    ours = "no plan without copies" if row["ours"] is None else f"{row['ours']:.1%}"
    theirs = "" if row["published"] is None else f", theirs {row['published_seconds']:.0f} s"
    graph = "drawn alike" if row["is_drawn"] else "the authors' graph"
    notes = f"{graph}; at least {row['bound']:.1%}; found in {row['seconds']:.0f} s{theirs}"
    return _cells(row, published, ours, notes)


def _cells(row: dict[str, Any], published: str, ours: str, notes: str) -> str:
    return f"| {row['experiment']} | {row['unit']} | {published} | {ours} | {notes} |"


def _shown(value: float | None) -> str:
    return "" if value is None else str(value)
