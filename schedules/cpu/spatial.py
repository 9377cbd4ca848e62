"""Scheduling in place of blocks that are all spatial, around a reduction that is scheduled in place too."""

from __future__ import annotations

import math

from tvm import ir, s_tir, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.nest import loads, uses

PARALLEL_ELEMENTS = 1 << 15
"""Below this a parallel region (about a microsecond) is not worth it."""
LINE_ELEMENTS = 1 << 10
"""Elements of a task's inner loop where everything fuses into one long line."""


def schedule_spatial(schedule: s_tir.Schedule, rv: s_tir.schedule.SBlockRV, vector_bits: int) -> None:
    """Line, vector and tasks of one spatial block that still has its own loops."""
    loops = schedule.get_loops(rv)
    if not loops:
        return
    store = schedule.get(rv).body
    iterators = [v.var for v in schedule.get(rv).iter_vars]
    extents = [int(schedule.get(loop).extent) for loop in loops]
    total = math.prod(extents)
    trailing = _line_axes(store, iterators, extents) if len(loops) == len(iterators) else 1
    line = schedule.fuse(*loops[-trailing:])
    outer = loops[:-trailing]
    length = math.prod(extents[-trailing:])
    if not outer and length > LINE_ELEMENTS:
        step = next((s for s in range(LINE_ELEMENTS, 63, -64) if length % s == 0), LINE_ELEMENTS)
        task, line = schedule.split(line, [None, step])
        outer, length = [task], step if length % step == 0 else 0
    lanes = vector_bits // max(dtype_bits(str(store.buffer.dtype)), 32)
    if length and length % lanes == 0 and _vectorizable(store, iterators[-1]):
        _, vector = schedule.split(line, [None, lanes])
        schedule.vectorize(vector)
    if outer and total >= PARALLEL_ELEMENTS:
        schedule.parallel(schedule.fuse(*outer))


def _line_axes(store: tirx.BufferStore, iterators: list[ir.Var], extents: list[int]) -> int:
    """How many trailing axes every operand walks in memory order, or does not depend on at all."""
    operands = [(load.source, load.indices) for load in loads(store.value)]
    operands.append((store.buffer, store.indices))
    count = 1
    while count < len(iterators):
        axes = iterators[-count - 1 :]
        if not all(_walks(buffer, indices, axes, extents[-count - 1 :]) for buffer, indices in operands):
            break
        count += 1
    return count


def _walks(buffer: ir.Var, indices: list[ir.Expr], axes: list[ir.Var], extents: list[int]) -> bool:
    if not any(uses(index, axis) for index in indices for axis in axes):
        return True
    shape = [int(e) for e in buffer.shape][-len(axes) :]
    if len(indices) < len(axes) or shape[1:] != extents[1:]:
        return False
    leading = indices[: -len(axes)]
    if any(uses(index, axis) for index in leading for axis in axes):
        return False
    return all(index.same_as(axis) for index, axis in zip(indices[-len(axes) :], axes, strict=True))


def _vectorizable(store: tirx.BufferStore, innermost: ir.Var) -> bool:
    """Whole vectors of every operand: no index computed from the lane, and no condition on it."""
    for load in [*loads(store.value), tirx.BufferLoad(store.buffer, store.indices)]:
        if not load.indices:
            continue
        if any(uses(index, innermost) for index in load.indices[:-1]):
            return False
        last = load.indices[-1]
        if uses(last, innermost) and not last.same_as(innermost):
            return False
    return "if_then_else" not in str(store.value)
