"""Matrix products with their epilogue: register-blocked through shared memory, or a block per row."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.gpu import GEMV, GeneralReduction, Matmul, Reduction
from tvm.target import Target

from hybridc.schedules.cuda.core.anchor import Anchor, find_anchor
from hybridc.schedules.cuda.core.launch import by_dlight
from hybridc.schedules.cuda.tile.schedule import tiled
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

SMALLEST_SIDE = 4
"""Below this many rows or columns a tile is mostly padding, and a product is bound by memory anyway."""
MICRO = 4
"""Rows and columns of a thread's register tile: 16 accumulators, 8 loads for 16 multiply-adds."""
TILE_THREADS = 128
"""Threads of a tile: with 16 accumulators each, eight tiles fit on a multiprocessor."""
THREAD_DEPTH = 5
"""Position of the loop over threadIdx.x in dlight's Matmul: below two of blocks, two virtual, threadIdx.y."""
DEPTH = 16
"""Steps of the reduction that are staged in shared memory at a time."""


class TiledMatmul(Matmul):
    """dlight's Matmul with a tile that fits the shape: 2048 elements, as square as the sides allow."""

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor

    def get_configs(self, target: Target) -> Matmul.Config:
        """Tile sizes for this product; dlight's own are one size for all."""
        across = tile_columns(self.anchor) // MICRO
        return Matmul.Config(
            block_size_x=TILE_THREADS // across,
            block_size_y=across,
            micro_size_x=MICRO,
            micro_size_y=MICRO,
            micro_size_k=DEPTH,
            vector_size=2,
            unroll=0,
            storage_align=True,
        )

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The schedule with the innermost loops unrolled; None where dlight does not accept the function."""
        schedule = super().apply(func, target, tunable)
        if isinstance(schedule, s_tir.Schedule):
            # `#pragma unroll` keeps the source a twentieth of what unrolling in TVM makes of it
            thread = schedule.get_loops(schedule.get_sblock(f"{self.anchor.name}_update"))[THREAD_DEPTH]
            schedule.annotate(thread, "pragma_auto_unroll_max_step", MICRO * MICRO * DEPTH)
            schedule.annotate(thread, "pragma_unroll_explicit", 0)
        return schedule


def tile_columns(anchor: Anchor) -> int:
    """Columns of a tile of TILE_THREADS * MICRO * MICRO elements: the choice with the least padding.

    Of equals the one nearest to square, which loads the least for each multiply-add.
    """

    def padded(columns: int) -> int:
        rows = TILE_THREADS * MICRO * MICRO // columns
        return (-(-anchor.rows // rows) * rows) * (-(-anchor.columns // columns) * columns)

    # the order decides among equals: 64 columns by 32 rows come first
    return min((64, 32, 16, 128), key=padded)


@schedule_rule(family="matmul")
def matmul(request: Request) -> Scheduled | None:
    """Accepts one product of two matrices, batched or not, with element-wise producers and epilogue.

    Tiling: that of `cuda/tile` in float32. Where factors have other types, a block computes a tile of 2048
    outputs in registers, 4 x 4 a thread, from slices of depth 16 staged in shared memory. A vector times a
    matrix is bound by reading the matrix: a block reduces a row.
    """
    anchor = find_anchor(request.function)
    if anchor is None or anchor.slides:
        return None
    if min(anchor.rows, anchor.columns) >= SMALLEST_SIDE:
        made = tiled(request, anchor, "matmul") or by_dlight((TiledMatmul(anchor),), request, "matmul")
        if made is not None:
            return made
    return by_dlight((GEMV(), Reduction(), GeneralReduction()), request, "matmul")
