"""Predicted times, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device, Kernel
from hybridc.machine import Efficiency, Link, Machine, Processor
from hybridc.passes.planner.model.cost import TimeSource, copy_us, kernel_us, time_source

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


def test_peak_and_bandwidth_are_those_that_the_family_reaches() -> None:
    slow = replace(MACHINE.cpu, efficiencies={"pooling": Efficiency(compute=0.5, memory=0.25)})
    machine = replace(MACHINE, cpu=slow)
    pooling = replace(kernel(10**9, 1), family="pooling")
    assert kernel_us(pooling, machine, CPU) == pytest.approx(20_000 + 2)
    assert kernel_us(replace(pooling, flops=1, bytes_moved=10**6), machine, CPU) == pytest.approx(400 + 2)
    assert kernel_us(pooling, machine, GPU) == kernel_us(pooling, MACHINE, GPU)
    assert kernel_us(kernel(10**9, 1), machine, CPU) == kernel_us(kernel(10**9, 1), MACHINE, CPU)


def test_time_is_measured_else_estimated_else_of_the_roofline_and_says_so() -> None:
    cpu = replace(MACHINE.cpu, efficiencies={"pooling": Efficiency(0.5, 0.5)})
    machine = replace(
        MACHINE, cpu=cpu, measured_us={("f", GPU): 42.0}, estimated_us={("f", GPU): 1, ("g", GPU): 7}
    )
    measured, estimated = kernel(10**9, 1), replace(kernel(10**9, 1), function="g", family="pooling")
    assert [kernel_us(k, machine, GPU) for k in (measured, estimated)] == [42.0, 7.0]
    assert [time_source(k, machine, GPU) for k in (measured, estimated)] == [
        TimeSource.MEASURED,
        TimeSource.LOOPS,
    ]
    assert time_source(measured, machine, CPU) is TimeSource.PEAKS
    assert time_source(estimated, machine, CPU) is TimeSource.FAMILY


def test_a_measured_time_counts_on_its_device_alone() -> None:
    machine = replace(MACHINE, measured_us={("f", CPU): 42.0})
    assert kernel_us(kernel(10**9, 1), machine, CPU) == 42.0
    assert kernel_us(kernel(10**9, 1), machine, GPU) == pytest.approx(1000 + 5)
