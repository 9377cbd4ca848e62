"""Elementwise operators, pools and joins of quantized tensors, which onnxruntime's quantizer makes.

Operands are dequantized, and results are quantized again. (onnxruntime's docs/ContribOperators.md)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    dtype_of,
    given,
    kept,
    operand,
    refuse_attributes,
    shape_of,
)
from hybridc.frontend.expand.quantized.quantization import dequantized, dequantized_operand, quantized

Computation = Callable[[ir.Node, Builder, ir.Value], ir.Value]


def _result(node: ir.Node, value: ir.Value, source: int, position: int, build: Builder) -> list[ir.Value]:
    """In the type of operand `source`, with the scale and zero point at two operands in a row."""
    scale, zero = operand(node, position), given(node, position + 1)
    return [quantized(build, value, scale, zero, dtype_of(operand(node, source)))]


def _binary(op_type: str, node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    sides = [dequantized_operand(node, position, build) for position in (0, 3)]
    return _result(node, build.op(op_type, *sides), 0, 6, build)


def _unary(compute: Computation, node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """x with its parameters (0), and those of the result (3)."""
    return _result(node, compute(node, build, dequantized_operand(node, 0, build)), 0, 3, build)


def _sigmoid(node: ir.Node, build: Builder, x: ir.Value) -> ir.Value:
    return build.op("Sigmoid", x)


def _leaky_relu(node: ir.Node, build: Builder, x: ir.Value) -> ir.Value:
    return build.op("LeakyRelu", x, alpha=node.attributes.get_float("alpha", 0.01))


def _average_pool(node: ir.Node, build: Builder, x: ir.Value) -> ir.Value:
    refuse_attributes(node, ("channels_last",))
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    return build.ops("AveragePool", [x], kept(node, names))[0]


def _global_average_pool(node: ir.Node, build: Builder, x: ir.Value) -> ir.Value:
    refuse_attributes(node, ("channels_last",))
    return build.op("GlobalAveragePool", x)


def _softmax(node: ir.Node, build: Builder, x: ir.Value) -> ir.Value:
    """Along an axis; for attribute `opset` below 13 over it and all behind it.

    onnxruntime drops the fraction of 1 / y_scale: its result may be a step less.
    """
    shape = shape_of(operand(node, 0))
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if axis == len(shape) - 1:
        return build.op("Softmax", x, axis=axis)
    if node.attributes.get_int("opset", 13) >= 13:
        if build.opset < 13:
            raise Unsupported("along an axis that is not the last needs opset 13")
        return build.op("Softmax", x, axis=axis)
    rows = build.reshape(x, [math.prod(shape[:axis]), math.prod(shape[axis:])])
    return build.reshape(build.op("Softmax", rows, axis=1), shape)


def _concat(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Scale and zero point of the result, then each part with its own."""
    parts = [dequantized_operand(node, position, build) for position in range(2, len(node.inputs), 3)]
    joined = build.op("Concat", *parts, axis=node.attributes.get_int("axis", 0))
    zero = operand(node, 1)
    return [quantized(build, joined, operand(node, 0), zero, dtype_of(zero))]


def _where(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Condition (0), both sides with their parameters (1, 4), those of the result (7)."""
    sides = [dequantized_operand(node, position, build) for position in (1, 4)]
    return _result(node, build.op("Where", operand(node, 0), *sides), 1, 7, build)


def _quantize_linear(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    x, zero = operand(node, 0), given(node, 2)
    dtype = ir.DataType.UINT8 if zero is None else dtype_of(zero)
    return [quantized(build, x, operand(node, 1), zero, dtype, node.attributes.get_int("axis", 1))]


def _dequantize_linear(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    axis = node.attributes.get_int("axis", 1)
    return [dequantized(build, operand(node, 0), operand(node, 1), given(node, 2), axis)]


_UNARY: dict[str, Computation] = {
    "QLinearAveragePool": _average_pool,
    "QLinearGlobalAveragePool": _global_average_pool,
    "QLinearLeakyRelu": _leaky_relu,
    "QLinearSigmoid": _sigmoid,
    "QLinearSoftmax": _softmax,
}
MICROSOFT: dict[str, Expansion] = {
    "DequantizeLinear": _dequantize_linear,
    "QLinearAdd": functools.partial(_binary, "Add"),
    "QLinearConcat": _concat,
    "QLinearMul": functools.partial(_binary, "Mul"),
    "QLinearWhere": _where,
    "QuantizeLinear": _quantize_linear,
    **{name: functools.partial(_unary, compute) for name, compute in _UNARY.items()},
}
