"""What a GPU other than a real one needs to hear from the runtime.

The driver of a real GPU needs images and pointers alone. An emulated one needs the CUDA source of an image,
and may check what kernels touch against the plan. It registers here when it starts, so that the runtime need
not know of it.
"""

from __future__ import annotations

from typing import Protocol

from hybridc.ir import Graph, Plan


class EmulatedGpu(Protocol):
    """An emulated GPU of this process."""

    page_bytes: int
    """In which its driver reserves memory."""

    def provide_kernels(self, image_key: str, source: str) -> object:
        """Take the CUDA source of an image that is about to be loaded."""

    def guard_plan(self, graph: Graph, plan: Plan, address: int) -> None:
        """Hear what the kernels of a plan, whose arena begins at `address`, may touch."""


_registered: list[EmulatedGpu] = []


def register(gpu: EmulatedGpu) -> None:
    """Make `gpu` the emulated GPU of this process, in place of any other."""
    _registered[:] = [gpu]


def emulated_gpu() -> EmulatedGpu | None:
    """The emulated GPU of this process; None where there is none."""
    return _registered[0] if _registered else None
