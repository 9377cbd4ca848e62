"""What the GPU of this process has free for an arena: `--gpu-memory auto`."""

from __future__ import annotations

import ctypes

import tvm

from hybridc import emulator
from hybridc.errors import DeviceError
from hybridc.runtime.libraries import CUDA_RUNTIME
from hybridc.runtime.memory import gpu_page_bytes

# The context is in what is not free: to ask makes one, as large as that of the process that will run. What is
# left is a round number: no driver tells what it will take for machine code and for local memory of kernels.
RESERVE_BYTES = 128 << 20
"""Left to loaded modules and to what CUDA takes as kernels are launched."""
_LARGEST_RESERVE = 8
"""Of little memory no more than an eighth is left."""


def arena_budget_bytes() -> int:
    """The free memory of the GPU less the reserve, in whole pages of its driver.

    Raises DeviceError HC402 without a GPU.
    """
    if not emulator.is_active() and emulator.has_real_driver():
        emulator.preload()  # NVIDIA's own libraries
    if not (emulator.is_active() or emulator.has_real_driver()) or not tvm.cuda(0).exist:
        remedy = "give the amount: for example --gpu-memory 4GiB, or 50%"
        raise DeviceError("HC402", "--gpu-memory auto: this computer has no GPU to ask", remedy=remedy)
    tvm.cuda(0).sync()  # makes the context, if there is none yet
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = ctypes.CDLL(CUDA_RUNTIME).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    if code != 0:
        remedy = "check that the GPU works, or give the amount: --gpu-memory 4GiB"
        raise DeviceError("HC407", f"the device failed: cudaMemGetInfo: error {code}", remedy=remedy)
    return budget_of(free.value, gpu_page_bytes())


def budget_of(free_bytes: int, page_bytes: int) -> int:
    """What of the free memory an arena may have, so that with its last page, too, it is not more."""
    left_bytes = free_bytes - min(RESERVE_BYTES, free_bytes // _LARGEST_RESERVE)
    return left_bytes // page_bytes * page_bytes
