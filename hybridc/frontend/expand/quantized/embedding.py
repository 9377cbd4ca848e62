"""The lookups of BERT in quantized tables. (onnxruntime's docs/ContribOperators.md)"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, Expansion, dtype_of, given, operand, shape_of, typed
from hybridc.frontend.expand.normalization import Embeddings, embedded
from hybridc.frontend.expand.quantized.quantization import dequantized


def _quantized_embedding(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Tables and what their sum is normalized by (2 to 6), each with a scale (8) and a zero point (13)."""

    def table(position: int) -> ir.Value:
        codes, scale, zero = (operand(node, i) for i in (position, position + 6, position + 11))
        return typed(dequantized(build, codes, scale, zero), dtype_of(scale), shape_of(codes))

    segments = None if given(node, 4) is None else table(4)
    tables = Embeddings(table(2), table(3), segments, table(5), table(6))
    return embedded(node, tables, None, build)[:2]


MICROSOFT: dict[str, Expansion] = {"QEmbedLayerNormalization": _quantized_embedding}
