"""What the GPU's memory is used for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from hybridc.ir import Buffer, BufferKind, Device, Plan


class ByteClass(StrEnum):
    """Kinds of bytes."""

    RESIDENT = "weights, resident"
    STREAMED = "weights, streamed"
    STATES = "states, resident"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class ByteRow:
    """GPU memory of one class, in aligned bytes."""

    byte_class: ByteClass
    buffers: int
    most_bytes: int
    """The most that it holds at one step."""
    peak_bytes: int
    """What it holds at the step at which the GPU holds most in all."""


def class_of(plan: Plan, buffer: Buffer) -> ByteClass:
    """Which class a buffer counts to."""
    if buffer.kind is BufferKind.WORKSPACE:
        return ByteClass.WORKSPACE
    if buffer.kind is BufferKind.TENSOR:
        stays = buffer.first_step < 0 or buffer.last_step >= len(plan.steps)
        return ByteClass.STATES if buffer.device is Device.GPU and stays else ByteClass.ACTIVATIONS
    lasting = buffer.first_step < 0 and buffer.last_step >= len(plan.steps)
    return ByteClass.RESIDENT if lasting else ByteClass.STREAMED


def byte_rows(plan: Plan) -> tuple[ByteRow, ...]:
    """Classes of which there are buffers on the GPU. Bytes taken over in place count once."""
    held: dict[ByteClass, list[Buffer]] = {}
    for buffer in plan.buffers:
        if buffer.device is Device.GPU and buffer.size_bytes:
            held.setdefault(class_of(plan, buffer), []).append(buffer)
    live = {found: live_bytes(plan, buffers) for found, buffers in held.items()}
    total = [sum(column) for column in zip(*live.values(), strict=True)]
    peak = max(range(len(total)), key=total.__getitem__, default=0)
    return tuple(
        ByteRow(found, len(held[found]), max(live[found]), live[found][peak])
        for found in ByteClass
        if found in held
    )


def live_bytes(plan: Plan, buffers: Sequence[Buffer]) -> list[int]:
    """Bytes that some buffers of one device hold before the first step, at each step, and after the last."""
    change = [0] * (len(plan.steps) + 3)
    begins: dict[tuple[int, int], Buffer] = {}
    for buffer in buffers:
        change[buffer.first_step + 1] += buffer.size_bytes
        change[buffer.last_step + 2] -= buffer.size_bytes
        begins[buffer.first_step, buffer.offset_bytes] = buffer
    live = list(accumulate(change[:-1]))
    for buffer in buffers:
        heir = begins.get((buffer.last_step, buffer.offset_bytes))
        if heir is not None and heir is not buffer:
            live[buffer.last_step + 1] -= min(heir.size_bytes, buffer.size_bytes)
    return live
