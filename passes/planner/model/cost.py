"""Predicted times of kernels and copies, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from hybridc.ir import Copy, Device, Graph, Kernel, Step
from hybridc.machine import Machine


class TimeSource(StrEnum):
    """Where the time of a kernel comes from."""

    MEASURED = "measured"
    LOOPS = "estimated from the kernel's loops"
    FAMILY = "estimated from what the kernel's family reaches"
    PEAKS = "estimated from the data sheet's peaks"


def time_source(kernel: Kernel, machine: Machine, device: Device) -> TimeSource:
    """What `kernel_us` takes the time from."""
    key = kernel.function, device
    if key in machine.measured_us:
        return TimeSource.MEASURED
    if key in machine.estimated_us:
        return TimeSource.LOOPS
    is_known = kernel.family in machine.processor(device).efficiencies
    return TimeSource.FAMILY if is_known else TimeSource.PEAKS


def kernel_us(kernel: Kernel, machine: Machine, device: Device) -> float:
    """Microseconds of a call: as measured, else by the model of the GPU, else the roofline
    max(flops/peak, bytes/bandwidth) and a launch.

    Peak and bandwidth are those that kernels of its family reach. The roofline is from Williams, Waterman
    and Patterson, CACM 52(4), 2009.
    """
    key = kernel.function, device
    known_us = machine.measured_us.get(key, machine.estimated_us.get(key))
    if known_us is not None:
        return known_us
    processor = machine.processor(device)
    reached = processor.efficiency(kernel.family)
    # 1 Gflop/s is 1e3 operations a microsecond, 1 GB/s 1e3 bytes a microsecond
    compute_us = kernel.flops / (processor.peak_gflops * reached.compute * 1e3)
    memory_us = kernel.bytes_moved / (processor.bandwidth_gb_s * reached.memory * 1e3)
    return max(compute_us, memory_us) + processor.launch_us


def copy_us(size_bytes: int, machine: Machine, target: Device) -> float:
    """Microseconds of one copy over the link into the memory of `target`: latency, and bytes over bandwidth.

    Nothing is copied in no time. Copies in the other direction do not slow it.
    """
    # no copy is issued, so there is no latency either
    if not size_bytes:
        return 0.0
    gb_s = machine.link.h2d_gb_s if target is Device.GPU else machine.link.d2h_gb_s
    return size_bytes / (gb_s * 1e3) + machine.link.latency_us


def step_times_us(graph: Graph, steps: Sequence[Step], machine: Machine) -> tuple[float, ...]:
    """Time of each step by itself, in microseconds: nothing is waited for."""
    return tuple(
        copy_us(graph.tensor[step.tensor].size_bytes, machine, step.target)
        if isinstance(step, Copy)
        else kernel_us(graph.kernel[step.kernel], machine, step.device)
        for step in steps
    )
