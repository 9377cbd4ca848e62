"""Evaluate what TVM's converters compute from static shapes at run time: extents to wrap indices by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax


def fold_shape(value: relax.Expr) -> relax.Expr:
    """The value as a shape or constant if its operator is one of a shape computation on known operands."""
    if not isinstance(value, tvm.ir.Call) or not isinstance(value.op, tvm.ir.Op):
        return value
    fold = _FOLDS.get(value.op.name)
    folded = fold(value) if fold else None
    return value if folded is None else folded


def _shape_of(call: tvm.ir.Call) -> relax.Expr | None:
    shape = call.args[0].ty.shape
    return shape if isinstance(shape, relax.ShapeExpr) and _are_known(shape.values) else None


def _shape_to_tensor(call: tvm.ir.Call) -> relax.Expr | None:
    shape = call.args[0]
    if not isinstance(shape, relax.ShapeExpr) or not _are_known(shape.values):
        return None
    return _constant(np.array([int(dim) for dim in shape.values], np.int64))


def _take(call: tvm.ir.Call) -> relax.Expr | None:
    data, indices = call.args
    if not _are_constant(data, indices):
        return None
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return _constant(np.take(data.value.numpy(), indices.value.numpy(), axis, mode="wrap"))


def _strided_slice(call: tvm.ir.Call) -> relax.Expr | None:
    data, *ranges = call.args
    if not _are_constant(data) or data.value.ndim != 1 or not all(isinstance(r, relax.Tuple) for r in ranges):
        return None
    if not all(len(r.fields) == 1 and _are_known(r.fields) for r in ranges):
        return None
    begin, end, *step = (int(r.fields[0]) for r in ranges[1:])
    return _constant(data.value.numpy()[slice(begin, end, *step)])


def _astype(call: tvm.ir.Call) -> relax.Expr | None:
    if not _are_constant(call.args[0]):
        return None
    return _constant(call.args[0].value.numpy().astype(str(call.attrs.dtype)))


_FOLDS: dict[str, Callable[[tvm.ir.Call], relax.Expr | None]] = {
    "relax.astype": _astype,
    "relax.shape_of": _shape_of,
    "relax.shape_to_tensor": _shape_to_tensor,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
}


def _constant(array: np.ndarray) -> relax.Expr:
    return relax.const(array, str(array.dtype))  # without the type, int64 would become int32


def _are_constant(*values: relax.Expr) -> bool:
    return all(isinstance(value, tvm.ir.GenericConst) for value in values)


def _are_known(dims: list[relax.Expr]) -> bool:
    return all(isinstance(dim, tvm.tirx.IntImm) for dim in dims)
