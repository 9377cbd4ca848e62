"""The bound for chains of kernels: against cases worked out by hand, all decisions, and the exact solver."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from hybridc.passes.planner.bounds.bound import time_bound
from hybridc.passes.planner.bounds.chain.chain import chain_time_bound_us, is_chain
from hybridc.passes.planner.bounds.exact import has_solver, solve_exactly
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from tests.support.planner_problems import ProblemBuilder

ROUNDING = 1 + 1e-9


def weighty_chain(budget_bytes: int, weights: tuple[int, ...], gpu_us: float, cpu_us: float) -> Problem:
    """Kernels one after the other, each with a weight; tensors between them are small."""
    build = ProblemBuilder()
    value = build.input(1)
    for size in weights:
        value = build.kernel(value, build.weight(size), size=1, gpu_us=gpu_us, cpu_us=cpu_us)
    return build.problem(budget_bytes)


def residual_chain(seed: int, kernels: int) -> Problem:
    """A chain with weights, and now and then a result that is read again later."""
    random = Random(seed)
    build = ProblemBuilder()
    values = [build.input(random.randint(1, 8))]
    for _ in range(kernels):
        inputs = {values[-1]} | ({random.choice(values[-4:])} if random.random() < 0.3 else set())
        weight = [build.weight(random.randint(1, 30))] if random.random() < 0.7 else []
        gpu_us = random.uniform(1, 10)
        cpu_us = gpu_us * random.uniform(2, 8)
        size = random.randint(1, 12)
        values.append(build.kernel(*sorted(inputs), *weight, size=size, gpu_us=gpu_us, cpu_us=cpu_us))
    return build.problem(random.choice([40, 50, 70]), wanted=(values[-1],))


def test_a_kernel_is_not_run_on_both_devices_in_part() -> None:
    # the weight of one kernel is resident or copied ahead, those of the others come too late or stay away
    problem = weighty_chain(33, (30, 30, 30), gpu_us=1, cpu_us=40)
    fastest_us = min(
        simulate(problem, Decisions(on_cpu, keep)).makespan_us
        for on_cpu in product((False, True), repeat=3)
        for keep in product((False, True), repeat=len(problem.gaps))
    )
    found = chain_time_bound_us(problem)
    assert time_bound(problem).bound_us < found <= fastest_us
    assert found == pytest.approx(fastest_us, rel=0.05)


def test_nothing_to_copy_ahead_is_no_obstacle() -> None:
    build = ProblemBuilder()
    first = build.kernel(size=1, gpu_us=math.inf, cpu_us=3)
    last = build.kernel(first, size=1, gpu_us=1, cpu_us=7)
    problem = build.problem(100, wanted=(last,))
    on_gpu = simulate(problem, Decisions((True, False), (False,) * len(problem.gaps)))
    assert on_gpu.feasible
    assert 3 < chain_time_bound_us(problem) <= on_gpu.makespan_us


def test_few_points_cost_little_over_many_kernels() -> None:
    # they cover what is left beside resident weights only, so that roundings of each kernel stay small
    problem = weighty_chain(330, (10,) * 60, gpu_us=7, cpu_us=31)
    sharp_us = chain_time_bound_us(problem, points=500)
    assert 0.975 * sharp_us < chain_time_bound_us(problem, points=50) <= sharp_us * ROUNDING


def test_what_fits_whole_is_resident() -> None:
    problem = weighty_chain(200, (30, 30, 30), gpu_us=5, cpu_us=40)
    assert chain_time_bound_us(problem) == pytest.approx(1 + 15)


def test_a_largest_weight_is_resident_or_it_is_not() -> None:
    """Half of it being resident is what the linear programme believes in."""
    problem = weighty_chain(100, (5, 95, 5), gpu_us=10, cpu_us=60)
    assert chain_time_bound_us(problem) > 1.05 * time_bound(problem).bound_us


def test_there_is_no_use_for_more_than_a_known_time() -> None:
    problem = weighty_chain(33, (30, 30, 30), gpu_us=1, cpu_us=40)
    assert chain_time_bound_us(problem, known_us=20.0) == 20.0


def test_more_cells_and_points_do_not_loosen_the_bound() -> None:
    problem = residual_chain(3, 8)
    coarse = chain_time_bound_us(problem, divisions=0, points=32)
    assert coarse <= chain_time_bound_us(problem, divisions=3, points=32) * ROUNDING
    assert coarse <= chain_time_bound_us(problem, divisions=0, points=256) * (1 + 1e-3)


def test_kernels_side_by_side_form_a_stage() -> None:
    build = ProblemBuilder()
    root = build.kernel(size=1, gpu_us=1, cpu_us=math.inf)
    sides = [build.kernel(root, build.weight(20), size=1, gpu_us=10, cpu_us=30) for _ in range(4)]
    build.kernel(*sides, size=1, gpu_us=1, cpu_us=math.inf)
    problem = build.problem(300)
    assert is_chain(problem)
    # three of the four on the GPU, one beside them on the CPU, copies besides
    assert chain_time_bound_us(problem) == pytest.approx(1 + 30 + 1, rel=0.05)
    wide = ProblemBuilder()
    for _ in range(40):
        wide.kernel(size=1, gpu_us=1)
    assert not is_chain(wide.problem(300))
    assert not is_chain(ProblemBuilder().problem(1))


@pytest.mark.parametrize("seed", range(8))
def test_no_decisions_about_a_chain_are_faster(seed: int) -> None:
    problem = residual_chain(seed, 9)
    bound_us = chain_time_bound_us(problem, divisions=2, points=100)
    random = Random(seed)
    for _ in range(300):
        on_cpu = tuple(random.random() < 0.3 for _ in range(problem.kernel_count))
        keep = tuple(random.random() < 0.5 for _ in problem.gaps)
        outcome = simulate(problem, Decisions(on_cpu, keep))
        assert not outcome.feasible or bound_us <= outcome.makespan_us * ROUNDING


@pytest.mark.skipif(not has_solver(), reason="needs OR-tools")
@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 12), marks=pytest.mark.slow)])
def test_exact_plans_of_chains_are_no_faster(seed: int | range) -> None:
    for each in [seed] if isinstance(seed, int) else seed:
        problem = residual_chain(each, 6)
        for budget_bytes in (35, 80):
            at_budget = replace(problem, budget_bytes=budget_bytes)
            found = solve_exactly(at_budget, keep_order=True)
            if found is not None:
                assert chain_time_bound_us(at_budget) <= found.run.makespan_us * ROUNDING
