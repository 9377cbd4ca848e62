"""Bounds on time and bytes, against cases worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.passes.planner.bounds import bound
from hybridc.passes.planner.bounds.bound import (
    bytes_bound,
    can_be_planned,
    resident_bytes_bound,
    simple_time_bound_us,
    time_bound,
)
from hybridc.passes.planner.bounds.linear import Minimum
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import simulate
from tests.support.planner_problems import ProblemBuilder, all_on_gpu


def gpu_chain(budget_bytes: int, weights: int = 3, cpu_us: float = math.inf) -> Problem:
    """Kernels of 10 us on the GPU, each with a weight of 20 bytes; tensors between them have 4 bytes."""
    build = ProblemBuilder()
    value = build.input(4)
    for _ in range(weights):
        value = build.kernel(value, build.weight(20), size=4, gpu_us=10, cpu_us=cpu_us)
    return build.problem(budget_bytes, wanted=(value,))


def test_with_ample_memory_only_work_and_the_copies_of_inputs_and_outputs_count() -> None:
    found = time_bound(gpu_chain(1000))
    assert found.bound_us == pytest.approx(4 + 30 + 4)
    assert found.on_gpu == (1.0, 1.0, 1.0)


def test_streamed_weights_bound_the_time_by_their_copies() -> None:
    # beside a kernel's 28 bytes no other weight finds room: of three weights at most one is resident
    problem = gpu_chain(47)
    simulated = simulate(problem, all_on_gpu(problem, keep=False))
    found = time_bound(problem)
    assert 20 + 20 + 10 + 4 <= found.bound_us <= simulated.makespan_us
    assert found.bound_us > 1.3 * time_bound(gpu_chain(1000)).bound_us


def test_a_slow_cpu_shares_the_work_only_as_far_as_it_pays() -> None:
    build = ProblemBuilder()
    for _ in range(4):
        build.kernel(size=0, gpu_us=10, cpu_us=30)
    found = time_bound(build.problem(100))
    assert found.bound_us == pytest.approx(30)
    assert sum(found.on_gpu) == pytest.approx(3)


def test_what_exceeds_the_budget_runs_on_the_cpu_or_there_is_no_plan() -> None:
    assert time_bound(gpu_chain(27, cpu_us=100)).bound_us == pytest.approx(300)
    assert not can_be_planned(gpu_chain(27))
    assert time_bound(gpu_chain(27)).bound_us == math.inf


def test_overwriting_makes_a_kernel_fit() -> None:
    build = ProblemBuilder()
    x = build.input(6)
    build.kernel(x, size=6, gpu_us=1, cpu_us=math.inf, overwrites=x)
    assert can_be_planned(build.problem(6))
    assert not can_be_planned(build.problem(5))
    assert bytes_bound(build.problem(6)) == 6


def test_running_again_may_be_faster_than_a_copy() -> None:
    """A large result is used early and late, with a kernel between that leaves it no room."""
    build = ProblemBuilder()
    x = build.input(1)
    large = build.kernel(x, size=50, gpu_us=1, cpu_us=math.inf)
    small = build.kernel(large, size=1, gpu_us=1, cpu_us=math.inf)
    full = build.kernel(small, size=1, gpu_us=1, cpu_us=math.inf, workspace=50)
    build.kernel(full, large, size=1, gpu_us=1, cpu_us=math.inf)
    problem = build.problem(53)
    assert time_bound(problem).bound_us == pytest.approx(1 + 50 + 50)
    again = time_bound(problem, recompute=True).bound_us
    assert 4 <= again <= 1 + 5  # x, four kernels and one of them again


def test_branch_and_bound_and_limits_give_true_bounds() -> None:
    problem = gpu_chain(47)
    plain = time_bound(problem).bound_us
    fastest_us = simulate(problem, all_on_gpu(problem, keep=False)).makespan_us
    assert plain - 1e-3 <= time_bound(problem, nodes=100).bound_us <= fastest_us
    assert time_bound(problem, iterations=3).bound_us <= plain + 1e-9
    assert time_bound(problem, method="ipm").bound_us == pytest.approx(plain, rel=1e-5)


def test_interior_points_bound_many_kernels_as_tightly_as_the_simplex_method() -> None:
    problem = gpu_chain(47, weights=200)
    bound_us = time_bound(problem, method="ipm").bound_us
    assert bound_us > 1.5 * simple_time_bound_us(problem)
    assert bound_us == pytest.approx(time_bound(problem, method="simplex").bound_us, rel=1e-4)


def test_more_than_a_thousand_kernels_are_left_to_interior_points(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def minimise(*_: object, **words: object) -> Minimum:
        asked.append(words["method"])
        return Minimum(0.0, np.empty(0), False, np.empty(0))

    monkeypatch.setattr(bound, "minimise", minimise)
    for kernels in (1000, 1001):
        time_bound(gpu_chain(47, weights=kernels))
    time_bound(gpu_chain(47, weights=1001), method="simplex")
    assert asked == ["simplex", "ipm", "simplex"]


def test_simple_bound_is_the_critical_path_or_the_work_of_one_lane() -> None:
    assert simple_time_bound_us(gpu_chain(1000)) == 30
    build = ProblemBuilder()
    for _ in range(3):
        build.kernel(size=0, gpu_us=10, cpu_us=300)
    assert simple_time_bound_us(replace(build.problem(1), gpu_us=(math.inf,) * 3)) == 900
    assert simple_time_bound_us(replace(build.problem(1), cpu_us=(math.inf,) * 3)) == 30


def test_simple_bound_divides_the_work_between_the_devices() -> None:
    build = ProblemBuilder()
    for gpu_us, cpu_us in ((10, 30), (10, 30), (10, 30), (40, 20), (math.inf, 5), (0, 0)):
        build.kernel(size=0, gpu_us=gpu_us, cpu_us=cpu_us)
    # an eighth of one of the first three is on the CPU, beside the fourth and the fifth
    assert simple_time_bound_us(build.problem(1)) == pytest.approx(28.75)


@given(times=st.lists(st.tuples(*2 * [st.integers(0, 20) | st.just(math.inf)]), min_size=1, max_size=7))
def test_no_division_of_the_work_takes_less(times: list[tuple[float, float]]) -> None:
    build = ProblemBuilder()
    for gpu_us, cpu_us in times:
        if min(gpu_us, cpu_us) < math.inf:
            build.kernel(size=0, gpu_us=gpu_us, cpu_us=cpu_us)
    problem = build.problem(1)
    kernels = list(zip(problem.gpu_us, problem.cpu_us, strict=True))
    divisions = product((0, 1), repeat=len(kernels))
    ends_us = (
        max(sum(us[d] for us, d in zip(kernels, division, strict=True) if d == device) for device in (0, 1))
        for division in divisions
    )
    assert simple_time_bound_us(problem) <= min(ends_us) * (1 + 1e-12)


def test_bytes_of_an_all_gpu_run_are_reached_by_the_simulator() -> None:
    problem = gpu_chain(1000)
    assert resident_bytes_bound(problem) == 3 * 20 + 4 + 4
    assert simulate(problem, all_on_gpu(problem, keep=True)).peak_gpu_bytes == 68
    assert bytes_bound(gpu_chain(1000, cpu_us=5)) == 0
    assert bytes_bound(gpu_chain(1000)) == 28


def test_no_kernels_take_no_time() -> None:
    assert time_bound(ProblemBuilder().problem(1)).bound_us == 0.0


def test_bound_of_a_huge_problem_is_the_simple_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridc.passes.planner.bounds.bound.MOST_RELAXED_KERNELS", 2)
    problem = gpu_chain(budget_bytes=100)
    found = time_bound(problem)
    assert found.bound_us == simple_time_bound_us(problem) > 0
    assert not found.on_gpu
