"""Gradients of pooling. Max pooling keeps the number of the tap that won, one byte, instead of its data."""

from __future__ import annotations

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient, operands, training_form
from hybridc.passes.training.kernels.pooling import (
    Pool,
    average_pool_gradient,
    max_pool_gradient,
    max_pool_with_indices,
)


@training_form("nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d")
def _with_indices(reverse: Reverse, call: relax.Call) -> relax.Expr | None:
    data, pool = call.args[0], Pool.of(call)
    if not reverse.wanted(data):
        return None
    shape, dtype = tensor_shape(reverse.typed(call)), tensor_dtype(data)
    made = reverse.call(
        ("max_pool_with_indices", pool),
        lambda: max_pool_with_indices(data, pool, shape[2:]),
        [data],
        [relax.TensorType(shape, dtype), relax.TensorType(shape, pool.index_dtype)],
    )
    return reverse.item(made, 0)


@gradient("max_pool_with_indices")
def _max_pool(
    reverse: Reverse, call: relax.Call, y: relax.Var, dy: list[relax.Expr | None]
) -> list[Gradient]:
    (pool,), of_maxima = reverse.parameters(call), dy[0]
    assert of_maxima is not None
    shape = tensor_shape(operands(call)[0])
    indices = reverse.item(y, 1)
    result = reverse.call(
        ("max_pool_gradient", pool, shape),
        lambda: max_pool_gradient(indices, of_maxima, pool, shape),
        [indices, of_maxima],
        relax.TensorType(shape, tensor_dtype(of_maxima)),
    )
    return [result]


@gradient("nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d")
def _average_pool(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    pool, shape = Pool.of(call), tensor_shape(call.args[0])
    result = reverse.call(
        ("avg_pool_gradient", pool, shape),
        lambda: average_pool_gradient(dy, pool, shape),
        [dy],
        relax.TensorType(shape, tensor_dtype(dy)),
    )
    return [result]
