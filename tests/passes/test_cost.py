"""Predicted times, against figures worked out by hand."""

from __future__ import annotations

import pytest

from hybridc.ir import Copy, Device, Kernel, Run
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.cost import copy_us, kernel_us, timeline

GPU, CPU = Device.GPU, Device.CPU
MACHINE = Machine(
    "m", Processor("g", 1000, 100, 5, 1 << 30), Processor("c", 100, 10, 2, 1 << 30), Link(10, 5, 7)
)


def kernel(flops: int, bytes_moved: int) -> Kernel:
    return Kernel("k", "f", (), (), flops=flops, bytes_moved=bytes_moved)


def test_kernel_bound_by_flops_takes_flops_over_peak_and_a_launch() -> None:
    assert kernel_us(kernel(10**9, 1), MACHINE, GPU) == pytest.approx(1000 + 5)
    assert kernel_us(kernel(10**9, 1), MACHINE, CPU) == pytest.approx(10_000 + 2)


def test_kernel_bound_by_memory_takes_bytes_over_bandwidth_and_a_launch() -> None:
    assert kernel_us(kernel(1, 10**6), MACHINE, GPU) == pytest.approx(10 + 5)


def test_copy_takes_the_bandwidth_of_its_direction() -> None:
    assert copy_us(10**6, MACHINE, GPU) == pytest.approx(100 + 7)
    assert copy_us(10**6, MACHINE, CPU) == pytest.approx(200 + 7)


def test_lanes_run_side_by_side_and_waits_hold_back() -> None:
    steps = (Copy("x", CPU, GPU), Run("a", GPU), Run("b", GPU, (0,)), Copy("y", GPU, CPU, (1,)))
    makespan_us, spans = timeline(steps, (10, 3, 4, 20))
    assert spans == ((0, 10), (0, 3), (10, 14), (3, 23))
    assert makespan_us == 23


def test_nothing_listed_behind_a_cpu_kernel_starts_before_it_ends() -> None:
    makespan_us, spans = timeline((Run("a", CPU), Run("b", GPU)), (5, 1))
    assert spans == ((0, 5), (5, 6))
    assert makespan_us == 6


def test_gpu_work_listed_ahead_of_a_cpu_kernel_runs_beside_it() -> None:
    assert timeline((Run("b", GPU), Run("a", CPU)), (5, 4))[0] == 5


def test_no_steps_take_no_time() -> None:
    assert timeline((), ()) == (0, ())
