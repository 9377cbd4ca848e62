"""Runs of steps that share memories and the link."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Copy, Device, Run, Step
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.planner.emit.replay import Demand, demands_of, replay
from hybridc.passes.planner.emit.timeline import timeline
from tests.support.graphs import chain as chain_of_kernels
from tests.support.random_examples import random_examples

GPU, CPU = Device.GPU, Device.CPU
MACHINE = Machine("m", Processor("g", 1, 100, 0, 1), Processor("c", 1, 40, 0, 1), Link(10, 10, 0, 0.75))

KINDS: tuple[Step, ...] = (Run("k", GPU), Run("k", CPU), Copy("t", CPU, GPU), Copy("t", GPU, CPU))


def ends(*steps: tuple[Step, Demand]) -> list[float]:
    spans = replay([step for step, _ in steps], [demand for _, demand in steps], MACHINE)[1]
    return [end for _, end in spans]


def test_directions_of_the_link_slow_each_other_while_both_are_busy() -> None:
    up, down = (Copy("x", CPU, GPU), Demand(30)), (Copy("y", GPU, CPU), Demand(60))
    assert ends(up, down) == pytest.approx([40, 70])
    assert ends(up) == [30]


def test_demands_beyond_what_the_host_reaches_are_met_in_part() -> None:
    kernel, copy = (
        (Run("k", CPU), Demand(100, host_gb_s=40)),
        (Copy("x", CPU, GPU), Demand(100, host_gb_s=10)),
    )
    assert ends(kernel, copy) == pytest.approx([125, 125])
    light = (Run("k", CPU), Demand(100, host_gb_s=30))
    assert ends(light, copy) == [100, 100]


def test_a_kernel_of_the_gpu_and_one_of_the_cpu_share_nothing() -> None:
    assert ends((Run("k", CPU), Demand(5, host_gb_s=40)), (Run("g", GPU), Demand(5, gpu_gb_s=100))) == [5, 5]


def test_alone_a_step_takes_what_it_was_timed_with_however_little_is_shared() -> None:
    little = replace(MACHINE, cpu=replace(MACHINE.cpu, shared_gb_s=1.0))
    assert replay([KINDS[1]], [Demand(7, host_gb_s=40)], little)[0] == 7


def test_a_function_in_caches_demands_no_more_than_its_memory_reaches() -> None:
    graph = chain_of_kernels(1, size=1 << 20)
    machine = replace(MACHINE, measured_us={("f0", CPU): 1.0})
    assert demands_of(graph, (Run("k0", CPU),), machine) == (Demand(1.0, host_gb_s=40),)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Step], list[float]]:
    steps: list[Step] = []
    for i in range(draw(st.integers(0, 12))):
        step = draw(st.sampled_from(KINDS))
        others = [p for p in range(i) if steps[p].lane is not step.lane]
        waits = draw(st.sets(st.sampled_from(others), max_size=2)) if others else set()
        steps.append(replace(step, waits=tuple(sorted(waits))))
    times = st.sampled_from([0.0, 0.3, 1.0, 7.0])
    return steps, [draw(times) for _ in steps]


@given(runs())
@random_examples(100)
def test_where_nothing_is_shared_it_is_the_timeline(run: tuple[list[Step], list[float]]) -> None:
    steps, times_us = run
    alone = replace(MACHINE, link=replace(MACHINE.link, both_directions=1.0))
    makespan_us, spans = replay(steps, [Demand(us) for us in times_us], alone)
    expected_us, expected = timeline(steps, times_us)
    assert makespan_us == pytest.approx(expected_us)
    assert list(chain.from_iterable(spans)) == pytest.approx(list(chain.from_iterable(expected)))


@given(runs(), st.randoms(use_true_random=False))
@random_examples(100)
def test_sharing_only_ever_delays(run: tuple[list[Step], list[float]], random: Random) -> None:
    steps, times_us = run
    demands = [Demand(us, random.uniform(0, 40), random.uniform(0, 100)) for us in times_us]
    spans = replay(steps, demands, MACHINE)[1]
    earliest = timeline(steps, times_us)[1]
    for (start, end), (early, _), us in zip(spans, earliest, times_us, strict=True):
        assert start >= early - 1e-9
        assert end - start >= us - 1e-9
