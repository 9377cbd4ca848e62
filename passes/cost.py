"""Predicted times: of kernels and copies by themselves, and of a run with its lanes side by side."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.ir import Copy, Device, Graph, Kernel, Lane, Step
from hybridc.machine import Machine


def kernel_us(kernel: Kernel, machine: Machine, device: Device) -> float:
    """Time of one call: the roofline max(flops / peak, bytes / bandwidth), and a launch.

    The roofline is from Williams, Waterman and Patterson, CACM 52(4), 2009.
    """
    processor = machine.processor(device)
    compute_us = kernel.flops / (processor.peak_gflops * 1e3)
    memory_us = kernel.bytes_moved / (processor.bandwidth_gb_s * 1e3)
    return max(compute_us, memory_us) + processor.launch_us


def copy_us(size_bytes: int, machine: Machine, target: Device) -> float:
    """Time of one copy over the link into the memory of `target`."""
    gb_s = machine.link.h2d_gb_s if target is Device.GPU else machine.link.d2h_gb_s
    return size_bytes / (gb_s * 1e3) + machine.link.latency_us


def step_times_us(graph: Graph, steps: Sequence[Step], machine: Machine) -> tuple[float, ...]:
    """Time of each step by itself."""
    return tuple(
        copy_us(graph.tensor[step.tensor].size_bytes, machine, step.target)
        if isinstance(step, Copy)
        else kernel_us(graph.kernel[step.kernel], machine, step.device)
        for step in steps
    )


def timeline(
    steps: Sequence[Step], step_us: Sequence[float]
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """When each step starts and ends: `(makespan_us, ((start_us, end_us), ...))`.

    A step starts once the step before it on its lane, its waits, and all CPU steps listed before it
    have ended. The last because CPU kernels run on the host's only thread, and what is listed behind
    them is not issued before they return.
    """
    lane_end_us = dict.fromkeys(Lane, 0.0)
    spans: list[tuple[float, float]] = []
    for step, duration_us in zip(steps, step_us, strict=True):
        start_us = max(lane_end_us[step.lane], lane_end_us[Lane.CPU])
        for wait in step.waits:
            start_us = max(start_us, spans[wait][1])
        end_us = start_us + duration_us
        lane_end_us[step.lane] = end_us
        spans.append((start_us, end_us))
    return max(lane_end_us.values()), tuple(spans)
