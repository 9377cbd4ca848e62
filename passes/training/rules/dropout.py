"""Dropout in training: no mask is stored, the backward pass draws the same numbers again."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient, operands, training_form
from hybridc.passes.training.kernels.dropout import dropout


@training_form("nn.dropout")
def _drop(reverse: Reverse, call: relax.Call) -> relax.Expr:
    data, rate = call.args[0], float(call.attrs.rate)
    if rate == 0:
        return relax.Tuple([data, data])
    assert reverse.seed is not None
    layer = relax.const(reverse.draws, "int64")
    reverse.draws += 1
    result = _emit(reverse, data, rate, reverse.seed, layer)
    return relax.Tuple([result, result])


def _emit(reverse: Reverse, data: relax.Expr, rate: float, seed: relax.Expr, layer: relax.Expr) -> relax.Var:
    return reverse.call(
        ("dropout", rate),
        lambda: dropout(data, rate),
        [data, seed, layer],
        relax.TensorType(tensor_shape(data), tensor_dtype(data)),
    )


@gradient("dropout")
def _dropout(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    (rate,), (_, seed, layer) = reverse.parameters(call), operands(call)
    return [_emit(reverse, dy, rate, seed, layer), None, None]
