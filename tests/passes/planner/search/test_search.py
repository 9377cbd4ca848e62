"""The search, on problems whose best decisions are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given

from hybridc.passes.planner.bounds.bound import can_be_planned, time_bound
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.policies import BASELINES
from hybridc.passes.planner.search.search import improve, search
from tests.support.planner_problems import ProblemBuilder, all_on_gpu, problems
from tests.support.random_examples import random_examples


def chain(budget_bytes: int, weights: tuple[int, ...] = (20, 10, 10, 20)) -> Problem:
    """Kernels of 10 us on the GPU and 100 us on the CPU; copying n bytes takes n microseconds."""
    build = ProblemBuilder()
    value = build.input(1)
    for size in weights:
        value = build.kernel(value, build.weight(size), size=1, gpu_us=10, cpu_us=100)
    return build.problem(budget_bytes, wanted=(value,))


def makespan_us(problem: Problem, decisions: Decisions) -> float:
    return simulate(problem, decisions).makespan_us


def test_with_memory_for_all_the_bound_is_found_without_annealing() -> None:
    problem = chain(100)
    found = search(problem, evaluations=0)
    assert found is not None
    assert found.makespan_us == makespan_us(problem, all_on_gpu(problem, keep=True)) == 1 + 4 * 10 + 1
    assert found.gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("budget_bytes", [0, 12, 22, 34, 45])
def test_the_best_of_all_decisions_is_found(budget_bytes: int) -> None:
    problem = chain(budget_bytes)
    best_us = min(
        makespan_us(problem, Decisions(on_cpu, keep))
        for on_cpu in product((False, True), repeat=problem.kernel_count)
        for keep in product((False, True), repeat=len(problem.gaps))
    )
    found = search(problem, evaluations=5000)
    assert found is not None and found.makespan_us == best_us
    assert makespan_us(problem, found.decisions) == best_us


def test_nothing_is_found_where_nothing_fits() -> None:
    problem = replace(chain(5), cpu_us=(100.0, float("inf"), 100.0, 100.0))
    assert search(problem, evaluations=100) is None


def test_result_is_as_fast_as_a_start_that_is_given() -> None:
    problem = chain(45, weights=(20, 10, 10, 20) * 6)
    good = search(problem, evaluations=5000)
    assert good is not None
    again = search(problem, evaluations=1, starts=[good.decisions])
    assert again is not None and again.makespan_us <= good.makespan_us


def test_the_same_effort_gives_the_same_result_and_improving_is_never_worse() -> None:
    problem = chain(45, weights=(20, 10, 10, 20) * 6)
    one, other = (search(problem, evaluations=500) for _ in range(2))
    assert one == other and one is not None
    improved = improve(problem, [one.decisions], evaluations=500)
    assert improved is not None
    assert makespan_us(problem, improved.decisions) == improved.makespan_us <= one.makespan_us
    assert improved == improve(problem, [one.decisions], evaluations=500)


@random_examples(40)
@given(problems())
def test_result_fits_and_lies_between_bound_and_baselines(problem: Problem) -> None:
    found = search(problem, evaluations=50)
    assert (found is not None) == can_be_planned(problem)
    if found is None:
        return
    outcome = simulate(problem, found.decisions)
    assert outcome.feasible and outcome.makespan_us == found.makespan_us
    assert found.bound_us == time_bound(problem).bound_us <= found.makespan_us * (1 + 1e-9)
    core = Core(problem)
    for policy in BASELINES.values():
        assert found.makespan_us <= core.makespan_us(policy(problem, core.makespan_us))
