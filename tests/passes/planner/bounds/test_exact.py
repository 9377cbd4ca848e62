"""The exact solver, against all decisions tried out and against cases worked out by hand."""

from __future__ import annotations

import importlib.util
import math
from itertools import permutations, product
from random import Random

import pytest

from hybridc.passes.planner.bounds import exact
from hybridc.passes.planner.bounds.exact import reordered, solve_exactly
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.search import search
from tests.support.outcomes import violations
from tests.support.planner_problems import ProblemBuilder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs OR-tools")


def random_problem(seed: int, kernels: int, budget_bytes: int) -> Problem:
    """Branches and residuals with weights, copies as slow as kernels."""
    random = Random(seed)
    build = ProblemBuilder()
    values = [build.input(random.randint(1, 8))]
    for _ in range(kernels):
        inputs = set(random.sample(values[-3:], min(len(values), random.choice([1, 1, 2]))))
        size, overwrites = random.randint(1, 9), None
        if random.random() < 0.3:
            overwrites = min(inputs)
            size = build.size_bytes[overwrites]
        weight = [build.weight(random.randint(1, 20))] if random.random() < 0.5 else []
        gpu_us = random.uniform(1, 15)
        cpu_us = gpu_us * random.uniform(1, 8)
        workspace = random.choice([0, 0, 3])
        output = build.kernel(
            *sorted(inputs), *weight, size=size, gpu_us=gpu_us, cpu_us=cpu_us, workspace=workspace,
            overwrites=overwrites,
        )  # fmt: skip
        values.append(output)
    return build.problem(budget_bytes, wanted=(values[-1],))


def fastest_us(problem: Problem) -> float:
    """Of all decisions, as the simulator runs them."""
    return min(
        simulate(problem, Decisions(on_cpu, keep)).makespan_us
        for on_cpu in product((False, True), repeat=problem.kernel_count)
        for keep in product((False, True), repeat=len(problem.gaps))
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_decisions_are_faster_and_the_plan_is_right(seed: int) -> None:
    problem = random_problem(seed, kernels=4, budget_bytes=[18, 25, 35][seed % 3])
    best_us = fastest_us(problem)
    in_order = solve_exactly(problem, keep_order=True)
    found = solve_exactly(problem, known_us=best_us)
    assert in_order is not None and found is not None
    assert in_order.is_optimal and found.is_optimal
    assert found.run.makespan_us <= in_order.run.makespan_us * (1 + 1e-4) <= best_us * (1 + 2e-4)
    for plan in (in_order, found):
        assert violations(plan.problem, plan.run) == []
        assert plan.bound_us == pytest.approx(plan.run.makespan_us, rel=1e-4)
        assert plan.run.peak_gpu_bytes <= problem.budget_bytes


def test_order_is_chosen_where_the_graph_leaves_it_free() -> None:
    """The kernel that a slow CPU kernel waits for comes second in the graph, and should run first."""
    build = ProblemBuilder()
    build.kernel(size=1, gpu_us=50, cpu_us=math.inf)
    first = build.kernel(size=1, gpu_us=10, cpu_us=math.inf)
    build.kernel(first, size=1, gpu_us=math.inf, cpu_us=50)
    problem = build.problem(100)
    free, fixed = solve_exactly(problem), solve_exactly(problem, keep_order=True)
    assert free is not None and fixed is not None
    assert free.run.makespan_us == pytest.approx(10 + 1 + 50)
    assert fixed.run.makespan_us == pytest.approx(50 + 10 + 1 + 50)
    assert free.order[0] == 1
    assert free.problem == reordered(problem, free.order)


def test_overwriting_saves_the_bytes_that_are_missing() -> None:
    build = ProblemBuilder()
    x = build.input(6)
    a = build.kernel(x, size=6, gpu_us=1, cpu_us=100, overwrites=x)
    b = build.kernel(a, size=6, gpu_us=1, cpu_us=100, overwrites=a)
    found = solve_exactly(build.problem(6, wanted=(b,)))
    assert found is not None and found.is_optimal
    assert found.run.makespan_us == pytest.approx(6 + 1 + 1 + 6)
    assert found.run.peak_gpu_bytes == 6


def test_no_plan_fits() -> None:
    build = ProblemBuilder()
    build.kernel(size=6, gpu_us=1, cpu_us=math.inf)
    assert solve_exactly(build.problem(5)) is None


def test_without_the_solver_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "find_spec", lambda name: None)
    assert solve_exactly(random_problem(0, kernels=2, budget_bytes=100)) is None


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = random_problem(7, kernels=6, budget_bytes=30)
    assert solve_exactly(problem) == solve_exactly(problem)


def test_times_of_zero_are_planned() -> None:
    build = ProblemBuilder()
    a = build.kernel(size=0, gpu_us=0, cpu_us=0)
    build.kernel(a, size=0, gpu_us=0, cpu_us=0)
    found = solve_exactly(build.problem(10))
    assert found is not None and found.run.makespan_us == 0 and found.bound_us == 0
    assert violations(found.problem, found.run) == []


def test_reordering_by_any_order_and_back_gives_the_same_problem() -> None:
    problem = random_problem(3, kernels=3, budget_bytes=30)
    for order in permutations(range(3)):
        back = tuple(order.index(k) for k in range(3))
        assert reordered(reordered(problem, order), back) == problem


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [10, 12, 14])
@pytest.mark.parametrize("budget_bytes", [15, 30, 60])
def test_up_to_fourteen_kernels_the_optimum_is_proven(kernels: int, budget_bytes: int) -> None:
    for seed in range(3):
        problem = random_problem(seed, kernels, budget_bytes)
        known = search(problem, evaluations=5000)
        assert known is not None
        found = solve_exactly(problem, known_us=known.makespan_us)
        assert found is not None and found.is_optimal
        assert violations(found.problem, found.run) == []
        assert found.run.makespan_us <= known.makespan_us * (1 + 1e-4)
