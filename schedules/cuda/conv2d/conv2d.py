"""Convolutions of any rank with their epilogue: implicit GEMM, or direct where channels do not mix."""

from __future__ import annotations

from tvm import s_tir

from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import by_dlight, cuda_target, finish
from hybridc.schedules.cuda.core.loops import inline_all, thread_per_result
from hybridc.schedules.cuda.core.windows import windows_shared
from hybridc.schedules.cuda.matmul.matmul import SMALLEST_SIDE, TiledMatmul
from hybridc.schedules.cuda.tile.schedule import tiled
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

FEW_OUTPUTS = 2048
"""Below this many outputs a thread for each leaves a GPU idle: let a block share the reduction."""


@schedule_rule(family="conv2d")
def conv2d(request: Request) -> Scheduled | None:
    """Accepts a product in which a window slides: convolution 1-D to 3-D, transposed, dilated, grouped, and
    gradients of its weights, whose depth are all positions of all images.

    Dense or of groups: implicit GEMM in the tiles of `cuda/tile`, rows are output channels (of a group) and
    columns output positions; the padding is computed while a slice is staged in shared memory, so that no
    padded copy is written. Depthwise ones, and those of very few channels, have no operand worth sharing: a
    thread computes outputs whose windows overlap in registers, neighbours read neighbouring columns.
    """
    anchor = find_anchor(request.function)
    if anchor is None or not anchor.slides:
        return None
    made = tiled(request, anchor, "conv2d", SMALLEST_SIDE)
    if made is None and min(anchor.rows, anchor.columns) >= SMALLEST_SIDE:
        made = by_dlight((TiledMatmul(anchor),), request, "conv2d")
    if made is not None:
        return made
    if anchor.outputs < FEW_OUTPUTS and anchor.reduction >= FEW_OUTPUTS:
        return None
    shared = windows_shared(request.function, anchor.name)
    if shared is not None:
        return finish(shared, "conv2d", cuda_target(request.target))
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if blocks is None or not thread_per_result(schedule, blocks):
        return None
    return finish(schedule, "conv2d", cuda_target(request.target))
