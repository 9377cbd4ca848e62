"""Copying a panel of a variable B, `[K, NR]`, into the cache of the task that uses it."""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    Tile,
    clamp,
    integer,
    loop,
    sequence,
    unrolled,
    vectorized,
    write_columns,
)
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.matmul.read import Product


def copy_panel(product: Product, tile: Tile, copy: ir.Var, batch: ir.Expr, panel: ir.Expr) -> tirx.Stmt:
    """Fill `copy[k, column]`; what lies behind B's last column holds anything, and is never written out."""
    start = panel * integer(tile.columns)
    if not product.right.indices[-1].same_as(product.k):
        return loop(product.depth, lambda k: _row(product, tile, copy, batch, start, k))
    depth, whole = product.depth, product.depth // COLUMNS

    def rows(block: ir.Expr) -> tirx.Stmt:
        first = block * integer(COLUMNS)
        return sequence([_transposed(product, tile, copy, batch, start, first, v) for v in range(tile.width)])

    def rest(i: ir.Expr) -> tirx.Stmt:
        return _gathered(product, tile, copy, batch, start, integer(whole * COLUMNS) + i)

    parts = [loop(whole, rows)] if whole else []
    return sequence([*parts, loop(depth % COLUMNS, rest)] if depth % COLUMNS else parts)


def _row(product: Product, tile: Tile, copy: ir.Var, batch: ir.Expr, start: ir.Expr, k: ir.Expr) -> tirx.Stmt:
    """One row of a B whose rows are contiguous (or nothing is)."""

    def vector(v: ir.Expr) -> tirx.Stmt:
        def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            value = product.right_at(batch, k, column)
            return tirx.BufferStore(copy, value, [k, v * integer(tile.lanes) + lane])

        return write_columns(start, product.columns, tile, v, element)

    return unrolled(tile.width, vector)


def _transposed(
    product: Product, tile: Tile, copy: ir.Var, batch: ir.Expr, start: ir.Expr, k: ir.Expr, v: int
) -> tirx.Stmt:
    """`COLUMNS` rows of one vector each, of a B that is stored by columns, through registers."""
    first = start + integer(v * tile.lanes)

    def piece(lane: int) -> ir.Expr:
        column = _existing(product, tile, first + integer(lane))
        return product.right_at(batch, tirx.Ramp(k, integer(1), COLUMNS), column)

    statements, vectors = transposed(piece, tile.lanes, "float32")
    at = tirx.Ramp(integer(v * tile.lanes), integer(1), tile.lanes)
    stores = [tirx.BufferStore(copy, value, [k + integer(i), at]) for i, value in enumerate(vectors)]
    return sequence([*statements, *stores])


def _gathered(
    product: Product, tile: Tile, copy: ir.Var, batch: ir.Expr, start: ir.Expr, k: ir.Expr
) -> tirx.Stmt:
    def element(lane: ir.Expr) -> tirx.Stmt:
        value = product.right_at(batch, k, _existing(product, tile, start + lane))
        return tirx.BufferStore(copy, value, [k, lane])

    return unrolled(tile.width, lambda v: vectorized(
        tile.lanes, lambda lane: element(v * integer(tile.lanes) + lane)))  # fmt: skip


def _existing(product: Product, tile: Tile, column: ir.Expr) -> ir.Expr:
    return clamp(column, product.columns, inside=product.columns % tile.columns == 0)
