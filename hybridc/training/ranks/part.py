"""The part of a plan that some of its results need, in no more memory than it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridc.ir import Arena, Buffer, BufferKind, Device, Graph, Lane, Plan, Run, Step
from hybridc.ir.plan import align
from hybridc.passes.planner.emit.timeline import timeline


def part_of(graph: Graph, plan: Plan, outputs: Sequence[str]) -> tuple[Graph, Plan]:
    """The graph and plan of these outputs alone; nothing moves to another device, lane or time.

    Requires: a verified plan. Ensures: one that the verifier accepts.
    """
    needed = _needed(graph, outputs)
    touched = {*outputs, *(name for k in needed.kernels for name in (*k.reads, *k.outputs))}
    kernels = {kernel.name for kernel in needed.kernels}
    part = replace(
        needed,
        tensors=tuple(tensor for tensor in graph.tensors if tensor.name in touched),
        inputs=tuple(name for name in graph.inputs if name in touched),
        outputs=tuple(outputs),
        loop_carried=tuple(pair for pair in graph.loop_carried if touched.issuperset(pair)),
    )
    is_kept = [s.kernel in kernels if isinstance(s, Run) else s.tensor in touched for s in plan.steps]
    steps, place = _steps(plan.steps, is_kept)
    us = [us for us, kept in zip(plan.step_us, is_kept, strict=True) if kept]
    buffers = [
        replace(buffer, first_step=place[buffer.first_step], last_step=place[buffer.last_step])
        for buffer in plan.buffers
        if buffer.tensor in (kernels if buffer.kind is BufferKind.WORKSPACE else touched)
    ]
    packed = {
        arena.device: _squeezed([b for b in buffers if b.device is arena.device]) for arena in plan.arenas
    }
    made = replace(
        plan,
        steps=tuple(steps),
        buffers=tuple(buffer for found in packed.values() for buffer in found),
        arenas=tuple(_arena(device, found) for device, found in packed.items()),
        step_us=tuple(us),
        makespan_us=timeline(steps, us)[0],
        time_bound_us=0.0,
    )
    return part, made


def _needed(graph: Graph, outputs: Sequence[str]) -> Graph:
    """With the kernels alone that the outputs follow from."""
    wanted = set(outputs)
    kept = []
    for kernel in reversed(graph.kernels):
        if not wanted.isdisjoint(kernel.outputs):
            kept.append(kernel)
            wanted.update(kernel.reads)
    return replace(graph, kernels=tuple(reversed(kept)))


def _steps(steps: Sequence[Step], is_kept: Sequence[bool]) -> tuple[list[Step], dict[int, int]]:
    """Those that are kept, and where each of all steps would be among them.

    A step that waited for one that is left out waits for what that one was behind, also on its lane.
    """
    made: list[Step] = []
    place = {-1: -1}
    behind: list[frozenset[int]] = []
    of_lane: dict[Lane, frozenset[int]] = dict.fromkeys(Lane, frozenset())
    for position, (step, kept) in enumerate(zip(steps, is_kept, strict=True)):
        waits = of_lane[step.lane].union(*(behind[wait] for wait in step.waits))
        if kept:
            others = sorted(wait for wait in waits if made[wait].lane is not step.lane)
            made.append(replace(step, waits=tuple(others)))
            waits = frozenset([len(made) - 1])
        behind.append(waits)
        of_lane[step.lane] = waits
        place[position] = len(made) - 1
    return made, place | {len(steps): len(made)}


def _squeezed(buffers: Iterable[Buffer]) -> list[Buffer]:
    """The buffers of one arena, each as far in front as bytes that no buffer has any more let it."""
    in_order = sorted(buffers, key=lambda buffer: buffer.offset_bytes)
    made, end, moved = [], 0, 0
    for buffer in in_order:
        moved += max(buffer.offset_bytes - end, 0)
        end = max(end, align(buffer.end_bytes))
        made.append(replace(buffer, offset_bytes=buffer.offset_bytes - moved))
    return made


def _arena(device: Device, buffers: Sequence[Buffer]) -> Arena:
    size_bytes = max((align(buffer.end_bytes) for buffer in buffers), default=0)
    changes = sorted(
        change
        for buffer in buffers
        for change in (
            (buffer.first_step, 1, align(buffer.size_bytes)),
            (buffer.last_step + 1, 0, -align(buffer.size_bytes)),
        )
    )
    held = most = 0
    for _, _, size in changes:
        held += size
        most = max(most, held)
    return Arena(device, size_bytes, min(most, size_bytes))
