"""Gradients of activations that are operators. Where the result suffices, the argument is not stored."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, tirx

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.softmax import softmax_gradient

op = relax.op


@gradient("nn.leakyrelu")
def _leaky_relu(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """From the result where the slope is positive, so that it has the argument's sign."""
    alpha = float(call.attrs.alpha)
    source = y if alpha > 0 else call.args[0]

    def body(x: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
        return tirx.Select(x > _number(0, x), g, _number(alpha, x) * g)

    return [reverse.elementwise(f"leakyrelu_gradient:{alpha}", body, source, dy)]


@gradient("nn.prelu")
def _prelu(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    x, slope = call.args
    axis = int(call.attrs.axis) % len(tensor_shape(x))
    per_axis = [n if i == axis else 1 for i, n in enumerate(tensor_shape(x))]
    positive = reverse.emit(op.astype(op.greater(x, relax.const(0, tensor_dtype(x))), tensor_dtype(x)))
    negative = op.subtract(relax.const(1, tensor_dtype(x)), positive)
    dx = dslope = None
    if reverse.wanted(x):
        factor = op.multiply(negative, reverse.shaped(slope, per_axis))
        dx = op.multiply(dy, op.add(positive, factor))
    if reverse.wanted(slope):
        terms = reverse.emit(op.multiply(dy, op.multiply(negative, x)))
        axes = [i for i in range(len(per_axis)) if i != axis]
        dslope = reverse.shaped(reverse.emit(op.sum(terms, axes)), tensor_shape(slope))
    return [dx, dslope]


@gradient("clip")
def _clip(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """From the result: nothing at the bounds."""
    low, high = (float(bound.value) for bound in call.args[1:])

    def body(value: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
        inside = tirx.all(value > _number(low, value), value < _number(high, value))
        return tirx.Select(inside, g, _number(0, g))

    return [reverse.elementwise(f"clip_gradient:{low},{high}", body, y, dy), None, None]


def _gelu(x: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
    cdf = _number(0.5, x) * (_number(1, x) + tirx.erf(x * _number(math.sqrt(0.5), x)))
    density = _number(1 / math.sqrt(2 * math.pi), x) * tirx.exp(_number(-0.5, x) * x * x)
    return g * (cdf + x * density)


def _gelu_tanh(x: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
    """Of `0.5 x (1 + tanh(c (x + 0.044715 x^3)))` with c = sqrt(2 / pi)."""
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    t = tirx.tanh(_number(c, x) * (x + _number(cubic, x) * x * x * x))
    slope = _number(c, x) * (_number(1, x) + _number(3 * cubic, x) * x * x)
    half = _number(0.5, x)
    return g * (half * (_number(1, x) + t) + half * x * (_number(1, x) - t * t) * slope)


def _silu(x: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
    s = tirx.sigmoid(x)
    return g * s * (_number(1, x) + x * (_number(1, x) - s))


_OF_X: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.silu": _silu,
}


@gradient(*_OF_X)
def _from_argument(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    name = call.op.name.removeprefix("relax.")
    return [reverse.elementwise(f"{name[3:]}_gradient", _OF_X[name], call.args[0], dy)]


@gradient("nn.softmax", "nn.log_softmax")
def _softmax(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    name = call.op.name.removeprefix("relax.nn.")
    axis, is_log = int(call.attrs.axis) % len(tensor_shape(y)), name == "log_softmax"
    result = reverse.call(
        (f"{name}_gradient", axis),
        lambda: softmax_gradient(y, dy, axis, is_log=is_log),
        [y, dy],
        relax.TensorType(tensor_shape(y), tensor_dtype(y)),
    )
    return [result]


def _number(value: float, like: tirx.Expr) -> tirx.Expr:
    return tirx.const(value, like.dtype)
