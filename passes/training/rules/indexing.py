"""Gradients of gathering and scattering elements: each is the other's."""

from __future__ import annotations

import math

from tvm import relax

from hybridc.passes.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.scatter import take_gradient

op = relax.op


@gradient("take")
def _take(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, indices = call.args
    shape, dtype = tensor_shape(data), tensor_dtype(data)
    axis = int(call.attrs.axis) % len(shape) if call.attrs.axis is not None else 0
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    taken = math.prod(tensor_shape(indices))
    if tensor_shape(indices) != (taken,):
        indices = reverse.emit(op.reshape(indices, (taken,)))
    result = reverse.call(
        ("take_gradient", outer, shape[axis], inner, taken, dtype, tensor_dtype(indices)),
        lambda: take_gradient(outer, shape[axis], inner, taken, dtype, tensor_dtype(indices)),
        [reverse.shaped(dy, (outer, taken, inner)), indices],
        relax.TensorType((outer, shape[axis], inner), dtype),
    )
    return [reverse.shaped(result, shape), None]


def _zeros(like: relax.Expr) -> relax.Expr:
    return op.zeros(tensor_shape(like), tensor_dtype(like))


@gradient("gather_elements")
def _gather_elements(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, indices = call.args
    return [op.scatter_elements(_zeros(data), indices, dy, int(call.attrs.axis), "add"), None]


@gradient("gather_nd")
def _gather_nd(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, indices = call.args
    assert int(call.attrs.batch_dims) == 0, "gather_nd with batch dimensions"
    return [op.scatter_nd(_zeros(data), indices, dy, "add"), None]


@gradient("scatter_elements", "scatter_nd")
def _scatter(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """What is written takes its place's gradient; what it replaces takes none."""
    _, indices, updates = call.args
    replaces = str(call.attrs.reduction) != "add"
    assert str(call.attrs.reduction) in ("update", "add"), call.attrs.reduction
    whole: relax.Expr = dy
    if replaces:
        whole = relax.Call(call.op, [dy, indices, _zeros(updates)], call.attrs)
    if call.op.name == "relax.scatter_nd":
        return [whole, None, op.gather_nd(dy, indices)]
    return [whole, None, op.gather_elements(dy, indices, int(call.attrs.axis))]
