"""What the search for plans says about itself: its best plan so far, and the time that it took."""

from __future__ import annotations

from hybridc.options import format_bytes
from hybridc.passes.planner.watch import PlanningTime, Standing
from hybridc.report.table import format_us


def standing_text(standing: Standing, *, is_of_several: bool = False) -> str:
    """`12.7 ms within 2.1 % of the bound after 3.4 s`, with the budget where there are several."""
    gap = "" if standing.gap is None else f" within {100 * standing.gap:.1f} % of the bound"
    budget = f" in {format_bytes(standing.budget_bytes)}" if is_of_several else ""
    return f"best {format_us(standing.makespan_us)}{budget}{gap} after {standing.seconds:.1f} s"


def planning_text(time: PlanningTime) -> str:
    """`planned in 12.3 s, first plan after 0.4 s`."""
    stopped = ", stopped before its effort was spent" if time.is_stopped else ""
    return f"planned in {time.seconds:.1f} s, first plan after {time.first_seconds:.1f} s{stopped}"
