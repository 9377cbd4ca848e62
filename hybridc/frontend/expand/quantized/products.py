"""Products and convolutions of quantized tensors, of ONNX and of onnxruntime's quantizer.

Where the result is quantized, too, operands are dequantized and the result is quantized again: the form of
which kernels in integers are made. Where it is not, integers are multiplied, and exactly.
Definitions: onnx's operator pages, onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.expand.attention import attended
from hybridc.frontend.expand.builder import (
    WINDOW,
    Builder,
    Expansion,
    Unsupported,
    dtype_of,
    given,
    kept,
    operand,
    refuse_attributes,
    shape_of,
    typed,
)
from hybridc.frontend.expand.quantized.quantization import (
    along_axis,
    dequantized,
    dequantized_operand,
    quantized,
)


def _qlinear_conv(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Conv of x (0) and w (3), with y's scale and zero point (6) and an int32 bias (8) in steps of x's by
    w's.
    """
    operands = [dequantized_operand(node, 0, build), dequantized_operand(node, 3, build, axis=0)]
    bias = given(node, 8)
    if bias is not None:
        operands.append(_bias(bias, operand(node, 1), operand(node, 4), build))
    (result,) = build.ops("Conv", operands, kept(node, WINDOW))
    return [_requantized(result, node, 6, build)]


def _qlinear_mat_mul(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """MatMul of a (0) and b (3): a scale for each row of a, or for each column of b."""
    ranks = [len(shape_of(operand(node, position))) for position in (0, 3)]
    left = dequantized_operand(node, 0, build, axis=max(ranks[0] - 2, 0))
    right = dequantized_operand(node, 3, build, axis=ranks[1] - 1)
    return [_requantized(build.op("MatMul", left, right), node, 6, build)]


def _qgemm(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """alpha * A' B' + C; C (6) is int32 in steps of alpha times A's by B's. Without y's scale (7) a float."""
    alpha = node.attributes.get_float("alpha", 1.0)
    columns = 0 if node.attributes.get_int("transB", 0) else 1
    operands = [dequantized_operand(node, 0, build), dequantized_operand(node, 3, build, axis=columns)]
    bias = given(node, 6)
    if bias is not None:
        scale = operand(node, 1)
        scale = scale if alpha == 1.0 else build.op("Mul", scale, build.like(scale, alpha))
        operands.append(_bias(bias, scale, operand(node, 4), build))
    (result,) = build.ops("Gemm", operands, kept(node, ("alpha", "transA", "transB")))
    return [result if given(node, 7) is None else _requantized(result, node, 7, build)]


def _bias(bias: ir.Value, left: ir.Value, right: ir.Value, build: Builder) -> ir.Value:
    """A sum of products that is added: its step is the product of the factors' steps."""
    scale, columns = _vector(right, build), math.prod(shape_of(right))
    step = build.op("Mul", build.reshape(left, []), scale)
    if columns > 1 and shape_of(bias)[-1:] != (columns,):  # one bias for all columns
        return build.op("Mul", build.cast(bias, ir.DataType.FLOAT), step)
    typed(step, dtype_of(right), (columns,) if columns > 1 else ())
    return dequantized(build, bias, step, None, axis=len(shape_of(bias)) - 1)


def _vector(parameter: ir.Value, build: Builder) -> ir.Value:
    """A scalar if it is one number, of rank 1 otherwise."""
    return build.reshape(parameter, [] if math.prod(shape_of(parameter)) == 1 else [-1])


def _requantized(value: ir.Value, node: ir.Node, position: int, build: Builder) -> ir.Value:
    """With the scale and the zero point at two operands in a row."""
    zero = operand(node, position + 1)
    return quantized(build, value, operand(node, position), zero, dtype_of(zero))


def _conv_integer(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Exact sums of (x - x's zero) * (w - w's zero): float64 holds all integers that int32 does."""
    sides = [
        _shifted(operand(node, i), given(node, 2 + i), ir.DataType.DOUBLE, axis, build)
        for i, axis in enumerate((None, 0))
    ]
    (sums,) = build.ops("Conv", sides, kept(node, WINDOW))
    return [build.cast(sums, ir.DataType.INT32)]


def _shifted(
    values: ir.Value, zero: ir.Value | None, dtype: ir.DataType, axis: int | None, build: Builder
) -> ir.Value:
    wide = build.cast(values, dtype)
    if zero is None:
        return wide
    return build.op("Sub", wide, build.cast(along_axis(zero, len(shape_of(values)), axis, build), dtype))


def _dynamic_quantize_mat_mul(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """A (0) is quantized by its extrema; B (1) has scale (2) and zero point (3); bias (4)."""
    a, scale, zero = build.ops("DynamicQuantizeLinear", [operand(node, 0)], {}, results=3)
    b, b_scale = operand(node, 1), operand(node, 2)
    sums = build.op("MatMulInteger", a, b, zero, *_zeros(given(node, 3), build))
    step = build.op("Mul", scale, _vector(b_scale, build))
    return [_scaled(sums, step, given(node, 4), build)]


def _mat_mul_integer_to_float(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """A (0) and B (1), their scales (2, 3) and zero points (4, 5), a bias (6)."""
    return [_scaled_product(node, (2, 3, 4, 5, 6), build)]


def _scaled_product(node: ir.Node, places: tuple[int, int, int, int, int], build: Builder) -> ir.Value:
    """The operands 0 and 1 multiplied; scales, zero points and bias are the operands at these places."""
    a, b, a_scale, b_scale = (operand(node, i) for i in (0, 1, *places[:2]))
    if math.prod(shape_of(a_scale)) != 1:
        raise Unsupported("with a scale for each row is not supported")
    a_zero, b_zero, bias = (given(node, i) for i in places[2:])
    zero = build.constant(0, dtype_of(a)) if a_zero is None else build.reshape(a_zero, [])
    sums = build.op("MatMulInteger", a, b, zero, *_zeros(b_zero, build))
    step = build.op("Mul", build.reshape(a_scale, []), _vector(b_scale, build))
    return _scaled(sums, step, bias, build)


def _quantized_attention(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Attention of an input (0) and weights (1) with a bias (2), scales (3, 4) and zero points (6, 7); mask
    (5) and past (8) as of Attention.
    """
    refuse_attributes(node, ("do_rotary", "past_present_share_buffer"))
    columns = shape_of(operand(node, 1))[1]
    packed = _scaled_product(node, (3, 4, 6, 7, 2), build)
    typed(packed, ir.DataType.FLOAT, (*shape_of(operand(node, 0))[:2], columns))
    return attended(node, packed, [columns // 3] * 3, past=8, mask=given(node, 5), bias=None, build=build)


def _zeros(zero: ir.Value | None, build: Builder) -> list[ir.Value]:
    """The right operand's zero point, if it has one."""
    return [] if zero is None else [_vector(zero, build)]


def _scaled(sums: ir.Value, step: ir.Value, bias: ir.Value | None, build: Builder) -> ir.Value:
    result = build.op("Mul", build.op("Cast", sums, to=int(ir.DataType.FLOAT)), step)
    return result if bias is None else build.op("Add", result, bias)


STANDARD: dict[str, Expansion] = {
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_mat_mul,
}
MICROSOFT: dict[str, Expansion] = {
    "DynamicQuantizeMatMul": _dynamic_quantize_mat_mul,
    "MatMulIntegerToFloat": _mat_mul_integer_to_float,
    "QAttention": _quantized_attention,
    "QGemm": _qgemm,
}
