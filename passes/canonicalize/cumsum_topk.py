"""Cumulative sums and the largest elements of rows: rules of canonicalize.

TVM implements them by calls of library functions, which neither fuse nor run on both devices. Here each
element of the result is a reduction, so that they are ordinary kernels.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import CUMULATIVE_SUM, TOP_K
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
    """`topk` that returns values and indices, as ONNX's does."""
    if not is_op(expr, "topk") or str(expr.attrs.ret_type) != "both":
        return None
    data, axis = expr.args[0], int(expr.attrs.axis) % len(tensor_shape(expr.args[0]))
    key = tensor_shape(data), axis, int(expr.attrs.k), bool(expr.attrs.largest), tensor_dtype(data)
    shape = tuple(key[2] if i == axis else extent for i, extent in enumerate(key[0]))
    places = context.emit(context.call(("topk", *key), lambda: ranked(*key), [data], shape, "int64"))
    result = shape, key[-1]
    values = context.emit(context.call(("taken", *key), lambda: taken(*key), [data, places], *result))
    return relax.Tuple([values, context.emit(relax.op.astype(places, str(expr.attrs.dtype)))])


def cumulative_sum(shape: tuple[int, ...], axis: int, dtype: str, exclusive: bool) -> tirx.PrimFunc:
    """Prefix sums along `axis`; each includes its own element if not `exclusive`.

    The n elements are first summed in about sqrt(n) chunks; each result then adds the chunks before its own
    and the elements before it within its own: 2 sqrt(n) terms instead of n.
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

    noted = {"operator": CUMULATIVE_SUM, "axis": axis, "exclusive": exclusive, "block": block}
    return te.create_prim_func([x, te.compute(index_shape(shape), before, name="sums", attrs=noted)])


def ranked(shape: tuple[int, ...], axis: int, k: int, largest: bool, dtype: str) -> tirx.PrimFunc:
    """Indices, int64, of the first `k` elements of `axis` in sorted order. The sort is stable, and NaN
    counts as the largest number, as in ONNX Runtime.

    An element's rank is the number of elements sorted before it: n comparisons each, all independent. The
    index at a rank is then a sum with a single term that is not zero.
    """
    extent = shape[axis]
    x = te.placeholder(index_shape(shape), name="data", dtype=dtype)
    one, zero, floats = tirx.const(1, "int64"), tirx.const(0, "int64"), "float" in dtype

    def precedes(a: te.Expr, b: te.Expr) -> te.Expr:
        better, (more, less) = (a > b, (a, b)) if largest else (a < b, (b, a))
        return tirx.any(better, tirx.all(tirx.isnan(more), tirx.Not(tirx.isnan(less)))) if floats else better

    def equals(a: te.Expr, b: te.Expr) -> te.Expr:
        # not "neither precedes": TVM takes `not (a > b)` for `a <= b`, which differs for NaN
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

    noted = {"operator": TOP_K, "axis": axis, "largest": largest}
    places = te.compute(index_shape(_with(shape, axis, k)), place, name="places", attrs=noted)
    return te.create_prim_func([x, places])


def taken(shape: tuple[int, ...], axis: int, k: int, largest: bool, dtype: str) -> tirx.PrimFunc:
    """The elements at the indices that `ranked` gives. They need no check: each is a position of the axis."""
    x = te.placeholder(index_shape(shape), name="data", dtype=dtype)
    places = te.placeholder(index_shape(_with(shape, axis, k)), name="places", dtype="int64")
    values = te.compute(places.shape, lambda *at: x(*_with(at, axis, places(*at))), name="values")
    return te.create_prim_func([x, places, values])


def _with(values: tuple[Any, ...], axis: int, value: Any) -> tuple[Any, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
