"""Shapes that a network computes of how many elements data say that there are."""

from __future__ import annotations

import onnx_ir as ir

from hybridc.frontend.counted.ledger import Extents, Ledger
from hybridc.frontend.values import constant_array, static_shape

_AS_LISTED = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators whose results have the elements of their operand in the same order."""


def extents(value: ir.Value | None, ledger: Ledger) -> Extents | None:
    """What the elements of a shape are, None if they are not known to be constants and counts."""
    known = constant_array(value)
    if known is not None:
        return tuple((int(extent), None) for extent in known.reshape(-1))
    if value is None or ledger.listed(value) is not None:
        return None if value is None else ledger.listed(value)
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type in _AS_LISTED:
        return extents(node.inputs[0], ledger)
    if node.op_type == "Concat":
        parts = [extents(part, ledger) for part in node.inputs]
        return None if None in parts else tuple(each for part in parts if part for each in part)
    if node.op_type == "ReduceSum" and _is_one(value):
        return _chosen(node.inputs[0], ledger)
    if node.op_type in ("Gather", "Slice"):
        return _picked(node, ledger)
    return None


def _picked(node: ir.Node, ledger: Ledger) -> Extents | None:
    """Some elements of a list."""
    source = extents(node.inputs[0], ledger)
    operands = [constant_array(value) for value in node.inputs[1:]]
    if (
        source is None
        or len(static_shape(node.inputs[0]) or ()) != 1
        or any(each is None for each in operands)
    ):
        return None
    numbers = [[int(n) for n in each.reshape(-1)] for each in operands if each is not None]
    if node.op_type == "Gather":
        return tuple(source[i] for i in numbers[0])
    if len(numbers) < 2:
        return None
    (start,), (end,), *rest = numbers
    return source[slice(start, end, rest[1][0] if len(rest) > 1 else 1)]


def _chosen(numbers: ir.Value | None, ledger: Ledger) -> Extents | None:
    """How many elements of a mask are true: a sum of all that NonZero lists the places of."""
    value, listed = numbers, None
    while value is not None and listed is None:
        listed, node = ledger.chosen(value), value.producer()
        is_mask = node is not None and node.op_type in _AS_LISTED and not node.domain
        value = node.inputs[0] if node is not None and is_mask else None
    return listed


def _is_one(value: ir.Value) -> bool:
    shape = static_shape(value)
    return shape is not None and all(extent == 1 for extent in shape)
