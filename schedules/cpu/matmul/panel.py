"""Copying a panel of a variable B, `[K, NR]`, into the cache of the task that uses it."""

from __future__ import annotations

from dataclasses import dataclass

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
    task = _PanelCopy(product, tile, copy, batch, panel * integer(tile.columns))
    if not product.right.indices[-1].same_as(product.k):
        return loop(product.depth, task.row)
    # four elements of k at a time are transposed in registers; the rest is gathered
    depth, whole = product.depth, product.depth // COLUMNS

    def rows(block: ir.Expr) -> tirx.Stmt:
        first = block * integer(COLUMNS)
        return sequence([task.transposed(first, v) for v in range(tile.width)])

    def rest(i: ir.Expr) -> tirx.Stmt:
        return task.gathered(integer(whole * COLUMNS) + i)

    parts = [loop(whole, rows)] if whole else []
    return sequence([*parts, loop(depth % COLUMNS, rest)] if depth % COLUMNS else parts)


@dataclass(frozen=True, slots=True)
class _PanelCopy:
    """Columns of B from `start` on, into `copy`."""

    product: Product
    tile: Tile
    copy: ir.Var
    batch: ir.Expr
    start: ir.Expr

    def row(self, k: ir.Expr) -> tirx.Stmt:
        """One row of a B whose rows are contiguous (or nothing is)."""
        product, tile = self.product, self.tile

        def vector(v: ir.Expr) -> tirx.Stmt:
            def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                value = product.right_at(self.batch, k, column)
                return tirx.BufferStore(self.copy, value, [k, v * integer(tile.lanes) + lane])

            return write_columns(self.start, product.columns, tile, v, element)

        return unrolled(tile.width, vector)

    def transposed(self, k: ir.Expr, v: int) -> tirx.Stmt:
        """`COLUMNS` rows of one vector each, of a B that is stored by columns, through registers."""
        lanes = self.tile.lanes
        first = self.start + integer(v * lanes)

        def piece(lane: int) -> ir.Expr:
            column = self._existing(first + integer(lane))
            return self.product.right_at(self.batch, tirx.Ramp(k, integer(1), COLUMNS), column)

        statements, vectors = transposed(piece, lanes, "float32")
        at = tirx.Ramp(integer(v * lanes), integer(1), lanes)
        stores = [tirx.BufferStore(self.copy, value, [k + integer(i), at]) for i, value in enumerate(vectors)]
        return sequence([*statements, *stores])

    def gathered(self, k: ir.Expr) -> tirx.Stmt:
        """One row of a B that is stored by columns, element by element: fewer than `COLUMNS` are left."""
        lanes = self.tile.lanes

        def element(lane: ir.Expr) -> tirx.Stmt:
            value = self.product.right_at(self.batch, k, self._existing(self.start + lane))
            return tirx.BufferStore(self.copy, value, [k, lane])

        return unrolled(
            self.tile.width,
            lambda v: vectorized(lanes, lambda lane: element(v * integer(lanes) + lane)),
        )

    def _existing(self, column: ir.Expr) -> ir.Expr:
        return clamp(column, self.product.columns, inside=self.product.columns % self.tile.columns == 0)
