"""The table of plans at shares of memory that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import RESULTS
from drawn_plans.judge import OPEN_GAP, USED_SHARE

from pages.results import read


def drawn_plan_tables() -> list[str]:
    """A row for each seed, if there is a record."""
    if not (RESULTS / "plans_drawn.json").exists():
        return []
    result = read("plans_drawn")
    rows = result["rows"]
    lines = [
        "| seed | plans | mean gap | 90th percentile | worst "
        f"| under {USED_SHARE:.0%} of the budget used, of gaps above {OPEN_GAP:.0%} "
        "| first plan, most | planning, mean | gained by more effort, mean | least |",
        "|---" * 10 + "|",
    ]
    for seed in dict.fromkeys(row["seed"] for row in rows):
        lines.append(_line(seed, [row for row in rows if row["seed"] == seed]))
    effort, later = rows[0]["effort"], rows[0]["later_effort"]
    networks = ", ".join(dict.fromkeys(row["model"] for row in rows))
    return [
        f"At shares of the memory drawn between 8 and 95 % ({result['date']}; {networks}; `--plan-seconds "
        f"{effort:g}`, kernels as estimated, with contention; gaps to the bound that the planner gives; "
        "seconds of CPU, without import, scheduling and estimates of kernels, which take 4 to 9 s before the "
        f"first plan; more effort: {later:g} seconds):",
        "\n".join(lines),
    ]


def _line(seed: int, rows: list[dict[str, Any]]) -> str:
    gaps = np.array([row["gap"] for row in rows])
    wanting = [row for row in rows if row["gap"] > OPEN_GAP]
    idle = sum(row["used"] < USED_SHARE for row in wanting)
    later = np.array([row["later_gain"] for row in rows if row["later_time_us"] is not None])
    gained = f"{later.mean():.2%} of {later.size} | {later.min():.2%}" if later.size else " | "
    return (
        f"| {seed} | {len(rows)} | {gaps.mean():.1%} | {np.quantile(gaps, 0.9):.1%} | {gaps.max():.1%} "
        f"| {idle} of {len(wanting)} | {max(row['first_seconds'] for row in rows):.2f} s "
        f"| {np.mean([row['seconds'] for row in rows]):.1f} s | {gained} |"
    )
