"""Gradients of gathering and scattering elements: each is the other's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, constant, gradient
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
    indices = _absolute(reverse, indices, int(call.attrs.batch_dims))
    return [op.scatter_nd(_zeros(data), indices, dy, "add"), None]


def _absolute(reverse: Reverse, indices: relax.Expr, batch_dims: int) -> relax.Expr:
    """Indices of all axes from the first: those of the batch precede the others."""
    if not batch_dims:
        return indices
    shape, dtype = tensor_shape(indices), tensor_dtype(indices)
    of_batch = np.moveaxis(np.indices(shape[:-1], np.dtype(dtype))[:batch_dims], 0, -1)
    return reverse.emit(op.concat([reverse.builder.weight(of_batch, "batch_indices"), indices], -1))


@gradient("scatter_elements", "scatter_nd")
def _scatter(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """What is written takes its place's gradient; what it replaces takes none."""
    updates = call.args[2]
    reduction, places = str(call.attrs.reduction), _Places(reverse, call)
    if reduction in ("max", "min"):
        return _of_extremum(places, y, dy)
    written = places.read(dy)
    if reduction == "mul":
        written = op.divide(op.multiply(written, places.read(y)), updates)
        dy = places.write(dy, updates, "mul")
    elif reduction == "update":
        dy = places.write(dy, _zeros(updates), "update")
    else:
        assert reduction == "add", reduction
    return [dy, None, written]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a call scatters its updates."""

    reverse: Reverse
    call: relax.Call

    def read(self, values: relax.Expr) -> relax.Expr:
        """What lies there."""
        indices = self.call.args[1]
        if self.call.op.name == "relax.scatter_nd":
            return op.gather_nd(values, indices)
        return op.gather_elements(values, indices, int(self.call.attrs.axis))

    def write(self, values: relax.Expr, updates: relax.Expr, reduction: str) -> relax.Var:
        indices = self.call.args[1]
        if self.call.op.name == "relax.scatter_nd":
            return self.reverse.emit(op.scatter_nd(values, indices, updates, reduction))
        axis = int(self.call.attrs.axis)
        return self.reverse.emit(op.scatter_elements(values, indices, updates, axis, reduction))


def _of_extremum(places: _Places, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Data and updates that are equal to the result share its gradient, as in PyTorch."""
    reverse, (data, _, updates), dtype = places.reverse, places.call.args, tensor_dtype(y)
    old = reverse.emit(op.astype(op.equal(data, y), dtype))
    new = reverse.emit(op.astype(op.equal(updates, places.read(y)), dtype))
    share = reverse.emit(op.divide(dy, op.maximum(places.write(old, new, "add"), constant(1, dy))))
    return [op.multiply(share, old), None, op.multiply(places.read(share), new)]


@gradient("topk")
def _topk(reverse: Reverse, call: relax.Call, y: relax.Var, dy: list[relax.Expr | None]) -> list[Gradient]:
    """Where the largest, or smallest, were taken from; their places have no gradients."""
    assert str(call.attrs.ret_type) == "both" and dy[0] is not None, "the importer asks for values and places"
    indices = reverse.item(y, 1)
    return [op.scatter_elements(_zeros(call.args[0]), indices, dy[0], int(call.attrs.axis), "update")]
