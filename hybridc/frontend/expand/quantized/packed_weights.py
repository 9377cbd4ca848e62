"""Constant weights behind DequantizeLinear that products and lookups read: they stay packed.

A DequantizeLinear is left alone at first: MatMul, Gemm and Gather behind it take its constants themselves
where they can. What is left is dequantized when it is visited again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, Expansion, dtype_of, given, operand
from hybridc.frontend.expand.quantized.packed_matrix import Codes, packed_panels, packed_rows
from hybridc.frontend.expand.quantized.packed_product import has_rows, packed_gather, packed_product
from hybridc.frontend.values import constant_array

_BITS = {
    ir.DataType.INT4: 4,
    ir.DataType.UINT4: 4,
    ir.DataType.INT8: 8,
    ir.DataType.UINT8: 8,
    ir.DataType.FLOAT8E4M3FN: 8,
    ir.DataType.FLOAT8E4M3FNUZ: 8,
    ir.DataType.FLOAT8E5M2: 8,
    ir.DataType.FLOAT8E5M2FNUZ: 8,
    ir.DataType.FLOAT4E2M1: 4,
}
_LEFT = "hybridc.left_packed"
"""Key of the metadata of a DequantizeLinear that was left alone once."""
_SAME_VALUES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")


def is_left_packed(node: ir.Node, build: Builder) -> bool:
    """Whether a DequantizeLinear stays as it is for now, for those that read it; at most once."""
    if build.for_training or _LEFT in node.meta:
        return False
    node.meta[_LEFT] = True
    return any(use.node.op_type in (*STANDARD, "Transpose") for use in node.outputs[0].uses())


def is_read(node: ir.Node) -> bool:
    """Whether anything is left that reads the result, perhaps transposed."""
    output = node.outputs[0]
    if output.is_graph_output():
        return True
    return any(use.node.op_type != "Transpose" or is_read(use.node) for use in output.uses())


def _mat_mul(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    a, b = operand(node, 0), operand(node, 1)
    product = _product(a, b, False, 1.0, build)
    return None if product is None else [product]


def _gemm(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """alpha * A' B' + beta * C."""
    a, b, c = operand(node, 0), operand(node, 1), given(node, 2)
    if node.attributes.get_int("transA", 0):
        return None
    is_transposed = bool(node.attributes.get_int("transB", 0))
    result = _product(a, b, is_transposed, node.attributes.get_float("alpha", 1.0), build)
    if result is None:
        return None
    beta = node.attributes.get_float("beta", 1.0)
    if c is None or beta == 0.0:
        return [result]
    return [build.op("Add", result, c if beta == 1.0 else build.op("Mul", c, build.like(c, beta)))]


def _gather(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Rows of a table."""
    indices = operand(node, 1)
    if node.attributes.get_int("axis", 0) != 0 or constant_array(indices) is not None:
        return None
    table = operand(node, 0)
    codes = _codes(table, 1, build)
    packed = None if codes is None else packed_rows(codes)
    if packed is None or not has_rows(indices):
        return None
    return [packed_gather(indices, packed, dtype_of(table), build)]


def _product(a: ir.Value, b: ir.Value, is_transposed: bool, alpha: float, build: Builder) -> ir.Value | None:
    codes = _codes(b, 1 if is_transposed else 0, build)
    # products of integers are for kernels in integers
    if codes is None or (codes.codes.dtype in (np.int8, np.uint8) and _is_dequantized(a)):
        return None
    packed = packed_panels(codes)
    if packed is None or not has_rows(a):
        return None
    product = packed_product(a, packed, build)
    return product if alpha == 1.0 else build.op("Mul", product, build.like(a, alpha))


def _is_dequantized(value: ir.Value) -> bool:
    """Whether a value is that of 8-bit integers."""
    producer = value.producer()
    while producer is not None and producer.op_type in _SAME_VALUES and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _codes(value: ir.Value, depth_axis: int, build: Builder) -> Codes | None:
    """What a constant matrix is dequantized from, its `depth_axis` as the last one; None if it is another."""
    producer = value.producer() if not build.for_training else None
    while producer is not None and producer.op_type == "Transpose":
        if list(producer.attributes.get_ints("perm", [1, 0])) != [1, 0]:
            return None
        depth_axis = 1 - depth_axis
        producer = operand(producer, 0).producer()
    if producer is None or (producer.domain, producer.op_type) != ("", "DequantizeLinear"):
        return None
    bits = _BITS.get(dtype_of(operand(producer, 0)))
    codes, scales, zeros = (constant_array(given(producer, i)) for i in range(3))
    if bits is None or codes is None or codes.ndim != 2 or scales is None:
        return None
    if zeros is None and given(producer, 2) is not None:
        return None
    if not dtype_of(operand(producer, 0)).is_integer():
        zeros = None  # theirs is 0
    return _along(producer, Codes(codes, scales, zeros, bits, 0), depth_axis)


def _along(node: ir.Node, found: Codes, depth_axis: int) -> Codes | None:
    """With rows along the depth; None if its scales differ in another way than by rows and blocks of them."""
    axis, block = node.attributes.get_int("axis", 1) % 2, node.attributes.get_int("block_size", 0)
    codes = found.codes if depth_axis == 1 else found.codes.T
    rows, depth = codes.shape
    is_blocked = bool(block) and found.scales.ndim == 2
    if found.scales.size > 1 and (axis == depth_axis) != is_blocked:
        return None

    def arranged(parameter: np.ndarray) -> np.ndarray:
        if parameter.size == 1:  # of all blocks
            return np.broadcast_to(parameter.reshape(1, 1), (rows, -(-depth // block) if is_blocked else 1))
        if is_blocked:
            return parameter if depth_axis == 1 else parameter.T
        return parameter.reshape(rows, 1)

    zeros = None if found.zeros is None else arranged(found.zeros)
    return Codes(codes, arranged(found.scales), zeros, found.bits, block if is_blocked else depth)


STANDARD: dict[str, Expansion] = {"Gather": _gather, "Gemm": _gemm, "MatMul": _mat_mul}
