"""Baselines and starts of the search, worked out by hand. Copying n bytes takes n microseconds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.policies import (
    BASELINES,
    STREAMED_SHARES,
    Evaluate,
    all_cpu,
    decisions_of,
    earliest_fills,
    fill,
    greedy_fills,
    kernels_that_fit,
    layer_split,
    light_fills,
    offload_everything,
    relaxed_fills,
    streaming_fills,
    with_gpu_kernels,
)
from tests.support.planner_problems import ProblemBuilder, problems
from tests.support.random_examples import random_examples


def chain(budget_bytes: int, gpu_us: float = 10, cpu_us: float = 100) -> Problem:
    """Four kernels with weights of 20, 10, 10 and 20 bytes and activations of 1."""
    build = ProblemBuilder()
    value = build.input(1)
    for size in (20, 10, 10, 20):
        value = build.kernel(value, build.weight(size), size=1, gpu_us=gpu_us, cpu_us=cpu_us)
    return build.problem(budget_bytes, wanted=(value,))


def evaluate(problem: Problem) -> Evaluate:
    return lambda decisions: simulate(problem, decisions).makespan_us


def test_all_cpu_leaves_the_gpu_what_only_it_can_run() -> None:
    problem = chain(100)
    assert all_cpu(problem, evaluate(problem)).on_cpu == (True,) * 4
    cpu_us = (100.0, math.inf, 100.0, 100.0)
    assert all_cpu(replace(problem, cpu_us=cpu_us), evaluate(problem)).on_cpu == (True, False, True, True)


@pytest.mark.parametrize(("budget_bytes", "on_gpu"), [(0, 0), (22, 1), (34, 2), (45, 3), (63, 4)])
def test_layer_split_puts_as_much_as_fits_on_the_gpu(budget_bytes: int, on_gpu: int) -> None:
    problem = chain(budget_bytes)
    on_cpu = layer_split(problem, evaluate(problem)).on_cpu
    assert on_cpu.count(False) == on_gpu
    assert list(on_cpu) in (sorted(on_cpu), sorted(on_cpu, reverse=True))


def test_layer_split_takes_the_better_side() -> None:
    problem = replace(chain(45), gpu_us=(90.0, 10.0, 10.0, 10.0))
    assert layer_split(problem, evaluate(problem)).on_cpu == (True, False, False, False)


def test_streamed_weights_are_spread_evenly_over_the_run() -> None:
    build = ProblemBuilder()
    value = build.input(1)
    for _ in range(20):
        value = build.kernel(value, build.weight(10), size=1, gpu_us=10, cpu_us=100)
    problem = build.problem(1000, wanted=(value,))
    for number, chosen in enumerate(streaming_fills(problem)):
        streamed = [
            gap.end
            for gap, keep in zip(problem.gaps, chosen.keep, strict=True)
            if problem.is_weight[gap.tensor] and not keep
        ]
        assert len(streamed) == round(STREAMED_SHARES[number] * 20)
        distances = [after - before for before, after in pairwise(streamed)]
        assert max(distances, default=0) - min(distances, default=0) <= 1
        assert not any(chosen.on_cpu)


def test_a_lookup_in_a_large_table_leaves_the_gpu_to_products() -> None:
    build = ProblemBuilder()
    value = build.kernel(build.input(1), build.weight(500), size=1, gpu_us=10, cpu_us=9)
    for _ in range(4):
        value = build.kernel(value, build.weight(20), size=1, gpu_us=10, cpu_us=100)
    problem = build.problem(1000, wanted=(value,))
    for chosen in streaming_fills(problem):
        assert chosen.on_cpu == (True, False, False, False, False)


def test_offloading_everything_streams_weights_and_keeps_what_the_next_kernel_reads() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    a = build.kernel(x, build.weight(5), size=2, gpu_us=1)
    b = build.kernel(a, size=2, gpu_us=1)
    build.kernel(a, b, size=2, gpu_us=1)
    problem = build.problem(100)
    chosen = offload_everything(problem, evaluate(problem))
    kept = {problem.gaps[e] for e, keep in enumerate(chosen.keep) if keep}
    assert {(gap.tensor, gap.start, gap.end) for gap in kept} == {(a, 0, 1), (a, 1, 2), (b, 1, 2)}
    assert chosen.on_cpu == (False,) * 3


def test_offloading_everything_leaves_to_the_cpu_what_does_not_fit() -> None:
    problem = chain(21)
    assert kernels_that_fit(problem) == [False, True, True, False]
    assert offload_everything(problem, evaluate(problem)).on_cpu == (True, False, False, True)


def test_fill_keeps_in_order_while_there_is_room() -> None:
    problem = chain(65)  # what is kept comes on top of the working sets, the largest of which is 22
    weights = [e for e, gap in enumerate(problem.gaps) if problem.is_weight[gap.tensor]]
    for order in (weights, weights[::-1]):
        chosen = fill(problem, [True] * 4, order, reserve_bytes=0)
        assert [e for e in order if chosen.keep[e]] == order[:3]
        assert simulate(problem, chosen).feasible
    assert not any(fill(problem, [True] * 4, weights, reserve_bytes=40).keep)


def test_light_fills_move_the_kernels_that_lose_least_for_their_bytes() -> None:
    problem = replace(chain(100), cpu_us=(100.0, 11.0, 100.0, 100.0))
    moved = [start.on_cpu for start in light_fills(problem)]
    assert all(on_cpu[1] for on_cpu in moved if any(on_cpu))
    assert (False, True, False, False) in moved


def test_weights_are_kept_always_or_never_and_inputs_only_after_their_first_use() -> None:
    build = ProblemBuilder()
    x, w = build.input(1), build.weight(1)
    a = build.kernel(x, w, size=1, gpu_us=1)
    build.kernel(x, w, a, size=1, gpu_us=1)
    problem = build.problem(100)
    chosen = decisions_of(problem, [True, True], [gap.start == BEFORE_ALL for gap in problem.gaps])
    kept = [(gap.tensor, gap.start) for gap, keep in zip(problem.gaps, chosen.keep, strict=True) if keep]
    assert kept == [(w, BEFORE_ALL), (w, 0)]


def test_weight_that_the_cpu_reads_first_is_resident_for_the_gpu() -> None:
    build = ProblemBuilder()
    w = build.weight(5)
    a = build.kernel(build.input(1), w, size=1, gpu_us=1)
    build.kernel(a, w, size=1, gpu_us=1)
    problem = build.problem(100)
    outcome = simulate(problem, with_gpu_kernels(problem, [False, True], keep=True))
    assert [event.index for event in outcome.events if event.kind == "fetch"] == [a]


@random_examples(80)
@given(problems(), st.data())
def test_every_start_is_consistent(problem: Problem, data: st.DataObject) -> None:
    share = st.floats(0, 1)
    on_gpu = data.draw(st.lists(share, min_size=problem.kernel_count, max_size=problem.kernel_count))
    keep = data.draw(st.lists(share, min_size=len(problem.gaps), max_size=len(problem.gaps)))
    starts = [policy(problem, evaluate(problem)) for policy in BASELINES.values()]
    starts += [
        *greedy_fills(problem),
        *light_fills(problem),
        *earliest_fills(problem),
        *relaxed_fills(problem, on_gpu, keep),
    ]
    for start in starts:
        assert (len(start.on_cpu), len(start.keep)) == (problem.kernel_count, len(problem.gaps))
        for gap, kept in zip(problem.gaps, start.keep, strict=True):
            first = start.keep[problem.gaps_of[gap.tensor].start]
            if problem.is_weight[gap.tensor]:
                assert kept or not first
            else:
                assert not (kept and gap.start == BEFORE_ALL)


def test_equal_branches_run_side_by_side_as_fast_as_the_devices_are() -> None:
    build = ProblemBuilder()
    x = build.input(1)
    ends = []
    for _ in range(4):
        value = x
        for _ in range(3):
            value = build.kernel(value, size=1, gpu_us=10, cpu_us=30)
        ends.append(value)
    build.kernel(*ends, size=1, gpu_us=10, cpu_us=30)
    problem = build.problem(100)
    fastest_us = min(evaluate(problem)(d) for d in earliest_fills(problem))
    assert fastest_us <= 0.85 * evaluate(problem)(with_gpu_kernels(problem, [True] * 13, keep=True))


def test_the_gpu_alone_runs_a_chain_that_it_runs_faster() -> None:
    assert [d.on_cpu for d in earliest_fills(chain(100))] == [(False,) * 4] * 6
