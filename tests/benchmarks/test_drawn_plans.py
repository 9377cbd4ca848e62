"""Plans at drawn shares: what a row says, and when the wanted figures are met."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from tests.support.graphs import chain, machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def drawn_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from drawn_plans import judge

    yield judge
    for name in [name for name in sys.modules if name.split(".")[0] in ("common", "drawn_plans", "pages")]:
        del sys.modules[name]


@pytest.fixture
def judgement(drawn_plans: Any) -> Any:
    graph = chain(6)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    return drawn_plans.judge(
        (Tiling(graph),), machine(), peak_bytes, 0.5, 0.02, 0.0, moved_kernels=2, later_seconds=0.05
    )


def test_a_row_has_the_first_plan_the_memory_used_and_what_more_effort_gains(judgement: Any) -> None:
    row = judgement.row()
    assert row["budget_bytes"] // 2 < row["arena_bytes"] <= row["budget_bytes"]
    assert row["used"] == row["arena_bytes"] / row["budget_bytes"]
    assert row["gap"] == row["time_us"] / row["tight_bound_us"] - 1 >= 0
    assert row["first_time_us"] >= row["bound_us"] and row["first_seconds"] >= 0
    assert row["later_gain"] == 1 - row["later_time_us"] / row["time_us"]
    assert row["best_move"].startswith("k") and row["move_gain"] >= 0
    assert f"{row['share']:.1%}" in judgement.text()


def test_memory_counts_only_where_there_is_something_to_gain(drawn_plans: Any, judgement: Any) -> None:
    idle = replace(judgement, time_us=1.05, tight_bound_us=1.0, arena_bytes=judgement.budget_bytes // 2)
    assert drawn_plans.is_idle(idle)
    assert not drawn_plans.is_idle(replace(idle, time_us=1.01))
    assert not drawn_plans.is_idle(replace(idle, arena_bytes=judgement.budget_bytes))


def test_each_limit_is_held(drawn_plans: Any, judgement: Any) -> None:
    good = replace(
        judgement,
        time_us=1.01,
        tight_bound_us=1.0,
        first_seconds=1.0,
        later_time_us=1.0,
        arena_bytes=judgement.budget_bytes,
    )
    assert drawn_plans.is_as_wanted([good] * 20)
    assert drawn_plans.is_as_wanted([*[good] * 20, replace(good, time_us=1.34, later_time_us=1.33)])
    for wrong in (
        {"time_us": 1.36, "later_time_us": 1.35},
        {"first_seconds": 2.1},
        {"later_time_us": 1.02},
        {"time_us": 1.05, "later_time_us": 1.04, "arena_bytes": judgement.budget_bytes // 2},
    ):
        assert not drawn_plans.is_as_wanted([*[good] * 20, replace(good, **wrong)])
    assert not drawn_plans.is_as_wanted([replace(good, time_us=1.1, later_time_us=1.1)] * 20)
    assert "21 plans" in drawn_plans.summary([good] * 21)[-1]


@pytest.mark.parametrize("later", [None, 0.05])
def test_the_table_has_a_column_of_more_effort_where_it_was_tried(
    drawn_plans: Any, judgement: Any, later: float | None
) -> None:
    from pages.drawn_plans import _tables

    later_us = None if later is None else judgement.time_us
    row = {"model": "chain", "seed": 7, "effort": 0.02, "later_effort": later}
    row |= replace(judgement, later_time_us=later_us).row()
    text, table = _tables("2026-01-01", [row, row | {"seed": 8}])
    assert ("more effort" in text) == ("more effort" in table) == (later is not None)
    assert [line.count("|") for line in table.splitlines()] == [10 if later is None else 12] * 4


def test_more_draws_begin_with_the_same_shares(drawn_plans: Any) -> None:
    from drawn_plans.points import LEAST_SHARE, MOST_SHARE, NETWORKS, drawn_shares

    assert len(NETWORKS) == 13
    for name in NETWORKS:
        shares = drawn_shares(name, 20, 1)
        assert shares[:3] == drawn_shares(name, 3, 1) != drawn_shares(name, 3, 2)
        assert all(LEAST_SHARE <= share <= MOST_SHARE for share in shares)
