"""Gradients of reductions: spread over what was reduced."""

from __future__ import annotations

import math

from tvm import relax

from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import (
    Gradient,
    Reverse,
    constant,
    gradient,
    known_scalar,
    scaled,
)

op = relax.op


def reduced_axes(call: relax.Call) -> list[int]:
    """Axes that a reduction removes or leaves at extent 1, in ascending order."""
    rank = len(tensor_shape(call.args[0]))
    axes = call.attrs.axis
    if axes is None:
        return list(range(rank))
    return sorted({int(axis) % rank for axis in (axes if hasattr(axes, "__len__") else [axes])})


def _kept(reverse: Reverse, value: relax.Expr, call: relax.Call) -> relax.Expr:
    """A reduction's result with the reduced axes at extent 1."""
    axes = reduced_axes(call)
    shape = [1 if i in axes else extent for i, extent in enumerate(tensor_shape(call.args[0]))]
    return value if list(tensor_shape(value)) == shape else reverse.emit(op.reshape(value, shape))


def _spread(reverse: Reverse, dy: relax.Expr, call: relax.Call) -> relax.Expr:
    """One number for each result, repeated over what it was computed from."""
    shape = tensor_shape(call.args[0])
    number = known_scalar(reverse, dy)
    if number is not None:
        return op.full(shape, constant(number, dy), tensor_dtype(dy))
    return op.broadcast_to(_kept(reverse, dy, call), shape)


@gradient("sum")
def _sum(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return [_spread(reverse, dy, call)]


@gradient("mean")
def _mean(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return [_spread(reverse, scaled(reverse, dy, 1 / _count(call)), call)]


def _count(call: relax.Call) -> int:
    """Elements that make one result."""
    return math.prod(tensor_shape(call.args[0])[axis] for axis in reduced_axes(call))


@gradient("variance", "std")
def _variance(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Population variance: `2 (x - mean) / n`; of its root, that divided by twice the root."""
    x = call.args[0]
    factor = scaled(reverse, dy, 2 / _count(call))
    if is_op(call, "std"):
        factor = op.divide(scaled(reverse, dy, 1 / _count(call)), y)
    distance = op.subtract(x, op.mean(x, reduced_axes(call), keepdims=True))
    bound = reverse.emit(factor) if isinstance(factor, relax.Call) else factor
    return [op.multiply(distance, _kept(reverse, bound, call))]


@gradient("max", "min")
def _extremum(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Equal extrema share it equally, as in PyTorch's `amax`."""
    x, axes = call.args[0], reduced_axes(call)
    chosen = reverse.emit(op.astype(op.equal(x, _kept(reverse, y, call)), tensor_dtype(x)))
    share = op.divide(_kept(reverse, dy, call), op.sum(chosen, axes, keepdims=True))
    return [op.multiply(chosen, share)]


@gradient("prod")
def _prod(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Times the product of the others, which is the product of all divided by the element.

    A zero counts as one in it, and all but the only zero have zeros among the others.
    """
    x, axes = call.args[0], reduced_axes(call)
    is_zero = reverse.emit(op.astype(op.equal(x, constant(0, x)), tensor_dtype(x)))
    other_zeros = op.subtract(op.sum(is_zero, axes, keepdims=True), is_zero)
    factors = reverse.emit(op.add(x, is_zero))
    of_others = op.divide(op.prod(factors, axes, keepdims=True), factors)
    has_none = op.equal(other_zeros, constant(0, x))
    return [op.multiply(_kept(reverse, dy, call), op.where(has_none, of_others, constant(0, x)))]
