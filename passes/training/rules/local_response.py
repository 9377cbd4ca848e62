"""Local response normalisation, which the importer decomposes, as one function, and its gradient."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import (
    Emitter,
    Gradient,
    Reverse,
    gradient,
    known_scalar,
    operands,
    training_form,
)
from hybridc.passes.training.kernels.local_response import Response, response, response_gradient
from hybridc.passes.training.kernels.pooling import Pool

_OPERATORS = (
    *(("power",), ("add",), ("multiply",), ("squeeze",)),
    *(("nn.avg_pool2d", "nn.avg_pool3d"), ("expand_dims",), ("multiply",)),
)
"""From the divisor back to the data."""


@training_form("divide")
def _local_response(reverse: Reverse, call: relax.Call) -> relax.Expr | None:
    """Of `x / (mean of x * x over channels * alpha + bias) ** beta`: that function of x."""
    data, divisor = call.args
    of = _response(reverse, data, divisor)
    if of is None:
        return None
    result = relax.TensorType(tensor_shape(data), tensor_dtype(data))
    return reverse.call(("local_response", of), lambda: response(data, of), [data], result)


@gradient("local_response")
def _local_response_gradient(
    reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr
) -> list[Gradient]:
    (of,), (data,) = reverse.parameters(call), operands(call)
    result = relax.TensorType(tensor_shape(data), tensor_dtype(data))
    return [
        reverse.call(("local_response_gradient", of), lambda: response_gradient(data, of), [data, dy], result)
    ]


def _response(reverse: Emitter, data: relax.Expr, divisor: relax.Expr) -> Response | None:
    """The normalisation whose divisor this is; None if it is anything else."""
    chain = _chain(reverse, divisor)
    if chain is None:
        return None
    power, add, multiply, _, mean, _, square = chain
    beta, bias, alpha = (known_scalar(reverse, call.args[1]) for call in (power, add, multiply))
    window = _channels(Pool.of(mean))
    squares_data = all(argument.same_as(data) for argument in square.args)
    if window is None or beta is None or bias is None or alpha is None or not squares_data:
        return None
    return Response(*window, alpha=alpha, beta=beta, bias=bias)


def _chain(reverse: Emitter, result: relax.Expr) -> list[relax.Call] | None:
    """The calls that make a divisor, last first; None where another operator does."""
    calls: list[relax.Call] = []
    for names in _OPERATORS:
        call = reverse.values.get(result)
        if not isinstance(call, relax.Call) or not is_op(call, *names):
            return None
        calls.append(call)
        result = call.args[0]
    return calls


def _channels(pool: Pool) -> tuple[int, int] | None:
    """Size of a window along the first axis, and what of it lies ahead of its own place."""
    size, before, others = pool.taps[0], pool.before[0], (0,) * (len(pool.taps) - 1)
    ones = (1,) * len(pool.taps)
    along = Pool((size, *ones[1:]), ones, (before, *others), (size - 1 - before, *others), ones, True)
    return (size, before) if pool == along else None
