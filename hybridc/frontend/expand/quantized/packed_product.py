"""Products with, and rows of, constant matrices of few bits, which stay packed in files, memory and budgets.

    y = a @ (scale * (code - zero))

Such products of few rows take as long as reading the weights; kernels of many rows dequantize a part at a
time into a buffer that stays in cache.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.checks import checked_index
from hybridc.frontend.expand.builder import Builder, dtype_of, shape_of, typed
from hybridc.frontend.expand.quantized.packed_matrix import PackedMatrix
from hybridc.packed.layout import ROUNDED_ROWS, PackedLayout, dequantized_rows
from hybridc.packed.product import PackedProduct

PACKED_PRODUCT = "PackedProduct"
"""An operator that no file has: rows [..., K] and the operands of a packed matrix [K, N]."""
PACKED_GATHER = "PackedGather"
"""Another one: indices of any shape and the operands of a matrix that is packed by rows."""


def packed_product(
    a: ir.Value, weight: PackedMatrix, build: Builder, *, rounds_rows: bool = False
) -> ir.Value:
    """a [..., K] times the matrix, in a's type; `rounds_rows`: a may be rounded to 8 bits."""
    rows, shape = build.cast(a, ir.DataType.FLOAT), (*shape_of(a)[:-1], weight.columns)
    product = _emitted(PACKED_PRODUCT, rows, weight, shape, build, {ROUNDED_ROWS: int(rounds_rows)})
    return build.cast(product, dtype_of(a))


def packed_gather(indices: ir.Value, table: PackedMatrix, dtype: ir.DataType, build: Builder) -> ir.Value:
    """The rows at the indices."""
    codes = table.operands[0]
    shape = (*shape_of(indices), codes.shape[1] * table.layout.codes_in_byte)
    return build.cast(_emitted(PACKED_GATHER, indices, table, shape, build, {}), dtype)


def _emitted(
    op_type: str,
    first: ir.Value,
    matrix: PackedMatrix,
    shape: tuple[int, ...],
    build: Builder,
    more: dict[str, int],
) -> ir.Value:
    attributes = {**asdict(matrix.layout), "columns": matrix.columns, **more}
    constants = (build.constant(each) for each in matrix.operands)
    return typed(build.op(op_type, first, *constants, **attributes), ir.DataType.FLOAT, shape)


def has_rows(value: ir.Value) -> bool:
    """Whether there is anything to compute. Raises NotYet."""
    return math.prod(shape_of(value)) > 0


def import_packed_product(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """One call of the function of such a product."""
    rounds_rows = bool(node.attributes[ROUNDED_ROWS].as_int())
    product = PackedProduct(_layout(node), node.attributes["columns"].as_int(), rounds_rows)
    operands = [importer._nodes[name] for name in proto.input]
    return importer.bb.call_te(product.computed, *operands, primfunc_name_hint="packed_product")


def import_packed_gather(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr:
    """Rows at indices that are checked as those of Gather are."""
    layout, extent = _layout(node), node.attributes["columns"].as_int()

    def computed(indices: te.Tensor, *table: te.Tensor) -> te.Tensor:
        row = dequantized_rows(layout, *table)
        width = int(table[0].shape[1]) * layout.codes_in_byte
        return te.compute(
            (*indices.shape, width),
            lambda *at: row(checked_index(indices(*at[:-1]), extent, "Gather"), at[-1]),
            name="packed_gather",
        )

    operands = [importer._nodes[name] for name in proto.input]
    return importer.bb.call_te(computed, *operands, primfunc_name_hint="packed_gather")


def _layout(node: ir.Node) -> PackedLayout:
    return PackedLayout(**{each.name: node.attributes[each.name].as_int() for each in fields(PackedLayout)})
