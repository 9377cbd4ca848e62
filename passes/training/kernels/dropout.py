"""Dropout whose mask is a function of position, recomputed in the backward pass instead of stored."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_shape
from hybridc.passes.training.gradients import placeholder


def dropout(data: relax.Expr, rate: float) -> tirx.PrimFunc:
    """Data of any shape, the step's seed and the layer's number, both int64 scalars, to data of that shape.

    An element is dropped if a hash of seed, layer and position, a number in [0, 2**32), is below `rate` of
    that range; others are divided by `1 - rate`. The gradient is the same function of dy.
    """
    x = placeholder(data, "data")
    seed, layer = (te.placeholder((), "int64", name) for name in ("seed", "layer"))
    below = tirx.const(min(round(rate * 2**32), 2**32 - 1), "uint32")
    is_large = math.prod(tensor_shape(data)) > 2**31

    def body(*at: tirx.Var) -> tirx.Expr:
        position = at[0] if at else tirx.const(0, "int64")
        for i, extent in zip(at[1:], tensor_shape(data)[1:], strict=True):
            position = position * extent + i
        low, high = (_half(seed[()], half) for half in range(2))
        key = _mixed(_mixed(low) ^ high) + _half(layer[()], 0) * tirx.const(0x9E3779B9, "uint32")
        if is_large:  # else TVM makes positions 32 bits wide, and refuses to shift them by as many
            key = key ^ _half(position, 1)
        number = _mixed(_half(position, 0) ^ _mixed(key))
        kept = x[at] * tirx.const(1 / (1 - rate), x.dtype)
        return tirx.Select(number >= below, kept, tirx.const(0, x.dtype))

    out = te.compute(x.shape, body, name="dropout")
    return te.create_prim_func([x, seed, layer, out])


def _half(value: tirx.Expr, number: int) -> tirx.Expr:
    """The lower (0) or upper (1) half of a 64-bit number."""
    return (value >> tirx.const(32 * number, "int64")).astype("uint32") if number else value.astype("uint32")


def _mixed(x: tirx.Expr) -> tirx.Expr:
    """A bijection of 32 bits in which each depends on all (Wellons, Prospecting for Hash Functions, 2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = _folded(x, shift) * tirx.const(factor, "uint32")
    return _folded(x, 16)


def _folded(x: tirx.Expr, shift: int) -> tirx.Expr:
    return _shared(x, lambda v: v ^ (v >> tirx.const(shift, "uint32")))


def _shared(value: tirx.Expr, body: Callable[[tirx.Var], tirx.Expr]) -> tirx.Expr:
    """`body` of a value that is computed once: written out, each use would double the expression."""
    var = tirx.Var("hash", "uint32")
    return tirx.Let(var, value, body(var))
