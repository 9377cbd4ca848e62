"""Operators that no file can have: kernels behind those whose results have as many elements as data say."""

from __future__ import annotations

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, shape_of, typed

POSITIONS = "Positions"
"""Of a list of booleans the positions of those that are true, behind them zeros; and their number, [1]."""
SUPPRESSION = "Suppression"
"""Boxes [B, N, 4], scores [B, C, N], the most picks, the IoU threshold, the score threshold and the number of
boxes that count, [1] each. Boxes picked for each batch and class, [B * C, P], best first and -1 behind them;
and what the kernel works on. Attributes: `picks`, P; `is_centred`, of boxes; `has_threshold`, for scores."""


def positions(mask: ir.Value, build: Builder) -> tuple[ir.Value, ir.Value]:
    """Positions [n] and count of a mask [n]."""
    found, count = build.ops(POSITIONS, [mask], {}, results=2)
    return typed(found, ir.DataType.INT64, shape_of(mask)), typed(count, ir.DataType.INT64, [1])
