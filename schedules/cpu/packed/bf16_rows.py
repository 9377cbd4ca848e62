"""Rows that are rounded to bf16, for products with a packed matrix whose weights are rounded so, too.

Errors are those of other products of bf16 numbers (`low_precision/bf16_matmul.py`): 8 bits of either factor
stay, sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.core.dot_products import (
    Dot,
    bf16_is_faster,
    bf16_pairs_of_neighbours,
    dot_of_bf16,
)
from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, grid, integer
from hybridc.schedules.cpu.low_precision.amx import SIDE
from hybridc.schedules.cpu.packed.few_rows import FEW_ROWS
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.cpu.packed.rounded_rows import accepts_rounded_rows
from hybridc.schedules.rule import Request

_AT_ONCE = 16
"""Numbers that are rounded at once: a vector of 512 bits."""


def bf16_dot(packed: Packed, request: Request) -> Dot | None:
    """What multiplies both factors in bf16; None if that is not asked for or would not be faster, if 8 bits
    are enough of the rows, or these do not lie along the depth.

    Few rows wait for memory, not for multiply-adds: they stay as they are.
    """
    isa = request.target.isa
    dot = dot_of_bf16(isa)
    if request.precision != BF16 or dot is None or packed.rows <= FEW_ROWS:
        return None
    if not bf16_is_faster(isa, request.bf16_speedup):
        return None
    if accepts_rounded_rows(packed, request) or not packed.has_rows_along_depth:
        return None
    steps = dot.group_size * SIDE if isa.has_tiles else _AT_ONCE
    return dot if packed.depth % steps == 0 and packed.bytes_of_span % dot.group_size == 0 else None


def rounded_pairs(
    packed: Packed, dot: Dot, pairs: ir.Var, place: Callable[[ir.Expr, ir.Expr], list[ir.Expr]]
) -> tirx.Stmt:
    """The stage in front of a product that rounds its rows into `pairs`, int32.

    `place(row, n)` is that of the pair of elements 2 n and 2 n + 1. Eight pairs lie side by side.
    """
    count = _AT_ONCE // dot.group_size

    def vector(row: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        numbers = packed.row_at(row, tirx.Ramp(number * integer(_AT_ONCE), integer(1), _AT_ONCE))
        *outer, first = place(row, number * integer(count))
        at = [*outer, tirx.Ramp(first, integer(1), count)]
        return tirx.BufferStore(pairs, bf16_pairs_of_neighbours(numbers), at)

    extents = packed.rows, packed.depth // _AT_ONCE
    parallel = packed.rows * packed.depth >= PARALLEL_WORK
    return dot.within(grid(extents, lambda at: vector(*at), parallel=parallel))
