"""Sums and extrema of windows, of each channel by itself: a thread computes results whose windows overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from hybridc.schedules.cuda.core.loops import bind, threads_apart
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import first_step

ENOUGH_THREADS = 1 << 16
"""With fewer, multiprocessors would wait for loads, whose number a thread's results share."""
MOST_RESULTS = 8
"""Of a thread: so many of its own share what it loads of a column."""
MOST_UNROLLED = 128
"""Multiply-adds that are written out, as arrays in registers need it."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Of an image: `results` along it, which read at `result * stride + tap * dilation`."""

    number: int
    """Behind images and channels."""
    results: int
    taps: int
    stride: int
    dilation: int

    def rows(self, count: int) -> int:
        """Of the image that so many neighbouring results read."""
        return (count - 1) * self.stride + (self.taps - 1) * self.dilation + 1


def windows_shared(function: tirx.PrimFunc, anchor: str) -> s_tir.Schedule | None:
    """The reduction `anchor` of windows, with what is around it, as one launch; None where results of a
    thread would not share what they read, or threads would be few.

    A thread has neighbouring results along the last axis but one, each of a row further down, so that threads
    side by side read what lies side by side: of a window of 7 rows and 4 results it loads 10 rows, not 28.
    """
    return attempt("sharing windows", lambda: _scheduled(s_tir.Schedule(function), anchor))


def _scheduled(schedule: s_tir.Schedule, anchor: str) -> s_tir.Schedule | None:
    sums = schedule.get_sblock(anchor)
    block = schedule.get(sums)
    spatial = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.DataPar]
    steps = [v for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce]
    # images and channels, then the axes of an image; of a convolution channels of the group, then taps
    axes = len(spatial) - 2
    if axes < 1 or len(steps) - axes not in (0, 1) or len(block.iter_vars) != len(spatial) + len(steps):
        return None
    found = _window(block, spatial, steps[-axes:], max(axes - 2, 0))
    if found is None:
        return None
    operand, axis = found
    count = _count(axis, math.prod(int(v.dom.extent) for v in spatial))
    if count == 1:
        return None
    held = schedule.cache_read(sums, operand, "local")
    epilogue = _inlined(schedule, sums, held)
    _tile(schedule, sums, held, epilogue, axis.number, count)
    return schedule


def _window(
    block: s_tir.SBlock, spatial: list[tirx.IterVar], taps: list[tirx.IterVar], number: int
) -> tuple[int, _Axis] | None:
    """Which operand has windows, and its axis."""
    result, tap, axes = spatial[number + 2], taps[number], len(spatial) - 2
    variables = [v.var for v in block.iter_vars]
    for operand, read in enumerate(block.reads):
        if len(read.region) < axes:  # a table of one axis, as of what resizing reads
            continue
        index = read.region[number - axes].min
        stride, dilation = (first_step(index, v.var, variables) for v in (result, tap))
        if stride and dilation:
            extents = int(result.dom.extent), int(tap.dom.extent)
            return operand, _Axis(number, *extents, stride, dilation)
    return None


def _count(axis: _Axis, total: int) -> int:
    """Results of a thread that load the least for all of the axis; 1: as many as results by themselves."""
    fitting = [
        n
        for n in range(2, min(MOST_RESULTS, axis.results) + 1)
        if total // n >= ENOUGH_THREADS and n * axis.taps <= MOST_UNROLLED
    ]
    loads = {n: -(-axis.results // n) * axis.rows(n) for n in fitting}
    best = min(fitting, key=lambda n: loads[n], default=1)
    return best if fitting and 3 * loads[best] <= 2 * axis.results * axis.taps else 1


def _inlined(schedule: s_tir.Schedule, sums: SBlockRV, held: SBlockRV) -> SBlockRV:
    """The last block, all others but these inlined; one that copies the sums where they are the result."""
    outputs = schedule.mod["main"].params
    kept = {schedule.get(block).name_hint for block in (sums, held)}
    epilogue: SBlockRV | None = None
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if schedule.get(block).name_hint in kept:
            continue
        if any(write.source.same_as(p) for write in schedule.get(block).writes for p in outputs):
            epilogue = block
        else:
            schedule.compute_inline(block)
    return schedule.cache_write(sums, 0, "local") if epilogue is None else epilogue


def _tile(
    schedule: s_tir.Schedule, sums: SBlockRV, held: SBlockRV, epilogue: SBlockRV, number: int, count: int
) -> None:
    kinds = [v.iter_type for v in schedule.get(sums).iter_vars]
    loops = list(zip(schedule.get_loops(sums), kinds, strict=True))
    spatial: list[LoopRV] = [loop for loop, kind in loops if kind == tirx.IterVar.DataPar]
    steps: list[LoopRV] = [loop for loop, kind in loops if kind == tirx.IterVar.CommReduce]
    tap = steps.pop(number - (len(spatial) - 2))
    spatial[number + 2], inner = schedule.split(spatial[number + 2], [None, count])
    schedule.reorder(*spatial, *steps, tap, inner)
    thread = bind(schedule, spatial, threads_apart(schedule, spatial))
    schedule.set_scope(sums, 0, "local")
    schedule.reverse_compute_at(epilogue, thread, preserve_unit_loops=True)
    schedule.compute_at(held, steps[-1] if steps else thread, preserve_unit_loops=True)
    for loop in (tap, inner):
        schedule.unroll(loop)
    for block in (epilogue, held, schedule.decompose_reduction(sums, (*steps, tap)[0])):
        _unroll(schedule, block, schedule.get_loops(sums) if block is held else [])


def _unroll(schedule: s_tir.Schedule, block: SBlockRV, others: list[LoopRV]) -> None:
    """Loops of a thread that are the block's alone: arrays in registers need constant indices."""
    shared = [schedule.get(loop) for loop in others]
    for loop in schedule.get_loops(block):
        node = schedule.get(loop)
        if node.kind == tirx.ForKind.SERIAL and not any(node.same_as(other) for other in shared):
            schedule.unroll(loop)
