"""Single moves: what they change, and that none is left that makes a plan faster."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings

from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search import moves
from hybridc.passes.planner.search.moves import (
    ADAPTING,
    Move,
    MoveKind,
    Neighbourhood,
    Outcome,
    moves_of,
    outcomes,
)
from tests.support.planner_problems import ProblemBuilder, all_on_gpu, problems


def streamed(budget_bytes: int = 1000) -> Problem:
    """Two kernels on the GPU, each with a weight."""
    build = ProblemBuilder()
    value = build.kernel(build.weight(20), size=4, gpu_us=10)
    build.kernel(value, build.weight(30), size=4, gpu_us=10)
    return build.problem(budget_bytes)


def test_moves_of_a_kernel_are_its_device_its_weights_and_its_tensors() -> None:
    problem = streamed()
    plan = all_on_gpu(problem, keep=False)
    value, weight = problem.outputs[0][0], problem.inputs[1][1]
    assert set(moves_of(problem, plan, 1)) == {
        Move(MoveKind.DEVICE, 1),
        Move(MoveKind.WEIGHT, weight),
        Move(MoveKind.GAP, problem.gap_at[1, value]),
    }
    on_cpu = type(plan)((False, True), plan.keep)
    assert list(moves_of(problem, on_cpu, 1)) == [Move(MoveKind.DEVICE, 1)]


def test_a_move_changes_one_decision_and_is_timed() -> None:
    problem = streamed()
    plan = all_on_gpu(problem, keep=False)
    found = Neighbourhood(Core(problem), plan).outcome(Move(MoveKind.WEIGHT, problem.inputs[1][1]))
    assert found is not None and found.is_alone
    assert found.makespan_us == simulate(problem, found.decisions).makespan_us
    assert found.makespan_us < simulate(problem, plan).makespan_us
    assert sum(a != b for a, b in zip(found.decisions.keep, plan.keep, strict=True)) == 1


def test_what_does_not_fit_has_no_outcome() -> None:
    problem = streamed(34)  # the second kernel needs 38 bytes
    plan = type(all_on_gpu(problem, keep=False))((False, True), (False,) * len(problem.gaps))
    assert Neighbourhood(Core(problem), plan).outcome(Move(MoveKind.DEVICE, 1)) is None


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much]
)
@given(problems(largest=8))
def test_outcomes_are_those_of_all_moves_the_fastest_first(problem: Problem) -> None:
    core = Core(problem)
    start = core.repaired(all_on_gpu(problem, keep=False))
    if start is None:
        return
    found = outcomes(core, start)
    times_us = [outcome.makespan_us for outcome in found]
    assert times_us == sorted(times_us)
    assert times_us == [simulate(problem, outcome.decisions).makespan_us for outcome in found]
    near, once = Neighbourhood(core, start), set(range(problem.kernel_count)) - problem.repeats
    moves = {move for kernel in once for move in moves_of(problem, start, kernel)}
    best = [outcome.makespan_us for move in moves if (outcome := near.outcome(move)) is not None]
    # of few kernels all are moved with all simulations
    assert min(times_us, default=math.inf) == min(best, default=math.inf)


def test_of_a_large_graph_the_moves_that_can_change_most_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    build = ProblemBuilder()
    value = build.input(4)
    for us in range(1, 9):
        value = build.kernel(value, build.weight(10 * us), size=4, gpu_us=us, cpu_us=us / 2)
    problem = build.problem(10_000)
    plan = all_on_gpu(problem, keep=False)
    tried: list[Move] = []
    outcome = Neighbourhood.outcome

    def noted(near: Neighbourhood, move: Move, evaluations: int = ADAPTING) -> Outcome | None:
        tried.append(move)
        return outcome(near, move, evaluations)

    monkeypatch.setattr(Neighbourhood, "outcome", noted)
    core = Core(problem)
    outcomes(core, plan)
    assert {move.index for move in tried if move.kind is MoveKind.DEVICE} == set(range(8))
    tried.clear()
    outcomes(core, plan, most_kernels=8 * 3 * 2 * moves._TRYING)
    assert {move.index for move in tried if move.kind is MoveKind.DEVICE} == {6, 7}
