"""Moves judged by their plans: none that is placed is left that makes a plan faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Graph
from hybridc.machine import Link, Machine, Processor
from hybridc.machines.shared_run import run_shared, work_of
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.search.moves import ROUND_KERNELS, Outcome, outcomes
from hybridc.passes.planner.search.placed_moves import place, placed_moves
from hybridc.passes.planner.search.policies import greedy_fills
from tests.support.planner_graphs import random_dag

MACHINE = Machine(
    "little",
    Processor("g", 3000, 128, 5, 1 << 32, shared_gb_s=60),
    Processor("c", 1200, 40, 2, 1 << 34, shared_gb_s=15),
    Link(12, 12, 10, both_directions=0.6),
)
GAIN = 1e-3


def filled(graph: Graph, share: float) -> tuple[PlanningContext, Problem, PlacedPlan]:
    """A plan that keeps what fits, on a machine whose lanes slow each other down."""
    context = PlanningContext(graph, MACHINE)
    needed_bytes = sum(tensor.size_bytes for tensor in graph.tensors)
    problem = replace(context.problem, budget_bytes=int(needed_bytes * share))
    decisions = Core(problem).repaired(next(iter(greedy_fills(problem))))
    assert decisions is not None
    return context, problem, materialize(context, problem, decisions)


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_no_plan_of_a_move_is_faster_in_the_end(seed: int) -> None:
    context, problem, start = filled(random_dag(seed, 12), 0.5)
    end = placed_moves(context, problem, start, 0.0)
    assert end.makespan_us < start.makespan_us * 0.9 and end.fits(problem.budget_bytes, None)
    decisions = Core(problem).repaired(end.decisions)
    assert decisions is not None
    for outcome in outcomes(Core(problem), decisions):
        placed = place(context, problem, outcome.decisions)
        assert placed is None or placed.makespan_us >= end.makespan_us * (1 - GAIN)


@pytest.mark.parametrize("seed", range(4))
def test_a_placed_plan_takes_what_its_replay_says(seed: int) -> None:
    graph = random_dag(seed, 12)
    context, problem, start = filled(graph, 0.4)
    placed = place(context, problem, start.decisions)
    assert placed is not None and placed.fits(problem.budget_bytes, None)
    shared = run_shared(work_of(graph, placed.steps, MACHINE), MACHINE.link.both_directions)
    assert placed.makespan_us == pytest.approx(shared.makespan_us)


def test_what_exceeds_the_budget_is_not_placed() -> None:
    context, problem, start = filled(random_dag(1, 12), 0.5)
    assert place(context, replace(problem, budget_bytes=1), start.decisions) is None


def test_rounds_of_moves_take_as_much_as_the_effort_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    context, problem, start = filled(random_dag(1, 12), 0.5)
    kernels: list[float] = []

    def noted(*_: object, most_kernels: float, **__: object) -> list[Outcome]:
        kernels.append(most_kernels)
        return []

    monkeypatch.setattr("hybridc.passes.planner.search.placed_moves.outcomes", noted)
    for seconds in (0.5, 1, 1000):
        placed_moves(replace(context, effort=Effort(seconds)), problem, start, 0.0)
    half, one, most = dict.fromkeys(kernels)
    assert (one, most) == (2 * half, ROUND_KERNELS)


def test_a_plan_that_is_fast_enough_stays_as_it_is() -> None:
    context, problem, start = filled(random_dag(1, 12), 0.5)
    assert placed_moves(context, problem, start, start.makespan_us) is start
    assert placed_moves(context, problem, start, 0.0).makespan_us < start.makespan_us
