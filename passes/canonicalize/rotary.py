"""Rotary position embedding (Su et al., "RoFormer", 2021) becomes one kernel.

Exporters write it as two slices, four products and a concatenation, most of them kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

from tvm import relax, te, tirx

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import Pattern
from hybridc.schedules.shapes import index_shape

ROTARY = "rotary"
"""The block of such a function."""


def rotate_in_one(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """Pairs of an element of the first half of the last axis, a, and one of the second, b, turned by angles:
    `concat(a * cos - b * sin, b * cos + a * sin)` or `concat(a, b) * cos + concat(-b, a) * sin`.
    """
    if is_op(expr, "concat"):
        found = _of_halves(expr, context)
    elif is_op(expr, "add"):
        found = _of_whole(expr, context)
    else:
        return None
    if found is None:
        return None
    data, cosines, sines = found
    shape = tensor_shape(data)
    rank, half = len(shape), shape[-1] // 2
    tables = [tensor_shape(table) for table in (cosines, sines)]
    if tensor_dtype(data) != "float32" or any(not _fits(table, shape) for table in tables):
        return None

    def halved(value: relax.Expr) -> relax.Var:
        *outer, last = tensor_shape(value)
        shape = (*(1 for _ in range(rank - 1 - len(outer))), *outer, last // half, half)
        known = context.weight(value)
        if known is not None:
            return context.builder.weight(known.reshape(shape), context.name)
        return context.emit(relax.op.reshape(value, shape))

    operands = [halved(value) for value in (data, cosines, sines)]
    shapes = [tensor_shape(value) for value in operands]
    call = context.call((ROTARY, *shapes), lambda: rotary(*shapes), operands)
    return context.emit(relax.op.reshape(context.emit(call), shape))


def rotary(data: Sequence[int], cosines: Sequence[int], sines: Sequence[int]) -> tirx.PrimFunc:
    """Of float32 data `[..., 2, pairs]` and tables that broadcast to it: element i of both halves turned by
    an angle."""
    x, cos, sin = (
        te.placeholder(index_shape(shape), name=name)
        for shape, name in ((data, "data"), (cosines, "cosines"), (sines, "sines"))
    )

    def of(table: te.Tensor, at: Sequence[te.Var]) -> te.Expr:
        extents = tuple(int(n) for n in table.shape)
        return table[tuple(tirx.const(0, "int64") if n == 1 else i for n, i in zip(extents, at, strict=True))]

    def turned(*at: te.Var) -> te.Expr:
        *outer, half, pair = at
        turn = x[(*outer, tirx.const(1, "int64") - half, pair)] * of(sin, at)
        return x[at] * of(cos, at) + tirx.Select(half == 0, -turn, turn)

    out = te.compute(x.shape, turned, name=ROTARY)
    function = te.create_prim_func([x, cos, sin, out])
    return function.with_attr("op_pattern", int(Pattern.INJECTIVE)).with_attr("tirx.noalias", True)


Found = tuple[relax.Expr, relax.Expr, relax.Expr]
"""Data, cosines and sines."""


def _of_halves(expr: relax.Call, context: Context) -> Found | None:
    parts = _parts_of(expr)
    if parts is None or any(context.uses[part] != 1 for part in parts):
        return None
    difference, total = (context.definition(part) for part in parts)
    if not is_op(difference, "subtract") or not is_op(total, "add"):
        return None
    for (a, cos), (b, sin), (c, other_sin), (d, other_cos) in (
        (*first, *second)
        for first in _products(difference.args, context)
        for operands in (total.args, total.args[::-1])
        for second in _products(operands, context)
    ):
        same = a.same_as(c) and b.same_as(d) and cos.same_as(other_cos) and sin.same_as(other_sin)
        whole = _whole_of(a, b, context) if same else None
        if whole is not None:
            return whole, cos, sin
    return None


def _of_whole(expr: relax.Call, context: Context) -> Found | None:
    for operands in (expr.args, expr.args[::-1]):
        for (data, cos), (turned, sin) in _products(operands, context):
            parts = _parts_of(context.definition(turned))
            if parts is None or context.uses[turned] != 1:
                continue
            negated, first = parts
            negative = context.definition(negated)
            if not is_op(negative, "negative"):
                continue
            whole = _whole_of(first, negative.args[0], context)
            if whole is not None and whole.same_as(data):
                return whole, cos, sin
    return None


def _parts_of(call: Any) -> Sequence[relax.Expr] | None:
    """The two parts of a concatenation along the last axis."""
    if not is_op(call, "concat") or not isinstance(call.args[0], relax.Tuple):
        return None
    parts = list(call.args[0].fields)
    rank = len(tensor_shape(parts[0]))
    is_last = call.attrs.axis is not None and int(call.attrs.axis) % rank == rank - 1
    return parts if is_last and len(parts) == 2 else None


def _products(
    operands: Sequence[relax.Expr], context: Context
) -> Iterator[tuple[tuple[relax.Expr, relax.Expr], ...]]:
    """The factors of both operands, if these are products, in every order."""
    calls = [context.definition(operand) for operand in operands]
    if not all(is_op(call, "multiply") for call in calls):
        return
    for first in permutations(calls[0].args):
        for second in permutations(calls[1].args):
            yield first, second


def _whole_of(first: relax.Expr, second: relax.Expr, context: Context) -> relax.Expr | None:
    """The tensor of whose last axis these are the two halves."""
    wholes = [_half_of(part, i, context) for i, part in enumerate((first, second))]
    if wholes[0] is None or wholes[1] is None or not wholes[0].same_as(wholes[1]):
        return None
    return wholes[0]


def _half_of(part: relax.Expr, number: int, context: Context) -> relax.Expr | None:
    """The tensor of whose last axis a part is the half of this number, 0 or 1."""
    made = context.definition(part)
    if isinstance(made, relax.TupleGetItem) and is_op(context.definition(made.tuple_value), "split"):
        split = context.definition(made.tuple_value)
        whole = split.args[0]
        last = len(tensor_shape(whole)) - 1
        is_half = int(split.attrs.axis) % (last + 1) == last and made.index == number
    elif is_op(made, "strided_slice"):
        whole = made.args[0]
        last = len(tensor_shape(whole)) - 1
        axes, begins, _, strides = ([int(n) for n in argument.fields] for argument in made.args[1:5])
        begin = {axis % (last + 1): n for axis, n in zip(axes, begins, strict=True)}.get(last)
        is_half = begin == number * (tensor_shape(whole)[last] // 2) and set(strides) == {1}
    else:
        return None
    *outer, width = tensor_shape(whole)
    return whole if is_half and (*outer, width // 2) == tensor_shape(part) and width % 2 == 0 else None


def _fits(table: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a table has a number for each element of the data, or of either half of it."""
    width = shape[-1]
    if not table:  # one number for all
        return False
    outer = table[-len(shape) : -1]
    broadcast = all(n in (1, m) for n, m in zip(outer[::-1], shape[-2::-1], strict=False))
    return broadcast and len(table) <= len(shape) and table[-1] in (width, width // 2)
