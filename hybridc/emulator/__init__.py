"""An NVIDIA GPU on the CPU, for machines that have none.

Fake driver and runtime libraries run CUDA kernels, compiled by g++, under a memory cap. TVM's own CUDA
runtime drives them, so an artifact made for a real GPU runs here unchanged. The emulator proves
correctness and bytes, never speed.
"""

from __future__ import annotations

from hybridc.emulator.counting import LaunchCounts, launches_of_steps
from hybridc.emulator.device import (
    DeviceStatistics,
    Fault,
    ThreadOrder,
    count_calls,
    count_launches,
    fail_call,
    guard_arena,
    guards_tensors,
    has_real_driver,
    is_active,
    last_failure,
    preload,
    provide_kernels,
    register_image,
    reset,
    reset_peak,
    statistics,
)
from hybridc.emulator.guards import guard_plan
from hybridc.emulator.kernels import image_key
from hybridc.emulator.process import start

__all__ = [
    "DeviceStatistics",
    "Fault",
    "LaunchCounts",
    "ThreadOrder",
    "count_calls",
    "count_launches",
    "fail_call",
    "guard_arena",
    "guard_plan",
    "guards_tensors",
    "has_real_driver",
    "image_key",
    "is_active",
    "last_failure",
    "launches_of_steps",
    "preload",
    "provide_kernels",
    "register_image",
    "reset",
    "reset_peak",
    "start",
    "statistics",
]
