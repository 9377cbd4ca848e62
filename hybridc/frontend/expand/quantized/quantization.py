"""Numbers `scale * (values - zero)` of integer tensors, and the way back, as standard operators.

Scales and zero points are one number for a tensor, one for each element of an axis, or they broadcast.
`QuantizeLinear` and `DequantizeLinear` are emitted where the model's opset has the form: products of what
`DequantizeLinear` gives are what kernels in integers are made of. Other forms become arithmetic.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, dtype_of, given, operand, shape_of

NARROW = (ir.DataType.INT8, ir.DataType.UINT8)
_DEQUANTIZED = (*NARROW, ir.DataType.INT32)


def dequantized_operand(node: ir.Node, position: int, build: Builder, axis: int | None = None) -> ir.Value:
    """Of three operands in a row: values, scale and zero point."""
    values, scale = operand(node, position), operand(node, position + 1)
    return dequantized(build, values, scale, given(node, position + 2), axis)


def dequantized(
    build: Builder, values: ir.Value, scale: ir.Value, zero: ir.Value | None, axis: int | None = None
) -> ir.Value:
    """`scale * (values - zero)`, in the scale's type. Parameters of rank 1 lie along `axis`."""
    rank = len(shape_of(values))
    if dtype_of(values) in _DEQUANTIZED and _has_operator(build, scale, zero):
        parameters = [_per_tensor(p, build) for p in (scale, zero) if p is not None]
        return build.op("DequantizeLinear", values, *parameters, axis=None if _is_one(scale) else axis)
    number = dtype_of(scale)
    scale = along_axis(scale, rank, axis, build)
    shifted = build.cast(values, number)
    if zero is not None:
        shifted = build.op("Sub", shifted, build.cast(along_axis(zero, rank, axis, build), number))
    return build.op("Mul", shifted, scale)


def quantized(
    build: Builder,
    value: ir.Value,
    scale: ir.Value,
    zero: ir.Value | None,
    dtype: ir.DataType,
    axis: int | None = None,
) -> ir.Value:
    """Integers of a type: `value / scale`, rounded to even, plus `zero`, saturated."""
    if dtype in NARROW and _has_operator(build, scale, zero):
        none = build.constant(np.zeros(() if _is_one(scale) else shape_of(scale)), dtype)
        parameters = [_per_tensor(scale, build), none if zero is None else _per_tensor(zero, build)]
        return build.op("QuantizeLinear", value, *parameters, axis=None if _is_one(scale) else axis)
    rank, number = 0 if axis is None else len(shape_of(value)), dtype_of(scale)
    steps = build.op("Round", build.op("Div", value, along_axis(scale, rank, axis, build)))
    if zero is not None:
        steps = build.op("Add", steps, build.cast(along_axis(zero, rank, axis, build), number))
    low, high = (build.constant(limit, number) for limit in (dtype.min, dtype.max))
    return build.cast(build.op("Min", build.op("Max", steps, low), high), dtype)


def along_axis(parameter: ir.Value, rank: int, axis: int | None, build: Builder) -> ir.Value:
    """A parameter so that it broadcasts: of rank 1 it lies along the axis of a tensor of this rank."""
    if _is_one(parameter):
        return _per_tensor(parameter, build)
    if len(shape_of(parameter)) != 1 or axis is None:
        return parameter
    return build.reshape(parameter, [-1 if i == axis % rank else 1 for i in range(rank)])


def _has_operator(build: Builder, scale: ir.Value, zero: ir.Value | None) -> bool:
    """Whether the operators take these parameters: one number, or since opset 13 as many as an axis has."""
    is_per_axis = len(shape_of(scale)) == 1 and build.opset >= 13
    if dtype_of(scale) != ir.DataType.FLOAT or not (_is_one(scale) or is_per_axis):
        return False
    return zero is None or shape_of(zero) == shape_of(scale) or (_is_one(scale) and _is_one(zero))


def _is_one(parameter: ir.Value) -> bool:
    return shape_of(parameter) in ((), (1,))


def _per_tensor(parameter: ir.Value, build: Builder) -> ir.Value:
    """A scalar for a parameter of one element."""
    return build.reshape(parameter, []) if shape_of(parameter) == (1,) else parameter
