"""The table of plans at shares of memory that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import RESULTS
from drawn_plans.judge import OPEN_GAP, USED_SHARE, WORTH

from pages.results import read

Row = dict[str, Any]


def drawn_plan_tables() -> list[str]:
    """A row for each seed, if there is a record."""
    if not (RESULTS / "plans_drawn.json").exists():
        return []
    result = read("plans_drawn")
    return _tables(result["date"], result["rows"])


def _tables(date: str, rows: list[Row]) -> list[str]:
    has_later = any(row["later_time_us"] is not None for row in rows)
    columns = [
        "seed",
        "plans",
        "mean gap",
        "90th percentile",
        "worst",
        f"under {USED_SHARE:.0%} of the budget used, of gaps above {OPEN_GAP:.0%}",
        f"a single move gains over {WORTH:.1%}",
        "first plan, most",
        "planning, mean",
        *(("gained by more effort, mean", "least") if has_later else ()),
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for seed in dict.fromkeys(row["seed"] for row in rows):
        of_seed = [row for row in rows if row["seed"] == seed]
        lines.append(f"| {' | '.join(_cells(seed, of_seed, has_later=has_later))} |")
    networks = ", ".join(dict.fromkeys(row["model"] for row in rows))
    more = f"; more effort: {rows[0]['later_effort']:g} seconds" if has_later else ""
    return [
        f"At shares of the memory drawn between 8 and 95 % ({date}; {networks}; `--plan-seconds "
        f"{rows[0]['effort']:g}`, kernels as estimated, with contention; gaps to the bound that the planner "
        "gives; seconds of CPU, without import, scheduling and estimates of kernels, which take 4 to 9 s "
        f"before the first plan{more}):",
        "\n".join(lines),
    ]


def _cells(seed: int, rows: list[Row], *, has_later: bool) -> list[str]:
    gaps = np.array([row["gap"] for row in rows])
    wanting = [row for row in rows if row["gap"] > OPEN_GAP]
    idle = sum(row["used"] < USED_SHARE for row in wanting)
    tried = [row["move_gain"] for row in rows if row["best_move"]]
    cells = [
        f"{seed}",
        f"{len(rows)}",
        f"{gaps.mean():.1%}",
        f"{np.quantile(gaps, 0.9):.1%}",
        f"{gaps.max():.1%}",
        f"{idle} of {len(wanting)}",
        f"{sum(gain > WORTH for gain in tried)} of {len(tried)}" if tried else "",
        f"{max(row['first_seconds'] for row in rows):.2f} s",
        f"{np.mean([row['seconds'] for row in rows]):.1f} s",
    ]
    if not has_later:
        return cells
    later = np.array([row["later_gain"] for row in rows if row["later_time_us"] is not None])
    return [
        *cells,
        *((f"{later.mean():.2%} of {later.size}", f"{later.min():.2%}") if later.size else ("", "")),
    ]
