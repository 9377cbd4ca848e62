"""Operators that the importer computes in float32 only, or whose steps or sums it would each round.

16-bit numbers are widened for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, Expansion, dtype_of, operand, typed

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_OPERATORS = ("Einsum", "Elu", "Gelu", "HardSwish", "LRN", "Mish", "Selu", "ThresholdedRelu")


def _widened(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """The operator in float32, rounded once. Its operands and its result are of one type."""
    dtype = dtype_of(operand(node, 0))
    if dtype not in _NARROW:
        return None
    wide = [build.cast(operand(node, i), ir.DataType.FLOAT) for i in range(len(node.inputs))]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return [build.cast(typed(build.op(node.op_type, *wide, **attributes), ir.DataType.FLOAT), dtype)]


STANDARD: dict[str, Expansion] = dict.fromkeys(_OPERATORS, _widened)
