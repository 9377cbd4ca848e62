"""A member's plan, moved to where a group has room for it, and with copies of the weights that it lost.

The arena of a group has a region of its own for each member, with weights that always stay, and behind those
one region that all share. A plan is moved without being packed again (`ir/residents.py`): its resident
weights to one of the two regions, and what is left, without the gaps, to the shared one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridc.ir import Arena, Buffer, BufferKind, Copy, Device, Graph, Lane, Plan, Run, Step
from hybridc.ir.residents import held_bytes, is_resident_weight, moved, side_by_side
from hybridc.machine import Link


@dataclass(frozen=True, slots=True)
class Turn:
    """What a member runs."""

    first: Plan
    """After another one had its turn: weights that do not stay are copied to the GPU once more."""
    again: Plan
    """Directly after `first` or `again`: all resident weights are there."""


@dataclass(frozen=True, slots=True)
class Region:
    """What all members share, behind the weights that stay."""

    offset_bytes: int
    arena_bytes: int
    """Of the whole arena, whose end is also that of the shared region."""
    budget_bytes: int


def resident_weights(graph: Graph, plan: Plan) -> tuple[Buffer, ...]:
    """The buffers of resident weights, in the order in which GPU kernels first read them."""
    found = list(filter(is_resident_weight, plan.buffers))
    first = first_uses(graph, plan.steps, {buffer.tensor for buffer in found})
    return tuple(sorted(found, key=lambda b: (first.get(b.tensor, len(plan.steps)), b.offset_bytes)))


def first_uses(graph: Graph, steps: Sequence[Step], names: Collection[str]) -> dict[str, int]:
    """The first step on the GPU that reads each of some tensors."""
    found: dict[str, int] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Run) and step.device is Device.GPU:
            for name in graph.kernel[step.kernel].inputs:
                if name in names:
                    found.setdefault(name, position)
    return found


def upload_us(size_bytes: int, link: Link) -> float:
    """One copy to the GPU from pinned memory."""
    return link.latency_us + size_bytes / (link.h2d_gb_s * 1e3)


def place(
    graph: Graph,
    plan: Plan,
    kept: Collection[str],
    kept_offset_bytes: int,
    region: Region,
    link: Link,
) -> Turn:
    """Move a plan into the arena of a group; `kept` are the resident weights that stay, from that offset on.

    Requires: a verified plan without states on the GPU.
    """
    if not plan.arena_bytes(Device.GPU):  # at most tensors without bytes are there
        return Turn(*[replace(plan, budget_bytes=region.budget_bytes)] * 2)
    residents = resident_weights(graph, plan)
    stay = [buffer for buffer in residents if buffer.tensor in kept]
    restored = [buffer for buffer in residents if buffer.tensor not in kept]
    offsets = side_by_side(stay, kept_offset_bytes) | side_by_side(restored, region.offset_bytes)
    rest_offset_bytes = region.offset_bytes + held_bytes(restored)

    def sized(arena: Arena) -> Arena:
        return (
            replace(arena, size_bytes=region.arena_bytes)
            if arena.device is Device.GPU and arena.size_bytes
            else arena
        )

    again = replace(
        plan,
        buffers=moved(plan, offsets, rest_offset_bytes),
        arenas=tuple(map(sized, plan.arenas)),
        budget_bytes=region.budget_bytes,
    )
    return Turn(with_copies(graph, again, [buffer.tensor for buffer in restored], link), again)


def with_copies(graph: Graph, plan: Plan, names: Sequence[str], link: Link) -> Plan:
    """The plan with copies of some of its resident weights, which from there on stay to the end.

    `names` are in the order of first use. The first kernel that reads a weight waits for its copy. Copies
    are issued either all before anything else or each just before that kernel, behind the copies of the plan
    that come earlier: whichever run is predicted to be shorter.
    """
    if not names:
        return plan
    uses = first_uses(graph, plan.steps, set(names))
    late = _with_copies(graph, plan, {name: uses.get(name, 0) for name in names}, uses, link)
    early = _with_copies(graph, plan, dict.fromkeys(names, 0), uses, link)
    return min(late, early, key=lambda each: each.makespan_us)


def _with_copies(
    graph: Graph, plan: Plan, before: Mapping[str, int], uses: Mapping[str, int], link: Link
) -> Plan:
    """`before` says in front of which step each weight is copied, `uses` which step waits for it."""
    put: dict[int, list[str]] = {}
    needed: dict[int, list[str]] = {}
    for name, position in before.items():
        put.setdefault(position, []).append(name)
        needed.setdefault(uses.get(name, -1), []).append(name)
    copied: dict[str, int] = {}
    now: list[int] = []
    steps: list[Step] = []
    step_us: list[float] = []
    for position, step in enumerate(plan.steps):
        for name in put.get(position, ()):
            copied[name] = len(steps)
            steps.append(Copy(name, Device.CPU, Device.GPU))
            step_us.append(upload_us(graph.tensor[name].size_bytes, link))
        now.append(len(steps))
        waits = (*(now[wait] for wait in step.waits), *(copied[name] for name in needed.get(position, ())))
        steps.append(replace(step, waits=waits))
        step_us.append(plan.step_us[position])
    now.append(len(steps))

    def later(buffer: Buffer) -> Buffer:
        is_weight = buffer.kind is BufferKind.WEIGHT
        if is_weight and buffer.first_step < 0 and buffer.tensor in copied:
            first = copied[buffer.tensor]
        else:
            first = now[buffer.first_step] if buffer.first_step >= 0 else -1
        return replace(
            buffer, first_step=first, last_step=now[buffer.last_step] if buffer.last_step >= 0 else -1
        )

    return replace(
        plan,
        steps=tuple(steps),
        step_us=tuple(step_us),
        buffers=tuple(map(later, plan.buffers)),
        makespan_us=makespan_us(steps, step_us),
    )


def makespan_us(steps: Sequence[Step], step_us: Sequence[float]) -> float:
    """When the last step ends, where each begins as soon as its lane and what it waits for allow."""
    ends_us: list[float] = []
    lane_us = dict.fromkeys(Lane, 0.0)
    for step, us in zip(steps, step_us, strict=True):
        ends_us.append(max(lane_us[step.lane], *(ends_us[wait] for wait in step.waits), 0.0) + us)
        lane_us[step.lane] = ends_us[-1]
    return max(ends_us, default=0.0)
