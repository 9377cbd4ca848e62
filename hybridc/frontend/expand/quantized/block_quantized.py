"""Constant weights with a scale for each block of an axis, of few bits or many: dequantized at compile time.

    weight = scale * (code - zero)

Definitions: DequantizeLinear 21 to 25 of ONNX; MatMulNBits, MatMulBnb4 and GatherBlockQuantized in
onnxruntime's docs/ContribOperators.md. Codes of less than 8 bits lie in bytes, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    constant_of,
    dtype_of,
    given,
    operand,
)
from hybridc.frontend.expand.quantized.packed_matrix import Codes, packed_panels, packed_rows
from hybridc.frontend.expand.quantized.packed_product import has_rows, packed_gather, packed_product
from hybridc.frontend.expand.quantized.quantization import NARROW, dequantized
from hybridc.frontend.values import SUPPORTED_TYPES, constant_array
from hybridc.placeholders import is_placeholder, placeholder

_BITS = (2, 4, 8)
_INT8_ACCURACY = 4
"""The `accuracy_level` of MatMulNBits that lets A be rounded to 8 bits."""
_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
"""What codes of bitsandbytes stand for: floating point of 4 bits, as fractions of the largest number."""
_NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The same of its normal float: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023)."""


def _dequantize_linear(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """What the importer does not have: blocks of constants, and integers that it cannot hold or scale."""
    values, scale, zero = operand(node, 0), operand(node, 1), given(node, 2)
    block = node.attributes.get_int("block_size", 0)
    dtype = dtype_of(values)
    if not dtype.is_integer() or (not block and dtype in (*NARROW, ir.DataType.INT32)):
        return None
    axis = node.attributes.get_int("axis", 1)
    known = constant_array(values)
    if known is None and not block and dtype in SUPPORTED_TYPES:
        return [dequantized(build, values, scale, zero, axis)]
    codes = constant_of(values, "a tensor")
    scales = constant_of(scale, "a scale")
    zeros = None if zero is None else constant_of(zero, "a zero point")
    result = ir.DataType(node.attributes.get_int("output_dtype", 0) or dtype_of(scale))
    if scales.ndim == codes.ndim and block:
        dense = _dequantized(codes, scales, zeros, axis, block)
    else:
        along = [-1 if i == axis % codes.ndim else 1 for i in range(codes.ndim)]
        zeros = None if zeros is None else zeros.reshape(along if zeros.size > 1 else ())
        dense = _scaled(codes, zeros, scales.reshape(along if scales.size > 1 else ()))
    return [build.constant(dense, result)]


def _mat_mul_nbits(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """A times the transpose of B, [N, blocks, bytes of a block]; bias (5)."""
    a = operand(node, 0)
    bits, block = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
    depth, columns = (node.attributes.get_int(name, 0) for name in ("K", "N"))
    if given(node, 4) is not None:
        raise Unsupported("with g_idx is not supported")
    if bits not in _BITS:
        raise Unsupported(f"of {bits} bits is not supported")
    blocks = -(-depth // block)
    packed = constant_of(operand(node, 1), "a weight").reshape(columns, -1)
    scales = constant_of(operand(node, 2), "a scale").reshape(columns, blocks)
    zero = given(node, 3)
    zeros: np.ndarray = np.full((), 1 << (bits - 1), np.uint8)
    if zero is not None:
        zeros = constant_of(zero, "a zero point").reshape(columns, -1)
        zeros = _unpacked(zeros, bits, blocks) if zeros.dtype == np.uint8 else zeros
    codes = _unpacked(packed, bits, depth)
    matrix = packed_panels(Codes(codes, scales, zeros, bits, block)) if not build.for_training else None
    if matrix is not None and has_rows(a):
        may_round = node.attributes.get_int("accuracy_level", 0) == _INT8_ACCURACY
        product = packed_product(a, matrix, build, rounds_rows=may_round)
    else:
        weight = _dequantized(codes, scales, zeros, 1, block)
        product = build.op("MatMul", a, _transposed(weight, dtype_of(a), build))
    bias = given(node, 5)
    return [product if bias is None else build.op("Add", product, bias)]


def _mat_mul_bnb4(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """A times the transpose of B: codes of 16 numbers, the first of a byte in its upper bits, each block of
    B's rows one after the other times its largest absolute value (2).
    """
    a, kind = operand(node, 0), node.attributes.get_int("quant_type", -1)
    depth, columns = (node.attributes.get_int(name, 0) for name in ("K", "N"))
    if kind not in (0, 1) or not node.attributes.get_int("transB", 1):
        raise Unsupported(f"of type {kind}, or with a B that is not transposed, is not supported")
    packed = constant_of(operand(node, 1), "a weight").ravel()
    if is_placeholder(packed):
        return [build.op("MatMul", a, _transposed(placeholder((columns, depth), "f4"), dtype_of(a), build))]
    numbers = (_FP4, _NF4)[kind][np.stack([packed >> 4, packed & 15], axis=1).ravel()[: columns * depth]]
    largest = constant_of(operand(node, 2), "a scale").astype(np.float32).ravel()
    blocks = np.arange(columns * depth) // node.attributes.get_int("block_size", 0)
    weight = (numbers * largest[blocks]).reshape(columns, depth)
    return [build.op("MatMul", a, _transposed(weight, dtype_of(a), build))]


def _gather_block_quantized(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Rows of a dequantized table. Codes of a uint8 table are packed, and zero is in their middle."""
    codes = constant_of(operand(node, 0), "a table")
    scale, zero = operand(node, 2), given(node, 3)
    scales = constant_of(scale, "a scale")
    zeros = None if zero is None else constant_of(zero, "a zero point")
    axis, block = node.attributes.get_int("quantize_axis", 1), node.attributes.get_int("block_size", 128)
    bits = 4  # of int4 and uint4
    if codes.dtype == np.uint8:
        bits = node.attributes.get_int("bits", 4)
        if bits not in _BITS:
            raise Unsupported(f"of {bits} bits is not supported")
        codes = _unpacked(codes, bits, codes.shape[-1] * 8 // bits)
        middle = np.full((), 1 << (bits - 1), np.uint8)
        zeros = middle if zeros is None else _unpacked(zeros, bits, scales.shape[-1])
    indices, gather_axis = operand(node, 1), node.attributes.get_int("gather_axis", 0)
    if not build.for_training and codes.ndim == 2 and gather_axis % 2 == 0 and axis % 2 == 1:
        packed = packed_rows(Codes(codes, scales, zeros, bits, block))
        if packed is not None and has_rows(indices) and constant_array(indices) is None:
            return [packed_gather(indices, packed, dtype_of(scale), build)]
    table = build.constant(_dequantized(codes, scales, zeros, axis, block), dtype_of(scale))
    return [build.op("Gather", table, indices, axis=gather_axis)]


def _dequantized(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, axis: int, block: int
) -> np.ndarray:
    """float32: parameters have one element for each block of an axis; the last may be cut off."""
    extent = codes.shape[axis]

    def spread(parameter: np.ndarray) -> np.ndarray:
        return parameter.take(np.arange(extent) // block, axis) if parameter.ndim else parameter

    if is_placeholder(codes):
        return placeholder(codes.shape, np.float32)
    return _scaled(codes, None if zeros is None else spread(zeros), spread(scales))


def _scaled(codes: np.ndarray, zeros: np.ndarray | None, scales: np.ndarray) -> np.ndarray:
    """float32, of parameters that broadcast."""
    if is_placeholder(codes):
        return placeholder(codes.shape, np.float32)
    return _difference(codes, zeros) * scales.astype(np.float32)


def _transposed(weight: np.ndarray, dtype: ir.DataType, build: Builder) -> ir.Value:
    turned = weight.T if is_placeholder(weight) else np.ascontiguousarray(weight.T)
    return build.constant(turned, dtype)


def _difference(codes: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """float32; of int32, whose differences it may not hold, by way of float64."""
    wide = codes.astype(np.float64 if codes.dtype.itemsize > 2 else np.float32)
    return (wide if zeros is None else wide - zeros.astype(wide.dtype)).astype(np.float32)


def _unpacked(packed: np.ndarray, bits: int, extent: int) -> np.ndarray:
    """The first codes of each row of bytes."""
    if is_placeholder(packed):
        return placeholder((*packed.shape[:-1], min(extent, packed.shape[-1] * 8 // bits)), np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :extent]


STANDARD: dict[str, Expansion] = {"DequantizeLinear": _dequantize_linear}
MICROSOFT: dict[str, Expansion] = {
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulBnb4": _mat_mul_bnb4,
    "MatMulNBits": _mat_mul_nbits,
}
