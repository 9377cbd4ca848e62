"""What kernels and copies that run at once lose to each other, in the simulation of decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Device, Lane
from hybridc.machine import Link, Machine, Processor, load_machine
from hybridc.passes.planner.bounds.bound import simple_time_bound_us, time_bound
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.replay import demands_of, replay
from hybridc.passes.planner.model.contention import (
    ALONE,
    Contention,
    SharedLanes,
    Shares,
    contention_of,
    kept,
)
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.policies import all_cpu, layer_splits, offload_everything
from tests.support.planner_graphs import bert
from tests.support.planner_problems import ProblemBuilder, all_on_gpu, decisions, problems, shared
from tests.support.random_examples import random_examples

HALF = Contention((Shares(0.5, 0.25),), (Shares(0.25, 0.5),), link=0.8)


def test_what_is_settled_keeps_its_times_and_what_comes_later_bears_the_loss() -> None:
    lanes = SharedLanes(HALF)
    assert lanes.settle(Lane.GPU, 0, 0.0, 10.0) == 10
    assert lanes.settle(Lane.H2D, 0, 0.0, 8.0) == 13  # 5 done by 10, then 3 alone
    assert lanes.settle(Lane.D2H, 0, 12.0, 4.8) == 17  # 0.8 done by 13
    assert lanes.settle(Lane.CPU, 0, 11.0, 10.0) == 17 + (10 - 0.25 - 0.125 - 4 * 0.5)


def test_shares_of_all_that_is_running_multiply() -> None:
    lanes = SharedLanes(HALF)
    lanes.settle(Lane.GPU, 0, 0.0, 100.0)
    lanes.settle(Lane.D2H, 0, 0.0, 10.0)  # beside the kernel a quarter of its speed: until 40
    assert lanes.settle(Lane.H2D, 0, 0.0, 16.0) == pytest.approx(40)


def test_where_nothing_is_shared_times_are_the_same_to_the_last_bit() -> None:
    lanes = SharedLanes(Contention((ALONE,), (ALONE,)))
    lanes.settle(Lane.GPU, 0, 0.0, 10.0)
    assert lanes.settle(Lane.H2D, 0, 0.1, 0.2) == 0.1 + 0.2


@pytest.mark.parametrize(
    ("one", "other", "reached", "expected"),
    [(30, 10, 40, 1.0), (40, 10, 40, 0.64), (0, 0, 40, 1.0), (10, 0, 5, 1.0), (12, 12, 12, 0.25)],
)
def test_demands_within_what_a_memory_reaches_lose_nothing(
    one: float, other: float, reached: float, expected: float
) -> None:
    assert kept(one, other, reached) == pytest.approx(expected)


def test_kernels_bound_by_arithmetic_lose_less_than_those_bound_by_memory() -> None:
    gpu, cpu = Processor("g", 3000, 128, 0, 1 << 32), Processor("c", 400, 40, 0, 1 << 34)
    machine = Machine("m", gpu, cpu, Link(12, 12, 0, both_directions=0.9))
    graph = bert(1)
    found = contention_of(graph.kernels, machine)
    assert found.link == pytest.approx(0.81)
    for kernel, shares in zip(graph.kernels, found.cpu, strict=True):
        is_light = kernel.flops / (400 * 1e3) > 2 * kernel.bytes_moved / (40 * 1e3)
        assert shares.h2d == 1 if is_light else shares.h2d <= 1
    assert min(shares.h2d for shares in found.cpu) == pytest.approx((40 / 52) ** 2)
    assert contention_of(graph.kernels, replace(machine, cpu=replace(cpu, shared_gb_s=1e6))).cpu == (
        ALONE,
    ) * len(graph.kernels)


@given(st.data())
@random_examples(150)
def test_bounds_hold_for_runs_that_share(data: st.DataObject) -> None:
    problem = data.draw(shared(problems()))
    run = simulate(problem, data.draw(decisions(problem)))
    assert simple_time_bound_us(problem) <= run.makespan_us * (1 + 1e-9)
    assert time_bound(problem).bound_us <= run.makespan_us * (1 + 1e-6)


@given(st.data())
@random_examples(150)
def test_shortened_to_times_alone_a_run_still_keeps_its_order(data: st.DataObject) -> None:
    problem = data.draw(shared(problems()))
    run = simulate(problem, data.draw(decisions(problem)))
    alone = replace(problem, contention=Contention())
    alone_us = {
        "run_gpu": alone.gpu_us,
        "run_cpu": alone.cpu_us,
        "fetch": alone.h2d_us,
        "offload": alone.d2h_us,
    }
    for event in run.events:
        assert event.end_us >= event.start_us + alone_us[event.kind.value][event.index] * (1 - 1e-9)


def test_offloading_slows_what_is_fetched_at_once() -> None:
    build = ProblemBuilder()
    first = build.kernel(build.input(10), size=10, gpu_us=1.0)
    build.kernel(build.input(10), size=10, gpu_us=1.0)
    problem = build.problem(100, wanted=(first,))
    free = simulate(problem, all_on_gpu(problem, keep=False))
    link = simulate(replace(problem, contention=Contention(link=0.5)), all_on_gpu(problem, keep=False))
    assert link.makespan_us > free.makespan_us


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_simulated_runs_are_near_to_rates_that_are_shared_fairly(share: float) -> None:
    machine = replace(load_machine("laptop-4gb"), name="shared")
    machine = replace(machine, link=replace(machine.link, both_directions=0.8))
    graph = bert(4)
    ample = problem_of(graph, machine, 1 << 60)
    peak_bytes = simulate(ample, all_on_gpu(ample, keep=True)).peak_gpu_bytes
    problem = replace(ample, budget_bytes=int(peak_bytes * share))
    candidates = [all_cpu(problem, lambda _: 0.0), offload_everything(problem, lambda _: 0.0)]
    for point in (*candidates, *list(layer_splits(problem))[::9]):
        run = simulate(problem, point)
        if run.feasible:
            steps = insert_copies(graph, problem, run)
            fair_us, _ = replay(steps, demands_of(graph, steps, machine), machine)
            assert run.makespan_us == pytest.approx(fair_us, rel=0.1)
    assert Device.GPU in graph.kernels[0].devices
