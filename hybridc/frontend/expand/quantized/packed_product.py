"""Products of a few rows with weights of 4 bits, which stay packed.

    y = a @ (scale * (code - zero))

A block of codes in each column has one scale and zero. Such products take as long as reading the weights.
With more rows a weight that is read serves them all, and unpacking it again in each run would cost time.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.frontend.expand.builder import Builder, dtype_of, shape_of, typed

PACKED_PRODUCT = "PackedProduct"
"""An operator that no file has: rows [M, K], codes [N / 64, K / 2, 64], steps [2, N / 64, blocks, 64]."""
MOST_ROWS = 8
_PANEL = 64
"""Columns that lie side by side: a cache line of codes."""


def packed_product(
    a: ir.Value, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, build: Builder
) -> ir.Value | None:
    """a [..., K] times the transpose of codes [N, K] of 4 bits, with scales, and zeros, [N, blocks].

    None if there are more rows than that pays for, or other extents than panels and blocks have.
    """
    *leading, depth = shape_of(a)
    columns, blocks = scales.shape
    rows, is_even = math.prod(leading), depth % (2 * blocks) == 0
    if not 1 <= rows <= MOST_ROWS or columns % _PANEL or not is_even:
        return None
    parted = codes.reshape(columns // _PANEL, _PANEL, blocks, 2, depth // blocks // 2)
    joined = (parted[:, :, :, 0] | parted[:, :, :, 1] << 4).transpose(0, 2, 3, 1)
    packed = joined.reshape(columns // _PANEL, depth // 2, _PANEL)
    scales = scales.astype(np.float32)
    steps = np.stack([scales, scales * zeros.astype(np.float32)])
    steps = steps.reshape(2, columns // _PANEL, _PANEL, blocks).transpose(0, 1, 3, 2)
    flat = build.reshape(build.cast(a, ir.DataType.FLOAT), (rows, depth))
    constants = (build.constant(np.ascontiguousarray(each)) for each in (packed, steps))
    product = typed(build.op(PACKED_PRODUCT, flat, *constants), ir.DataType.FLOAT, (rows, columns))
    shaped = typed(build.reshape(product, (*leading, columns)), ir.DataType.FLOAT, (*leading, columns))
    return build.cast(shaped, dtype_of(a))


def import_packed_product(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """One call of a function with one sum, which rules know by its name."""
    operands = [importer._nodes[name] for name in proto.input]
    return importer.bb.call_te(_computed, *operands, primfunc_name_hint="packed_product")


def _computed(rows: te.Tensor, codes: te.Tensor, steps: te.Tensor) -> te.Tensor:
    (height, depth), blocks = rows.shape, int(steps.shape[2])
    block = int(depth) // blocks
    half = block // 2
    k = te.reduce_axis((0, int(depth)), name="k")

    def weight(n: te.Var) -> te.Expr:
        panel, lane, number, inner = n // _PANEL, n % _PANEL, k // block, k % block
        pair = codes[panel, number * half + inner % half, lane].astype("int32")
        code = (pair >> (inner // half * 4).astype("int32")) & 15
        scale, offset = (steps[i, panel, number, lane] for i in (0, 1))
        return scale * code.astype("float32") - offset

    shape = (height, int(codes.shape[0]) * _PANEL)
    return te.compute(shape, lambda m, n: te.sum(rows[m, k] * weight(n), axis=k), name="packed_product")
