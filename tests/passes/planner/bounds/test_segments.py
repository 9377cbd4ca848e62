"""Choices of devices between two cuts, against the simulator and cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from hybridc.passes.planner.bounds.bound import time_bound
from hybridc.passes.planner.bounds.segments import segments
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES, Problem
from hybridc.passes.planner.model.simulate import simulate
from tests.support.planner_problems import ProblemBuilder, problems
from tests.support.random_examples import random_examples


def attention(products: int, cpu_us: float = 30.0) -> Problem:
    """A kernel, some of 10 us that read its result, and one that reads theirs."""
    build = ProblemBuilder()
    first = build.kernel(size=1, gpu_us=10, cpu_us=cpu_us)
    between = [build.kernel(first, size=1, gpu_us=10, cpu_us=cpu_us) for _ in range(products)]
    build.kernel(*between, size=1, gpu_us=10, cpu_us=cpu_us)
    return build.problem(1000)


def test_a_kernel_is_not_split_between_the_devices() -> None:
    # one of three on the CPU takes as long as all on the GPU, and its result must come back
    assert time_bound(attention(3)).bound_us == pytest.approx(50)


def test_one_of_several_runs_on_the_cpu_where_that_is_faster() -> None:
    # two on the GPU, meanwhile one on the CPU: its input comes at 11, its result at 11 + 8 + 1
    assert time_bound(attention(3, cpu_us=8)).bound_us < 40
    [segment] = segments(attention(3), _passing(attention(3)), [True] * 5)
    assert (segment.first, segment.last, segment.kernels) == (0, 4, (0, 1, 2, 3, 4))
    least_us = {choice.on_gpu: choice.least_us for choice in segment.choices}
    assert len(least_us) == 2**5
    assert least_us[True, True, True, True, True] == 40
    assert least_us[True, True, False, True, True] == 1 + 30 + 1 + 10


def test_kernels_that_one_device_alone_runs_leave_fewer_choices() -> None:
    problem = attention(2)
    [segment] = segments(problem, _passing(problem), [True, False, True, True])
    assert len(segment.choices) == 2**3
    assert not any(choice.on_gpu[1] for choice in segment.choices)


def test_many_kernels_between_cuts_are_left_to_the_other_rows() -> None:
    problem = attention(20)
    assert not list(segments(problem, _passing(problem), [True] * 22))


@random_examples(150)
@given(problems(largest=6))
def test_no_run_is_faster_than_its_choice(problem: Problem) -> None:
    ample = replace(problem, budget_bytes=UNLIMITED_BYTES)
    fits = [us != float("inf") for us in problem.gpu_us]
    keep = tuple(gap.start >= 0 or problem.is_weight[gap.tensor] for gap in problem.gaps)
    for segment in segments(problem, _passing(problem), fits):
        if segment.first is None and segment.last is None:  # all kernels
            for choice in segment.choices:
                run = simulate(ample, Decisions(tuple(not gpu for gpu in choice.on_gpu), keep))
                assert choice.least_us <= run.makespan_us * (1 + 1e-9)


def _passing(problem: Problem) -> dict[tuple[int, int], tuple[float, float]]:
    return {
        (maker, use): (problem.h2d_us[t], problem.d2h_us[t])
        for t, maker in enumerate(problem.producer)
        for use in problem.uses[t]
        if maker >= 0
    }
