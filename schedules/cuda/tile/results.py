"""What becomes of the sums in a thread's registers: epilogue and stores, four neighbours at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import loads, replace_loads, substitute, uses
from hybridc.schedules.cuda.tile.access import WIDTH, flat_index, is_wide
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.shapes import index_shape

Values = Mapping[ir.Var, ir.Expr]


@dataclass(frozen=True, slots=True)
class Results:
    """How results are stored: `wide` in 128 bits, with what the epilogue reads for each of them read so into
    registers of its own, `inputs`, one for each of `reads`."""

    product: Product
    wide: bool
    reads: tuple[ir.TensorLoad, ...] = ()
    inputs: tuple[ir.Var, ...] = ()

    @property
    def width(self) -> int:
        """Columns, in whole quads."""
        return -(-self.product.columns.size // WIDTH) * WIDTH

    def partial(self, parts: int) -> ir.Var:
        """Memory for sums of parts of the depth: `[batch * parts, rows, columns]`."""
        shape = index_shape((self.product.batch.size * parts, self.product.rows.size, self.width))
        return tirx.decl_buffer(shape, "float32", "partial", layout=None)

    def store_tile(
        self, tile: Tile, sums: ir.Var, batch: Values, row: Sequence[ir.Expr], column: Sequence[ir.Expr]
    ) -> tirx.Stmt:
        """The results of a thread; `row` and `column` are the first of the block, and the thread's place."""

        def quad(start: ir.Expr, r: ir.Expr, c: ir.Expr) -> tirx.Stmt:
            return self.store_quad(sums, start, batch, r, c)

        return self._each_quad(tile, row, column, quad)

    def store_partial(
        self,
        tile: Tile,
        sums: ir.Var,
        partial: ir.Var,
        slot: ir.Expr,
        row: Sequence[ir.Expr],
        column: Sequence[ir.Expr],
    ) -> tirx.Stmt:
        """The sums of a thread, into the part `slot` of `partial`."""

        def quad(start: ir.Expr, r: ir.Expr, c: ir.Expr) -> tirx.Stmt:
            def lane(number: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(
                    partial, tirx.BufferLoad(sums, [start + number]), [slot, r, c + number]
                )

            return vectorized(WIDTH, lane)

        return self._each_quad(tile, row, column, quad)

    def _each_quad(
        self,
        tile: Tile,
        row: Sequence[ir.Expr],
        column: Sequence[ir.Expr],
        store: Callable[[ir.Expr, ir.Expr, ir.Expr], tirx.Stmt],
    ) -> tirx.Stmt:
        """`store` for each four neighbours that exist: the first one's sum, row and column."""
        rows, columns = self.product.rows.size, self.product.columns.size

        def down(i: ir.Expr) -> tirx.Stmt:
            group, rest = tirx.floordiv(i, integer(WIDTH)), tirx.floormod(i, integer(WIDTH))
            r = row[0] + tile.row(row[1], group) + rest

            def across(j: ir.Expr) -> tirx.Stmt:
                c = column[0] + tile.column(column[1], j)
                stored = store(i * integer(tile.across) + j * integer(WIDTH), r, c)
                if columns % tile.columns:
                    return tirx.IfThenElse(c < integer(columns), stored, None)
                return stored

            whole = unrolled(tile.across // WIDTH, across)
            return tirx.IfThenElse(r < integer(rows), whole, None) if rows % tile.rows else whole

        return unrolled(tile.down, down)

    def store_quad(
        self, sums: ir.Var, start: ir.Expr, batch: Values, row: ir.Expr, column: ir.Expr
    ) -> tirx.Stmt:
        """Four results whose sums are in registers from `start` on; column is a multiple of four."""
        product, store = self.product, self.product.store
        spot = {**batch, **product.rows.at(row)}
        if not self.wide:

            def one(lane: ir.Expr) -> tirx.Stmt:
                point = {**spot, **product.columns.at(column + lane)}
                stored = self.stored(point, tirx.BufferLoad(sums, [start + lane]))
                if product.columns.size % WIDTH:
                    return tirx.IfThenElse(column + lane < integer(product.columns.size), stored, None)
                return stored

            return unrolled(WIDTH, one)
        spot |= product.columns.at(column)
        last = product.columns.axes[-1]

        def moved(lane: ir.Expr) -> Values:
            return {**spot, last: spot[last] + lane}

        statements: list[tirx.Stmt] = []
        for read, own in zip(self.reads, self.inputs, strict=True):
            statements.append(_copied(read, own, moved))

        def computed(lane: ir.Expr) -> tirx.Stmt:
            at = [start + lane]
            return tirx.BufferStore(sums, self._value(spot, tirx.BufferLoad(sums, at), lane), at)

        def stored(lane: ir.Expr) -> tirx.Stmt:
            indices = [substitute(i, moved(lane)) for i in store.indices]
            return tirx.BufferStore(store.buffer, tirx.BufferLoad(sums, [start + lane]), indices)

        if not _is_load_of(store.value, product.total):
            statements.append(unrolled(WIDTH, computed))
        statements.append(vectorized(WIDTH, stored))
        return sequence(statements)

    def stored(self, point: Values, total: ir.Expr) -> tirx.BufferStore:
        """One result, of a sum."""
        store = self.product.store
        return tirx.BufferStore(
            store.buffer, self._value(point, total), [substitute(i, point) for i in store.indices]
        )

    def _value(self, point: Values, total: ir.Expr, lane: ir.Expr | None = None) -> ir.Expr:
        """The epilogue of a sum; with a `lane`, inputs are in registers."""

        def value_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
            if buffer.same_as(self.product.total):
                return total
            for read, own in zip(self.reads, self.inputs, strict=True):
                same = buffer.same_as(read.source) and all(
                    tvm_ffi.structural_equal(a, b) for a, b in zip(indices, read.indices, strict=True)
                )
                if lane is not None and same:
                    return tirx.BufferLoad(own, [lane])
            return None

        return substitute(replace_loads(self.product.store.value, value_at), point)


def results_of(product: Product) -> Results:
    """How to store the results of a product."""
    store, along = product.store, product.columns
    others = (product.rows, product.batch)
    reads = [r for r in _distinct(loads(store.value)) if not r.source.same_as(product.total)]
    moving = [r for r in reads if any(uses(i, v) for i in r.indices for v in along.axes)]
    targets = [(store.buffer, store.indices), *((r.source, r.indices) for r in moving)]
    wide = (
        all(str(buffer.dtype) == "float32" for buffer, _ in targets)
        and all(is_wide(flat_index(buffer, indices), along, others) for buffer, indices in targets)
        and not _is_conditional(store.value)
        and not _names(store.value, along.axes)
    )
    if not wide:
        return Results(product, False)
    inputs = tuple(
        tirx.decl_buffer(index_shape((WIDTH,)), "float32", f"input_{n}", scope="local", layout=None)
        for n in range(len(moving))
    )
    return Results(product, True, tuple(moving), inputs)


def _copied(read: ir.TensorLoad, into: ir.Var, moved: Callable[[ir.Expr], Values]) -> tirx.Stmt:
    def one(lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(into, substitute(read, moved(lane)), [lane])

    return vectorized(WIDTH, one)


def _distinct(found: list[ir.TensorLoad]) -> list[ir.TensorLoad]:
    kept: list[ir.TensorLoad] = []
    for load in found:
        if not any(tvm_ffi.structural_equal(load, other) for other in kept):
            kept.append(load)
    return kept


def _is_load_of(value: ir.Expr, buffer: ir.Var) -> bool:
    return isinstance(value, ir.TensorLoad) and bool(value.source.same_as(buffer))


def _is_conditional(value: ir.Expr) -> bool:
    """Whether some reads take place under a condition only."""
    found: list[ir.Call] = []

    def note(call: ir.Call) -> None:
        if getattr(call.op, "name", "") == "tirx.if_then_else":
            found.append(call)

    tvm_ffi.structural_walk(value, (ir.Call, note))
    return bool(found)


def _names(value: ir.Expr, axes: Sequence[ir.Var]) -> bool:
    """Whether some axis stands outside of the indices of what is read."""
    bare = replace_loads(value, lambda buffer, indices: tirx.FloatImm("float32", 0.0))
    return any(uses(bare, axis) for axis in axes)
