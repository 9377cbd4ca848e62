"""How much pinned memory streamed weights get on the host: room for all of them, or for a few slots.

A copy to the GPU goes side by side with kernels only if it comes from pinned memory, whose pages the system
cannot give to anybody else. So weights that would take too much of it stay in the artifact's mapped file,
and each is read into a slot shortly before its copy.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.errors import DeviceError, PlanError
from hybridc.ir import Copy, Device, Graph, Plan, Role
from hybridc.ir.plan import ALIGNMENT_BYTES, align
from hybridc.options import format_budget
from hybridc.runtime.cgroup import bytes_left

SLOTS = 3
"""One is being read into while another is copied; the third evens out their speeds."""
LARGEST_SLOT_BYTES = 16 << 20
"""More gains nothing: such a copy takes a millisecond, a hundred times its latency."""
SMALLEST_SLOT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Staging:
    """Pinned memory of a session beside its arena."""

    size_bytes: int
    slot_count: int
    """0: it holds all streamed weights."""


def choose_staging(
    weight_bytes: Sequence[int], arena_bytes: int, limit_bytes: int | None, available_bytes: int
) -> Staging:
    """Pin all streamed weights if they fit beside the host's arena, else give them slots.

    `limit_bytes` is what the user lets a run hold of the host's memory; without it weights take at most half
    of what is available. Raises DeviceError HC408 if even the smallest slots exceed the limit.
    """
    all_bytes = sum(align(size) for size in weight_bytes)
    room_bytes = available_bytes // 2 if limit_bytes is None else limit_bytes - arena_bytes
    if all_bytes <= room_bytes:
        return Staging(all_bytes, 0)
    largest_bytes = align(max(weight_bytes, default=0))
    room_each_bytes = room_bytes // SLOTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    slot_bytes = min(largest_bytes, LARGEST_SLOT_BYTES, room_each_bytes)
    smallest_bytes = min(largest_bytes, SMALLEST_SLOT_BYTES)
    if slot_bytes < smallest_bytes and limit_bytes is not None:
        needed_bytes = least_host_bytes(weight_bytes, arena_bytes)
        what = f"a run needs at least {needed_bytes:,} bytes of host memory, but {limit_bytes:,} are allowed"
        raise DeviceError("HC408", what, remedy="raise the limit, or compile with a larger --gpu-memory")
    return Staging(SLOTS * max(slot_bytes, smallest_bytes), SLOTS)


def least_host_bytes(weight_bytes: Sequence[int], arena_bytes: int) -> int:
    """The smallest limit that `choose_staging` accepts."""
    slot_bytes = min(align(max(weight_bytes, default=0)), SMALLEST_SLOT_BYTES)
    return arena_bytes + min(sum(align(size) for size in weight_bytes), SLOTS * slot_bytes)


def arena_limit_bytes(weight_bytes: Sequence[int], limit_bytes: int | None) -> int | None:
    """What the host's arena may have of `limit_bytes`, so that the slots of streamed weights fit beside it.

    None: no limit.
    """
    return None if limit_bytes is None else max(0, limit_bytes - least_host_bytes(weight_bytes, 0))


def check_host_memory(graphs: Sequence[Graph], plans: Sequence[Plan], limit_bytes: int | None) -> None:
    """Raise PlanError HC204 if a run of one of the plans holds more host memory than `limit_bytes`."""
    for graph, plan in zip(graphs, plans, strict=True):
        copied = {step.tensor for step in plan.steps if isinstance(step, Copy)}
        weights = (graph.tensor[name] for name in sorted(copied))
        sizes = [weight.size_bytes for weight in weights if weight.role is Role.WEIGHT]
        needed_bytes = least_host_bytes(sizes, plan.arena_bytes(Device.CPU))
        if limit_bytes is not None and needed_bytes > limit_bytes:
            budget = "" if plan.budget_bytes is None else f" for {plan.budget_bytes:,} bytes of GPU memory"
            what = f"the plan{budget} needs at least {needed_bytes:,} bytes of host memory"
            raise PlanError(
                "HC204",
                f"{what}, but {limit_bytes:,} are allowed",
                remedy=f"raise --host-memory to {format_budget(needed_bytes)}, or raise --gpu-memory",
            )


def check_room(needed_bytes: int, room_bytes: int) -> None:
    """Raise DeviceError HC408 if a run needs more host memory than there is room for."""
    if needed_bytes > room_bytes:
        what = f"a run needs {needed_bytes:,} bytes of host memory, but {max(0, room_bytes):,} are available"
        remedy = "close other programs, or compile for another batch size, --host-memory or --gpu-memory"
        raise DeviceError("HC408", what, remedy=remedy)


def available_host_bytes() -> int:
    """Memory that this process can get without swapping, as the kernel estimates it, within its groups."""
    return min(_memory_bytes()["MemAvailable"], bytes_left(0)[0])


def host_room_bytes() -> int:
    """Memory that this process can get at all: with swapping, within its control groups (a container's, for
    example) and its limit (`ulimit -v`)."""
    memory = _memory_bytes()
    room_bytes = memory["MemAvailable"] + memory["SwapFree"]
    room_bytes = min(room_bytes, bytes_left(memory["SwapFree"])[1])
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes == resource.RLIM_INFINITY:
        return room_bytes
    with open("/proc/self/statm") as line:
        held_bytes = int(line.read().split()[0]) * resource.getpagesize()
    return min(room_bytes, limit_bytes - held_bytes)


def _memory_bytes() -> dict[str, int]:
    """The computer's memory, by the kernel's names of its parts."""
    with open("/proc/meminfo") as lines:
        parts = (line.split() for line in lines)
        return {name.rstrip(":"): int(number) << 10 for name, number, *_ in parts}
