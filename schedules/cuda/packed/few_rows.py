"""A few rows times a packed matrix, which is read once: codes become numbers in registers.

Products of more rows are `matmul`'s: weights become numbers on their way into shared memory.
"""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir
from tvm.s_tir.schedule import LoopRV, SBlockRV

from hybridc.packed.layout import PackedLayout, read_layout
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish
from hybridc.schedules.cuda.core.loops import extent, inline_all
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of

MOST_ROWS = 8
"""Sums of a thread, one for each row: more would wait for arithmetic rather than for the matrix."""
_SLICES = 8
"""Most parts of the depth: a block of them reads several lines at once, and few sums are left to add up."""


@schedule_rule(family="matmul")
def packed_gemv(request: Request) -> Scheduled | None:
    """Accepts a product of at most `MOST_ROWS` rows with a packed matrix, and an element-wise epilogue.

    Tiling: a block has a panel of columns, a thread for each column and slice of the depth, so that a warp
    reads neighbouring bytes; a byte is read once for all rows. The slices' sums meet in shared memory.
    """
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(request.function.body, (s_tir.SBlock, blocks.append))
    layouts = [read_layout(dict(block.annotations)) for block in blocks]
    found = [(block, layout) for block, layout in zip(blocks, layouts, strict=True) if layout is not None]
    if len(found) != 1:
        return None
    ((weight, layout),) = found
    # codes, and scales, have the panel's columns as their last axis
    width = shape_of(weight.reads[0].source)[-1]
    schedule = s_tir.Schedule(request.function)
    made = attempt(packed_gemv.__name__, lambda: _scheduled(schedule, layout, width))
    return finish(schedule, packed_gemv.__name__, cuda_target(request.target)) if made else None


def _scheduled(schedule: s_tir.Schedule, layout: PackedLayout, width: int) -> bool:
    """Whether the function was one of few rows; if not it is left in an unknown state."""
    blocks = inline_all(schedule)
    if not blocks or len(blocks) > 2 or not blocks[0].is_reduction():
        return False
    product, *epilogue = (info.block_rv for info in blocks)
    *rows, _, depth = schedule.get_loops(product)
    if extent(schedule, rows) > MOST_ROWS:
        return False
    spans = extent(schedule, [depth]) // layout.span
    slices = max(s for s in range(1, min(_SLICES, BLOCK_THREADS // width) + 1) if spans % s == 0)
    parts = [None, slices, layout.codes_in_byte, layout.span // layout.codes_in_byte]
    _, part, *_ = schedule.split(depth, parts)
    partial = schedule.rfactor(part, 0)
    panel, element = _bind_results(schedule, (*epilogue, product)[0], len(rows), width, slices)
    if epilogue:
        schedule.set_scope(product, 0, "local")
        schedule.compute_at(product, element, preserve_unit_loops=True)
    _, _, _, _, first, *_ = schedule.get_loops(product)
    schedule.decompose_reduction(product, first)
    _bind_partial(schedule, partial, panel)
    return True


def _bind_results(
    schedule: s_tir.Schedule, block: SBlockRV, row_axes: int, width: int, slices: int
) -> tuple[LoopRV, LoopRV]:
    """A thread makes some elements of the result; the loops of panels and of a thread's elements."""
    loops = schedule.get_loops(block)
    rows, column, rest = loops[:row_axes], loops[row_axes], loops[row_axes + 1 :]
    row = schedule.fuse(*rows) if rows else schedule.add_unit_loop(column)
    panel, lane = schedule.split(column, [None, width])
    group, y = schedule.split(row, [None, slices])
    schedule.reorder(panel, y, lane, group, *rest)
    for loop, thread in ((panel, "blockIdx.x"), (y, "threadIdx.y"), (lane, "threadIdx.x")):
        schedule.bind(loop, thread)
    return panel, group


def _bind_partial(schedule: s_tir.Schedule, partial: SBlockRV, panel: LoopRV) -> None:
    """A thread computes the sums of a column and slice for all rows, and leaves them in shared memory."""
    shared = schedule.cache_write(partial, 0, "local")
    schedule.compute_at(shared, panel, preserve_unit_loops=True)
    schedule.set_scope(shared, 0, "shared")
    _, y, *rows, lane = schedule.get_loops(shared)
    schedule.reorder(y, lane, *rows)
    schedule.bind(y, "threadIdx.y")
    schedule.bind(lane, "threadIdx.x")
    schedule.compute_at(partial, lane, preserve_unit_loops=True)
    *spatial, outer, code, byte = schedule.get_loops(partial)[3:]
    # a byte's codes follow each other, each for all rows
    schedule.reorder(outer, byte, code, *spatial)
    for loop in (code, *spatial):
        schedule.unroll(loop)
    schedule.decompose_reduction(partial, outer)
