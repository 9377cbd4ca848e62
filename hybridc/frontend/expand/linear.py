"""QuantizeLinear and DequantizeLinear in the forms that no importer has: of blocks, and of types of at most 8
bits. They become arithmetic, and casts (`frontend/narrow/`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    dtype_of,
    given,
    operand,
    shape_of,
)
from hybridc.frontend.expand.quantized import block_quantized
from hybridc.frontend.expand.quantized.packed_weights import is_left_packed, is_read
from hybridc.frontend.values import NARROW_TYPES, constant_array

_IMPORTED = (ir.DataType.INT8, ir.DataType.UINT8)
"""What QuantizeLinear makes as it is."""


def _quantize_linear(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """`x / scale`: of integers rounded to even, plus the zero point, saturated; else cast."""
    x, scale, zero = operand(node, 0), operand(node, 1), given(node, 2)
    block, precision = (node.attributes.get_int(name, 0) for name in ("block_size", "precision"))
    wanted = ir.DataType(node.attributes.get_int("output_dtype", 0) or int(ir.DataType.UINT8))
    target = wanted if zero is None else dtype_of(zero)
    if target in _IMPORTED and not block and not precision:
        return None
    own = dtype_of(x) if dtype_of(x) == dtype_of(scale) else ir.DataType.FLOAT
    own = ir.DataType(precision) if precision else own
    quotient = build.op("Div", build.cast(x, own), _spread(node, build.cast(scale, own), build))
    if not target.is_integer():
        return [build.op("Cast", quotient, to=int(target), saturate=node.attributes.get_int("saturate", 1))]
    # a half has no room for 16 bits
    wide = own if own == ir.DataType.DOUBLE else ir.DataType.FLOAT
    steps = build.cast(build.op("Round", quotient), wide)
    if zero is not None:
        steps = build.op("Add", steps, _spread(node, build.cast(zero, wide), build))
    low, high = (build.constant(limit, wide) for limit in (target.min, target.max))
    return [build.op("Cast", build.op("Min", build.op("Max", steps, low), high), to=int(target))]


def _dequantize_linear(node: ir.Node, build: Builder) -> Sequence[ir.Value | None] | None:
    """`scale * (x - zero)` of what a run computes, and of floating point numbers of at most 8 bits."""
    if is_left_packed(node, build) or not is_read(node):
        return None
    x, scale, zero = operand(node, 0), operand(node, 1), given(node, 2)
    dtype, is_known = dtype_of(x), constant_array(x) is not None
    if dtype.is_integer() and (
        is_known or not (node.attributes.get_int("block_size", 0) or dtype in NARROW_TYPES)
    ):
        return block_quantized.STANDARD["DequantizeLinear"](node, build)
    result = ir.DataType(node.attributes.get_int("output_dtype", 0) or int(dtype_of(scale)))
    wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in (result, dtype_of(scale)) else ir.DataType.FLOAT
    numbers = build.cast(x, wide)
    if zero is not None and dtype.is_integer():  # that of other types is 0
        numbers = build.op("Sub", numbers, _spread(node, build.cast(zero, wide), build))
    product = build.op("Mul", numbers, _spread(node, build.cast(scale, wide), build))
    return [build.op("Cast", product, to=int(result))]


def _spread(node: ir.Node, parameter: ir.Value, build: Builder) -> ir.Value:
    """A scale or zero point so that it broadcasts: of one number, along the axis, or for each block of it."""
    shape, own = shape_of(operand(node, 0)), shape_of(parameter)
    axis = node.attributes.get_int("axis", 1) % max(len(shape), 1)
    if own in ((), (1,)):
        return build.reshape(parameter, [])
    block = node.attributes.get_int("block_size", 0)
    if not block:
        return build.reshape(parameter, [-1 if i == axis else 1 for i in range(len(shape))])
    if len(own) != len(shape) or block < 0 or own[axis] * block < shape[axis]:
        raise Unsupported("needs a scale for each block")
    blocks = np.arange(*bounded(shape[axis])) // block
    return build.op("Gather", parameter, build.constant(blocks, "int64"), axis=axis)


STANDARD: dict[str, Expansion] = {
    "DequantizeLinear": _dequantize_linear,
    "QuantizeLinear": _quantize_linear,
}
