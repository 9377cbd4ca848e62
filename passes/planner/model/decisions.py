"""What the planner decides, and nothing that follows from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decisions:
    """A point of the search space of one `Problem`."""

    on_cpu: tuple[bool, ...]
    """For each kernel, in order."""
    keep: tuple[bool, ...]
    """For each gap: the tensor stays in the GPU's memory from its start to its end. If it does not and
    the kernel at its end runs on the GPU, it is fetched from the host, and was offloaded before.

    A weight whose first gap is kept is resident from load to unload, and all its gaps are kept.
    """
