"""Gradients of arithmetic and mathematical functions of single elements."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax, tirx

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import (
    Gradient,
    Reverse,
    constant,
    gradient,
    known_scalar,
    operands,
    rule_name,
    scaled,
)

op = relax.op


def summed_to(reverse: Reverse, dy: relax.Expr, like: relax.Expr) -> relax.Expr:
    """The gradient of an operand that was broadcast: the sum over the axes along which it was repeated."""
    source, shape = tensor_shape(like), tensor_shape(dy)
    if source == shape:
        return dy
    aligned = (1,) * (len(shape) - len(source)) + source
    axes = [i for i, (small, large) in enumerate(zip(aligned, shape, strict=True)) if small != large]
    if axes:
        dy = reverse.emit(op.sum(dy, axes, keepdims=True))
    return dy if tensor_shape(dy) == source else reverse.emit(op.reshape(dy, source))


def _each(reverse: Reverse, call: relax.Call, *made: Callable[[], relax.Expr]) -> list[Gradient]:
    """Gradients of broadcast operands, of those that are wanted."""
    return [
        summed_to(reverse, _bound(reverse, make()), argument) if reverse.wanted(argument) else None
        for argument, make in zip(operands(call), made, strict=True)
    ]


def _bound(reverse: Reverse, expr: relax.Expr) -> relax.Expr:
    return reverse.emit(expr) if isinstance(expr, relax.Call) else expr


def _times(reverse: Reverse, dy: relax.Expr, other: relax.Expr) -> relax.Expr:
    factor = known_scalar(reverse, other) if not tensor_shape(other) else None
    return op.multiply(dy, other) if factor is None else scaled(reverse, dy, factor)


@gradient("add")
def _add(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return _each(reverse, call, lambda: dy, lambda: dy)


@gradient("subtract")
def _subtract(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return _each(reverse, call, lambda: dy, lambda: scaled(reverse, dy, -1.0))


@gradient("multiply")
def _multiply(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    a, b = call.args
    return _each(reverse, call, lambda: _times(reverse, dy, b), lambda: _times(reverse, dy, a))


@gradient("divide")
def _divide(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The divisor's from the quotient, -dy * y / b: the dividend need not be kept."""
    _, b = call.args
    return _each(
        reverse,
        call,
        lambda: op.divide(dy, b),
        lambda: op.negative(op.divide(op.multiply(dy, y), b)),
    )


@gradient("power")
def _power(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """A root's at 0 is 0, as of `sqrt`; so is the exponent's where the base is 0, as in PyTorch."""
    a, b = call.args
    exponent = known_scalar(reverse, b)

    def of_base() -> relax.Expr:
        if exponent == 2:
            return op.multiply(dy, op.multiply(a, constant(2, a)))
        lower = constant(exponent - 1, a) if exponent is not None else op.subtract(b, constant(1, b))
        power = op.power(a, lower)
        if exponent is not None and 0 < exponent < 1:
            power = op.where(op.equal(a, constant(0, a)), constant(0, a), power)
        return op.multiply(dy, op.multiply(b, power))

    def of_exponent() -> relax.Expr:
        base = op.where(op.equal(a, constant(0, a)), constant(1, a), a)
        return op.multiply(dy, op.multiply(y, op.log(base)))

    return _each(reverse, call, of_base, of_exponent)


@gradient("maximum", "minimum")
def _extremum(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """To the chosen operand, halves to equal ones, as in PyTorch.

    Where one is a known number it is a bound: from the result, and nothing at the bound.
    """
    a, b = operands(call)
    largest = rule_name(call) == "maximum"
    bound, other = (a, b) if reverse.known(a) is not None else (b, a)
    number = known_scalar(reverse, bound)
    if number is not None and tensor_shape(other) == tensor_shape(y):

        def clipped(value: tirx.Expr, g: tirx.Expr) -> tirx.Expr:
            limit = _number(number, value)
            return tirx.Select(value > limit if largest else value < limit, g, _number(0, g))

        name = "maximum_gradient" if largest else "minimum_gradient"
        dx = reverse.elementwise(f"{name}:{number}", clipped, y, dy)
        return [None if argument is bound else dx for argument in (a, b)]
    chooses, dtype = op.greater if largest else op.less, tensor_dtype(dy)

    def share(mine: relax.Expr, theirs: relax.Expr) -> relax.Expr:
        whole = op.astype(chooses(mine, theirs), dtype)
        half = op.multiply(op.astype(op.equal(mine, theirs), dtype), constant(0.5, dy))
        return op.multiply(dy, op.add(whole, half))

    return _each(reverse, call, lambda: share(a, b), lambda: share(b, a))


@gradient("where")
def _where(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    condition, *branches = call.args
    shape = tensor_shape(y)
    if tensor_shape(condition) != shape:
        condition = reverse.emit(op.broadcast_to(condition, shape))

    def chosen(name: str, taken: bool, branch: relax.Expr) -> Gradient:
        if not reverse.wanted(branch):
            return None

        def body(g: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
            return tirx.Select(c, g, _number(0, g)) if taken else tirx.Select(c, _number(0, g), g)

        return summed_to(reverse, reverse.elementwise(name, body, dy, condition), branch)

    a, b = branches
    return [None, chosen("where_gradient:true", True, a), chosen("where_gradient:false", False, b)]


@gradient("mod", "floor_mod")
def _remainder(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The divisor's is -dy times the whole quotient."""
    a, b = call.args
    return _each(
        reverse,
        call,
        lambda: dy,
        lambda: op.multiply(dy, op.round(op.divide(op.subtract(y, a), b))),
    )


@gradient("astype")
def _astype(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return [op.astype(dy, tensor_dtype(call.args[0]))]


@gradient("negative")
def _negative(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    return [scaled(reverse, dy, -1.0)]


@gradient("floor", "ceil", "round", "sign", "trunc")
def _step(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Piecewise constant: zero where it is differentiable."""
    return [None]


@gradient("zeros_like", "ones_like", "full_like", "eye_like")
def _constant(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Nothing but the shape is read."""
    return [None] * len(call.args)


# What follows is computed by one function of dy and of x, or y where that will do.

Scalar = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]


def _number(value: float, like: tirx.Expr) -> tirx.Expr:
    return tirx.const(value, str(like.dtype))


_OF_Y: dict[str, Scalar] = {
    "exp": lambda y, dy: dy * y,
    # at 0 that of a norm in PyTorch: exporters write norms and distances as roots of sums of squares
    "sqrt": lambda y, dy: tirx.Select(y == _number(0, y), _number(0, y), dy * _number(0.5, y) / y),
    "rsqrt": lambda y, dy: dy * _number(-0.5, y) * y * y * y,
    "tanh": lambda y, dy: dy * (_number(1, y) - y * y),
    "tan": lambda y, dy: dy * (_number(1, y) + y * y),
    "sigmoid": lambda y, dy: dy * y * (_number(1, y) - y),
    "nn.relu": lambda y, dy: tirx.Select(y <= _number(0, y), _number(0, y), dy),
}

_OF_X: dict[str, Scalar] = {
    "log": lambda x, dy: dy / x,
    "abs": lambda x, dy: dy * (_select(x > 0, 1, x) - _select(x < 0, 1, x)),
    "sin": lambda x, dy: dy * tirx.cos(x),
    "cos": lambda x, dy: -dy * tirx.sin(x),
    "sinh": lambda x, dy: dy * tirx.cosh(x),
    "cosh": lambda x, dy: dy * tirx.sinh(x),
    "asin": lambda x, dy: dy * tirx.rsqrt(_number(1, x) - x * x),
    "acos": lambda x, dy: -dy * tirx.rsqrt(_number(1, x) - x * x),
    "atan": lambda x, dy: dy / (_number(1, x) + x * x),
    "asinh": lambda x, dy: dy * tirx.rsqrt(_number(1, x) + x * x),
    "acosh": lambda x, dy: dy * tirx.rsqrt(x * x - _number(1, x)),
    "atanh": lambda x, dy: dy / (_number(1, x) - x * x),
    "erf": lambda x, dy: dy * _number(2 / math.sqrt(math.pi), x) * tirx.exp(-x * x),
}


def _select(condition: tirx.Expr, value: float, like: tirx.Expr) -> tirx.Expr:
    return tirx.Select(condition, _number(value, like), _number(0, like))


@gradient(*_OF_Y)
def _from_result(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """The result is alive anyway where the next operator needs it; the argument need not be."""
    name = call.op.name.removeprefix("relax.")
    return [reverse.elementwise(f"{name.removeprefix('nn.')}_gradient", _OF_Y[name], y, dy)]


@gradient(*_OF_X)
def _from_argument(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    name = call.op.name.removeprefix("relax.")
    return [reverse.elementwise(f"{name}_gradient", _OF_X[name], call.args[0], dy)]
