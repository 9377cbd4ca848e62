"""Machines around a profile: what a plan must stand if the computer is not as the profile says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridc.ir import Device
from hybridc.machine import Machine, Processor


@dataclass(frozen=True, slots=True)
class Scenario:
    """Factors to a profile's figures."""

    gpu: float = 1.0
    """Of the speed of kernels on the GPU."""
    cpu: float = 1.0
    link: float = 1.0
    """Of both bandwidths."""
    launch: float = 1.0
    """Of the time of a launch, and of the latency of a copy."""
    kept: float = 1.0
    """What is left of each memory's bandwidth, and of the link's, to what uses it at once."""


def scaled(machine: Machine, scenario: Scenario) -> Machine:
    """The machine of a scenario. Measured and estimated times of functions change as predicted ones do."""
    link = replace(
        machine.link,
        h2d_gb_s=machine.link.h2d_gb_s * scenario.link,
        d2h_gb_s=machine.link.d2h_gb_s * scenario.link,
        latency_us=machine.link.latency_us * scenario.launch,
        both_directions=machine.link.both_directions * scenario.kept,
    )
    return replace(
        machine,
        gpu=_scaled(machine.gpu, scenario.gpu, scenario),
        cpu=_scaled(machine.cpu, scenario.cpu, scenario),
        link=link,
        measured_us=_times_us(machine, machine.measured_us, scenario),
        estimated_us=_times_us(machine, machine.estimated_us, scenario),
    )


def _scaled(processor: Processor, speed: float, scenario: Scenario) -> Processor:
    return replace(
        processor,
        peak_gflops=processor.peak_gflops * speed,
        bandwidth_gb_s=processor.bandwidth_gb_s * speed,
        launch_us=processor.launch_us * scenario.launch,
        # a slow kernel demands less: the memory itself is what it was
        shared_gb_s=processor.together_gb_s * scenario.kept,
    )


def _times_us(
    machine: Machine, times_us: Mapping[tuple[str, Device], float], scenario: Scenario
) -> dict[tuple[str, Device], float]:
    speeds = {Device.GPU: scenario.gpu, Device.CPU: scenario.cpu}
    found = {}
    for (function, device), us in times_us.items():
        launch_us = min(us, machine.processor(device).launch_us)
        found[function, device] = launch_us * scenario.launch + (us - launch_us) / speeds[device]
    return found
