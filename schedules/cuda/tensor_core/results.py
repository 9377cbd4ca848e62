"""Where results go: through the epilogue to the output, or as sums over a part of the depth to workspace.

A product of few results and a large depth has too few tiles for a GPU. Blocks of threads then share the depth
of a tile, and a second launch adds up their sums (split-K).
"""

from __future__ import annotations

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer, unrolled
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS
from hybridc.schedules.cuda.tensor_core.read import (
    Element,
    MatrixProduct,
    flattened,
    offset_of,
    steps_by_one,
)


class Results:
    """The results of a product whose depth `parts` blocks of threads share."""

    def __init__(self, product: MatrixProduct, parts: int) -> None:
        self.product, self.parts = product, parts
        self.count = product.batch.extent * product.row.extent * product.column.extent
        self.partial = tirx.decl_buffer((integer(parts * self.count),), product.sum_dtype, "partial")
        """Sums over parts of the depth, one part after the other."""

    def store(
        self, part: ir.Expr, batch: ir.Expr, row: ir.Expr, column: ir.Expr, total: ir.Expr
    ) -> tirx.BufferStore:
        """Write the sum of a result over a part of the depth."""
        if self.parts == 1:
            return self._final(batch, row, column, total)
        place = (part * integer(self.product.batch.extent) + batch) * integer(self.product.row.extent) + row
        return tirx.BufferStore(self.partial, total, [place * integer(self.product.column.extent) + column])

    @property
    def is_boolean(self) -> bool:
        return str(self.product.output.dtype) == "bool"

    def neighbours(self, across: int) -> int:
        """Of so many instructions side by side, those whose results of a lane lie side by side: so many that
        bytes are stored by 64 bits where they can be, else one; of booleans TVM has no vectors."""
        product = self.product
        if product.result_bytes > 1 or self.parts > 1 or self.is_boolean:
            return 1
        column, known = tirx.Var("column", "int64"), sym.Analyzer()
        known.bind(column, ir.Range.from_min_extent(integer(0), integer(product.column.extent)))
        zero = {v: integer(0) for axis in (product.batch, product.row) for v in axis.iterators}
        store = product.store({**zero, **product.column.at(column)}, tirx.const(0, product.sum_dtype))
        place = tirx.BufferLoad(store.buffer, offset_of(store.buffer, store.indices, known))
        fits = (n for n in (4, 2) if across % n == 0 and product.column.extent % (2 * n) == 0)
        return next((n for n in fits if steps_by_one(Element((), place), column, 2 * n)), 1)

    def added_up(self) -> tirx.Stmt:
        """A launch with a thread for each result."""
        block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
        total = tirx.decl_buffer((integer(1),), self.product.sum_dtype, "total", scope="local")
        number = block * integer(BLOCK_THREADS) + thread
        zero = integer(0)

        def add(part: ir.Expr) -> tirx.Stmt:
            term = tirx.BufferLoad(self.partial, [part * integer(self.count) + number])
            return tirx.BufferStore(total, tirx.BufferLoad(total, [zero]) + term, [zero])

        columns, rows = integer(self.product.column.extent), integer(self.product.row.extent)
        line = tirx.floordiv(number, columns)
        final = self._final(
            tirx.floordiv(line, rows), tirx.floormod(line, rows), tirx.floormod(number, columns),
            tirx.BufferLoad(total, [zero]),
        )  # fmt: skip
        body: tirx.Stmt = tirx.SeqStmt([
            tirx.AllocBuffer(total),
            tirx.BufferStore(total, tirx.const(0, self.product.sum_dtype), [zero]),
            unrolled(self.parts, add),
            final,
        ])  # fmt: skip
        if self.count % BLOCK_THREADS:
            body = tirx.IfThenElse(number < integer(self.count), body, None)
        blocks = ceil_div(self.count, BLOCK_THREADS)
        return bound(block, "blockIdx.x", blocks, bound(thread, "threadIdx.x", BLOCK_THREADS, body))

    def _final(self, batch: ir.Expr, row: ir.Expr, column: ir.Expr, total: ir.Expr) -> tirx.BufferStore:
        """Write a result; elements by their offsets, so that neighbours are seen to be such."""
        product, known = self.product, sym.Analyzer()
        axes = {"batch": product.batch, "row": product.row, "column": product.column}
        variables = {name: tirx.Var(name, "int64") for name in axes}
        point: dict[ir.Var, ir.Expr] = {}
        for name, axis in axes.items():
            known.bind(variables[name], ir.Range.from_min_extent(integer(0), integer(axis.extent)))
            point |= axis.at(variables[name])
        sum_of = tirx.Var("sum", product.sum_dtype)
        store = product.store(point, sum_of)
        at = dict(zip(variables.values(), (batch, row, column), strict=True)) | {sum_of: total}
        indices = offset_of(store.buffer, store.indices, known)
        value = substitute(flattened(store.value, known), at)
        return tirx.BufferStore(store.buffer, value, [substitute(i, at) for i in indices])


def bound(variable: ir.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.For:
    """A loop over threads, or blocks of them."""
    zero, count = integer(0), integer(extent)
    index = tirx.IterVar(ir.Range(zero, count), tirx.Var(tag, "int64"), tirx.IterVar.ThreadIndex, tag)
    return tirx.For(variable, zero, count, tirx.ForKind.THREAD_BINDING, body, index)
