"""Weights that stay on the GPU from run to run, and a plan with them at other places.

A resident weight is in its plan's arena during the whole run, so no other buffer ever has its bytes: without
it what lies above can move down by its size. So a plan is moved without being packed again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from hybridc.ir.graph import Device
from hybridc.ir.plan import Buffer, BufferKind, Plan, align


def is_resident_weight(buffer: Buffer) -> bool:
    """Whether it holds a weight that is on the GPU when a run begins."""
    return buffer.device is Device.GPU and buffer.kind is BufferKind.WEIGHT and buffer.first_step < 0


def held_bytes(buffers: Sequence[Buffer]) -> int:
    """What buffers need side by side."""
    return sum(align(buffer.size_bytes) for buffer in buffers)


def side_by_side(buffers: Sequence[Buffer], offset_bytes: int) -> dict[str, int]:
    """By tensor, where each is if they lie in this order from an offset on."""
    sizes = (align(buffer.size_bytes) for buffer in buffers)
    return dict(zip((b.tensor for b in buffers), accumulate(sizes, initial=offset_bytes), strict=False))


def moved(plan: Plan, offsets: Mapping[str, int], rest_offset_bytes: int) -> tuple[Buffer, ...]:
    """The buffers of a plan, resident weights at these offsets, the rest of the GPU's from another one on,
    without the gaps.

    Requires: a verified plan. Nothing of the rest lies above where it did, if that begins behind as many
    bytes as the weights hold.
    """
    residents = sorted(filter(is_resident_weight, plan.buffers), key=lambda each: each.offset_bytes)
    starts = [buffer.offset_bytes for buffer in residents]
    removed = list(accumulate((align(buffer.size_bytes) for buffer in residents), initial=0))

    def at_its_place(buffer: Buffer) -> Buffer:
        if buffer.device is not Device.GPU:
            return buffer
        if is_resident_weight(buffer):
            return replace(buffer, offset_bytes=offsets[buffer.tensor])
        below = removed[bisect_left(starts, buffer.offset_bytes)]
        return replace(buffer, offset_bytes=rest_offset_bytes + buffer.offset_bytes - below)

    return tuple(map(at_its_place, plan.buffers))
