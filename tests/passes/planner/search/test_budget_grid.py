"""Budgets that are searched, and what a budget gets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hybridc.ir import Copy, Device, Graph
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.passes.planner.bounds.bound import resident_bytes_bound
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.search import budget_grid as grid
from hybridc.passes.planner.search.budget_grid import Wish, anchors, plan_all_budgets
from hybridc.passes.planner.search.placed_moves import placed_moves
from hybridc.passes.planner.search.policies import all_cpu, layer_splits
from tests.support.graphs import GraphBuilder, machine
from tests.support.planner_graphs import random_dag

UNIT = ALIGNMENT_BYTES


def heavy_chain(count: int, weight: int = 16_000) -> Graph:
    """Kernels that are worth running on the GPU; to copy a weight there takes twice as long as its kernel."""
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(count):
        value = build.kernel((value, build.weight(f"w{i}", weight)), {f"t{i}": 4}, flops=10**9)
    return build.graph(value)


GRAPH = heavy_chain(8)
ALL_BYTES = (8 * 16_000 + 8) * UNIT


def context(evaluations: int = 200) -> PlanningContext:
    """Of the graph, with so many simulations for a budget."""
    per_second = Effort(0.1).evaluations(len(GRAPH.kernels)) / 0.1
    return PlanningContext(GRAPH, machine(), effort=Effort((evaluations + 0.5) / per_second))


def least() -> tuple[Problem, PlacedPlan]:
    problem = problem_of(GRAPH, machine(), 0)
    return problem, materialize(context(), problem, all_cpu(problem, lambda _: 0.0))


def planned(budgets: list[int], smallest: PlacedPlan, evaluations: int = 200) -> tuple[PlacedPlan, ...]:
    return plan_all_budgets(context(evaluations), [Wish(b) for b in budgets], smallest)


def test_anchors_rise_from_the_least_to_a_little_more_than_all() -> None:
    problem, _ = least()
    assert resident_bytes_bound(problem) == ALL_BYTES
    points = anchors(problem, 0)
    assert points == sorted(set(points)) and points[0] == 0
    assert ALL_BYTES in points and ALL_BYTES < points[-1] < 1.1 * ALL_BYTES
    assert all(above / below < 1.5 for below, above in pairwise(points[1:]))


def test_no_anchor_lies_below_the_smallest_budget() -> None:
    problem, _ = least()
    assert min(anchors(problem, 40_000 * UNIT)) == 40_000 * UNIT


def test_anchors_do_not_depend_on_the_problems_own_budget() -> None:
    other = problem_of(GRAPH, machine(), 12_345)
    assert anchors(least()[0], 0) == anchors(other, 0)


def test_budget_between_anchors_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grid.BaselinePlans, "faster", lambda self, known, budget_bytes: known
    )  # the search alone
    problem, smallest = least()
    below, above = anchors(problem, 0)[-5:-3]
    budgets = [below, (below + above) // 2, above - 1, above]
    times_us = [planned([b], smallest)[0].makespan_us for b in budgets]
    assert times_us == sorted(times_us, reverse=True)
    assert planned([budgets[2]], smallest)[0].gpu_bytes > below
    assert times_us[2] < times_us[0]


def test_budget_gets_the_same_plan_whatever_others_are_asked_for() -> None:
    problem, smallest = least()
    below, above = anchors(problem, 0)[-5:-3]
    budgets = [below // 2, (below + above) // 2, 2 * above]
    together = planned(budgets, smallest)
    assert [d.steps for d in together] == [planned([b], smallest)[0].steps for b in budgets]


def test_no_budget_gets_a_faster_plan_than_the_anchor_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid.BaselinePlans, "faster", lambda self, known, budget_bytes: known)
    monkeypatch.setattr(grid, "search", lambda *rest, **named: None)  # nothing at anchors
    monkeypatch.setattr(grid, "placed_moves", lambda context, problem, known, *_: known)
    problem, smallest = least()
    below, above = anchors(problem, 0)[-5:-3]
    (placed,) = planned([(below + above) // 2], smallest)
    assert placed.makespan_us == smallest.makespan_us


def test_a_known_time_that_no_plan_beats_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid.BaselinePlans, "faster", lambda self, known, budget_bytes: known)
    monkeypatch.setattr(grid, "refine", lambda *_: pytest.fail("between anchors nothing is of use"))
    problem, smallest = least()
    below, above = anchors(problem, 0)[-5:-3]
    wish = Wish((below + above) // 2, known_us=1e-9)
    assert plan_all_budgets(context(), [wish], smallest)[0].makespan_us >= wish.known_us


@pytest.mark.parametrize("share", [0.8, 0.97, 1.02, 1.3])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_is_missed_that_is_faster_than_a_known_time(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, moved = random_dag(seed, 14), list[Problem]()

    def noted(context: PlanningContext, problem: Problem, *operands: Any) -> PlacedPlan:
        moved.append(problem)
        return placed_moves(context, problem, *operands)

    monkeypatch.setattr(grid, "placed_moves", noted)
    searched = PlanningContext(graph, machine(), effort=Effort(0.02))
    problem = replace(searched.problem, budget_bytes=0)
    smallest = materialize(searched, problem, all_cpu(problem, lambda _: 0.0))
    budgets = [int(resident_bytes_bound(problem) * part) for part in (0.3, 0.6, 0.95)]
    full = plan_all_budgets(searched, [Wish(b) for b in budgets], smallest)
    in_full = len(moved)
    moved.clear()
    known_us = [share * placed.makespan_us for placed in full]
    wishes = [Wish(b, us) for b, us in zip(budgets, known_us, strict=True)]
    found = plan_all_budgets(searched, wishes, smallest)
    assert len(moved) <= in_full and (share > 0.9 or len(moved) < in_full)
    for us, placed, one in zip(known_us, found, full, strict=True):
        assert min(us, placed.makespan_us) == min(us, one.makespan_us)


def test_the_search_ends_where_nothing_can_be_faster() -> None:
    _problem, smallest = least()
    seen: list[int] = []
    (draft,) = plan_all_budgets(
        context(), [Wish(1 << 40)], smallest, report=lambda done, total: seen.append(done)
    )
    assert draft.makespan_us <= draft.bound_us * (1 + 1e-6)
    assert seen == [0]


@pytest.mark.parametrize("devices", [(Device.CPU,), (Device.GPU, Device.CPU)])
def test_a_plan_that_reaches_the_simple_bound_needs_no_search_and_no_linear_programme(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[Device, ...]
) -> None:
    build = GraphBuilder()
    value = build.input("x", 4)
    for i in range(5):
        value = build.kernel((value,), {f"t{i}": 4}, devices=devices)
    on_host = PlanningContext(build.graph(value), machine(gpu_gflops=1))
    decisions = all_cpu(on_host.problem, lambda _: 0.0)
    smallest = materialize(on_host, on_host.problem, decisions)
    monkeypatch.setattr(grid, "time_bound", lambda *_, **__: pytest.fail("nothing is left to prove"))
    monkeypatch.setattr(grid, "search", lambda *_, **__: pytest.fail("nothing is left to find"))
    (placed,) = plan_all_budgets(on_host, [Wish(10**6)], smallest)
    assert placed.makespan_us == smallest.makespan_us == pytest.approx(placed.bound_us, rel=1e-12)


def test_no_split_in_two_that_fits_is_faster_whatever_the_budget() -> None:
    problem, smallest = least()
    core = Core(replace(problem, budget_bytes=1 << 40))
    measured = [core.measure(split) for split in layer_splits(problem)]
    budgets = sorted({max(peak_bytes, smallest.gpu_bytes) for _, peak_bytes in measured})
    drafts = planned(budgets, smallest, evaluations=1)
    for budget_bytes, draft in zip(budgets, drafts, strict=True):
        fastest_us = min(us for us, peak_bytes in measured if peak_bytes <= budget_bytes)
        assert draft.gpu_bytes <= budget_bytes
        assert draft.makespan_us <= fastest_us * (1 + 1e-9)
    times = [draft.makespan_us for draft in drafts]
    assert times == sorted(times, reverse=True)


def test_with_all_memory_no_weight_is_copied() -> None:
    _problem, smallest = least()
    (draft,) = planned([1 << 40], smallest)
    assert not [step for step in draft.steps if isinstance(step, Copy) and step.tensor.startswith("w")]
