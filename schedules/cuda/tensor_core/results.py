"""Where results go: through the epilogue to the output."""

from __future__ import annotations

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct, flattened, offset_of


def result(
    product: MatrixProduct, batch: ir.Expr, row: ir.Expr, column: ir.Expr, total: ir.Expr
) -> tirx.BufferStore:
    """Write a result; elements by their offsets, so that neighbours are seen to be such."""
    known = sym.Analyzer()
    axes = {"batch": product.batch, "row": product.row, "column": product.column}
    variables = {name: tirx.Var(name, "int64") for name in axes}
    point: dict[ir.Var, ir.Expr] = {}
    for name, axis in axes.items():
        known.bind(variables[name], ir.Range.from_min_extent(integer(0), integer(axis.extent)))
        point |= axis.at(variables[name])
    sum_of = tirx.Var("sum", "float32")
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
