"""Cumulative sums and the largest elements of rows: rules of canonicalize.

TVM has them as calls of library functions, which neither fuse nor run on both devices. Here each element
of the result is a reduction, so that they are kernels like all others.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.schedules.shapes import index_shape


def sum_in_blocks(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`cumsum` along an axis."""
    if not is_op(expr, "cumsum") or expr.attrs.axis is None:
        return None
    data, result = expr.args[0], str(expr.attrs.dtype or "")
    shape, dtype = tensor_shape(data), tensor_dtype(data)
    if result not in ("", "void", dtype):
        return None
    key = shape, int(expr.attrs.axis) % len(shape), dtype, bool(expr.attrs.exclusive)
    return context.emit(context.call(("cumsum", *key), lambda: cumulative_sum(*key), [data], dtype=dtype))


def select_by_rank(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`topk` with values and places, of which ONNX's has both."""
    if not is_op(expr, "topk") or str(expr.attrs.ret_type) != "both":
        return None
    data, axis = expr.args[0], int(expr.attrs.axis) % len(tensor_shape(expr.args[0]))
    key = tensor_shape(data), axis, int(expr.attrs.k), bool(expr.attrs.largest), tensor_dtype(data)
    shape = tuple(key[2] if i == axis else extent for i, extent in enumerate(key[0]))
    places = context.emit(context.call(("topk", *key), lambda: ranked(*key), [data], shape, "int64"))
    values = context.emit(relax.op.gather_elements(data, places, axis))
    return relax.Tuple([values, context.emit(relax.op.astype(places, str(expr.attrs.dtype)))])


def cumulative_sum(shape: tuple[int, ...], axis: int, dtype: str, exclusive: bool) -> tirx.PrimFunc:
    """Sums of what comes before each element of `axis`, itself included if not `exclusive`.

    n elements are summed in about sqrt(n) blocks first; an element then adds the blocks before its own and
    what is before it in its own, 2 sqrt(n) numbers instead of n.
    """
    extent = shape[axis]
    block = math.isqrt(max(extent - 1, 0)) + 1
    blocks = -(-extent // block)
    x = te.placeholder(index_shape(shape), name="data", dtype=dtype)
    zero = tirx.const(0, dtype)

    def total(*at: te.Var) -> te.Expr:
        k = te.reduce_axis((0, tirx.IntImm("int64", block)), "k")
        place = at[axis] * block + k
        return te.sum(tirx.if_then_else(place < extent, x[_with(at, axis, place)], zero), axis=k)

    totals = te.compute(index_shape(_with(shape, axis, blocks)), total, name="totals")

    def before(*at: te.Var) -> te.Expr:
        k = te.reduce_axis((0, tirx.IntImm("int64", block)), "k")
        own, place = at[axis] // block, at[axis] % block
        whole = tirx.if_then_else(k < own, totals[_with(at, axis, k)], zero)
        inside = k < place if exclusive else k <= place
        return te.sum(whole + tirx.if_then_else(inside, x[_with(at, axis, own * block + k)], zero), axis=k)

    return te.create_prim_func([x, te.compute(index_shape(shape), before, name="sums")])


def ranked(shape: tuple[int, ...], axis: int, k: int, largest: bool, dtype: str) -> tirx.PrimFunc:
    """Where the first `k` elements of `axis` in order are, int64. Of equal ones the first comes first; NaN
    comes last.

    An element's rank is the number of those before it in order: n comparisons each, which need no order
    of execution; a place then is the sum of the one index that has its rank.
    """
    extent = shape[axis]
    x = te.placeholder(index_shape(shape), name="data", dtype=dtype)
    one, zero, floats = tirx.const(1, "int64"), tirx.const(0, "int64"), "float" in dtype

    def precedes(a: te.Expr, b: te.Expr) -> te.Expr:
        better = a > b if largest else a < b
        return tirx.any(better, tirx.all(tirx.isnan(b), tirx.Not(tirx.isnan(a)))) if floats else better

    def equals(a: te.Expr, b: te.Expr) -> te.Expr:
        # not "neither precedes": TVM takes `not (a > b)` for `a <= b`, which NaN makes another thing
        return tirx.any(tirx.EQ(a, b), tirx.all(tirx.isnan(a), tirx.isnan(b))) if floats else tirx.EQ(a, b)

    def rank(*at: te.Var) -> te.Expr:
        j = te.reduce_axis((0, tirx.IntImm("int64", extent)), "j")
        own, other = x[at], x[_with(at, axis, j)]
        first = tirx.any(precedes(other, own), tirx.all(j < at[axis], equals(other, own)))
        return te.sum(tirx.Select(first, one, zero), axis=j)

    ranks = te.compute(index_shape(shape), rank, name="ranks")

    def place(*at: te.Var) -> te.Expr:
        i = te.reduce_axis((0, tirx.IntImm("int64", extent)), "i")
        return te.sum(tirx.Select(ranks[_with(at, axis, i)] == at[axis], i, zero), axis=i)

    places = te.compute(index_shape(_with(shape, axis, k)), place, name="places")
    return te.create_prim_func([x, places])


def _with(values: tuple[Any, ...], axis: int, value: Any) -> tuple[Any, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
