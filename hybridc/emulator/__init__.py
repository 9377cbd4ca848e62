"""An NVIDIA GPU on the CPU, for machines that have none.

Fake driver and runtime libraries run CUDA kernels, compiled by g++, under a memory cap. TVM's own CUDA
runtime drives them, so an artifact made for a real GPU runs here unchanged. The emulator proves
correctness and bytes, never speed.
"""

from __future__ import annotations

from hybridc.emulator.device import (
    DeviceStatistics,
    ThreadOrder,
    has_real_driver,
    is_active,
    last_failure,
    preload,
    provide_kernels,
    register_image,
    reset,
    reset_peak,
    start,
    statistics,
)
from hybridc.emulator.kernels import image_key

__all__ = [
    "DeviceStatistics",
    "ThreadOrder",
    "has_real_driver",
    "image_key",
    "is_active",
    "last_failure",
    "preload",
    "provide_kernels",
    "register_image",
    "reset",
    "reset_peak",
    "start",
    "statistics",
]
