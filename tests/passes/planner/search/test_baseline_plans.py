"""Plans of the baselines that every larger budget can have, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from hybridc.ir import Graph
from hybridc.machine import Link, Machine, Processor
from hybridc.machines.shared_run import run_shared, work_of
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.baseline_plans import BaselinePlans
from hybridc.passes.planner.search.budget_grid import anchors
from hybridc.passes.planner.search.policies import BASELINES, all_cpu
from tests.support.planner_graphs import random_dag

MACHINE = Machine(
    "little",
    Processor("g", 3000, 128, 5, 1 << 32, shared_gb_s=80),
    Processor("c", 400, 40, 2, 1 << 34, shared_gb_s=20),
    Link(12, 12, 10, both_directions=0.6),
)
ROUNDING = 1 + 1e-9


def shared_us(graph: Graph, placed: PlacedPlan) -> float:
    """The time of a plan by code that is none of the planner's."""
    return run_shared(work_of(graph, placed.steps, MACHINE), MACHINE.link.both_directions).makespan_us


def smallest_and_anchors(context: PlanningContext) -> tuple[PlacedPlan, list[int]]:
    decisions = all_cpu(context.problem, lambda _: 0.0)
    needed_bytes = simulate(context.problem, decisions).peak_gpu_bytes
    smallest = materialize(context, replace(context.problem, budget_bytes=needed_bytes), decisions)
    return smallest, anchors(context.problem, smallest.gpu_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_none_is_slower_than_a_baseline_for_the_same_budget(seed: int) -> None:
    graph = random_dag(seed, 12)
    context = PlanningContext(graph, MACHINE)
    smallest, budgets = smallest_and_anchors(context)
    plans = BaselinePlans(context, context.problem, budgets)
    for b in budgets[::4]:
        best = plans.faster(smallest, b)
        assert best.fits(b, None)
        problem = replace(context.problem, budget_bytes=b)
        for name, policy in BASELINES.items():
            decisions = policy(problem, Core(problem).makespan_us)
            if simulate(problem, decisions).feasible:
                placed = materialize(context, problem, decisions)
                assert not placed.fits(b, None) or (
                    shared_us(graph, best) <= shared_us(graph, placed) * ROUNDING
                ), name


@pytest.mark.parametrize("seed", range(3))
def test_a_larger_budget_has_no_slower_one_and_a_budget_the_same_whatever_else_is_asked_for(
    seed: int,
) -> None:
    context = PlanningContext(random_dag(seed, 12), MACHINE)
    smallest, budgets = smallest_and_anchors(context)
    together = BaselinePlans(context, context.problem, budgets)
    asked = sorted({*budgets[::3], *((b + c) // 2 for b, c in list(pairwise(budgets))[::3])})
    found = [together.faster(smallest, b) for b in asked]
    times_us = [placed.makespan_us for placed in found]
    assert times_us == sorted(times_us, reverse=True) and times_us[-1] < times_us[0]
    for b, placed in list(zip(asked, found, strict=True))[::4]:
        alone = BaselinePlans(context, context.problem, [a for a in budgets if a <= b])
        assert alone.faster(smallest, b).steps == placed.steps


def test_a_plan_that_none_is_faster_than_is_given_back() -> None:
    context = PlanningContext(random_dag(1, 12), MACHINE)
    smallest, budgets = smallest_and_anchors(context)
    fast = replace(smallest, makespan_us=1e-9)
    assert BaselinePlans(context, context.problem, budgets).faster(fast, 1 << 40) is fast
