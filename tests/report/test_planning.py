"""What is said of a search for plans."""

from __future__ import annotations

from hybridc.passes.planner.watch import PlanningTime, Standing
from hybridc.report.planning import planning_text, standing_text


def test_standing_names_what_is_known() -> None:
    assert standing_text(Standing(0.42, 1 << 20, 13900.0, 0.0)) == "best 13.9 ms after 0.4 s"
    known = Standing(3.4, 1 << 20, 12700.0, 12000.0)
    assert known.gap is not None and abs(known.gap - 7 / 120) < 1e-12
    assert standing_text(known, is_of_several=True) == (
        "best 12.7 ms in 1.00 MiB within 5.8 % of the bound after 3.4 s"
    )


def test_time_says_whether_the_search_was_stopped() -> None:
    assert planning_text(PlanningTime(12.34, 0.41, False)) == "planned in 12.3 s, first plan after 0.4 s"
    assert planning_text(PlanningTime(2.0, 0.41, True)).endswith(", stopped before its effort was spent")
