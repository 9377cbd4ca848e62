"""A network and itself folded at other sizes: equal nodes, whose constants tell what depends on sizes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.folding import origin

Match = Mapping[ir.Value, ir.Value]
"""The value of another graph by each of one's own that is read or a result."""


def matched(graph: ir.Graph, other: ir.Graph, name: str, sizes: str) -> Match:
    """The values of a graph that was folded from the same network at other sizes, told in `sizes`.

    Raises ModelError HC117 if it has other nodes.
    """
    found: dict[ir.Value, ir.Value] = dict(zip(graph.inputs, other.inputs, strict=True))
    own, others = list(graph), list(other)
    for node, twin in zip(own, others, strict=False):
        if not _pair(node, twin, found):
            raise _differs(node, name, sizes)
    if len(own) != len(others):
        longer = own if len(own) > len(others) else others
        raise _differs(longer[min(len(own), len(others))], name, sizes)
    for output, twin_output in zip(graph.outputs, other.outputs, strict=True):
        if not _same_value(output, twin_output, found):
            producer = output.producer() or twin_output.producer()
            raise _differs(producer, name, sizes)
    return found


def _pair(node: ir.Node, twin: ir.Node, found: dict[ir.Value, ir.Value]) -> bool:
    """Whether the nodes do the same with the same values; notes their constants and results."""
    shape = [(each.domain, each.op_type, len(each.inputs), len(each.outputs)) for each in (node, twin)]
    if shape[0] != shape[1] or node.attributes.keys() != twin.attributes.keys():
        return False
    if not all(_same_value(a, b, found) for a, b in zip(node.inputs, twin.inputs, strict=True)):
        return False
    if not all(_same_attribute(each, twin.attributes[key]) for key, each in node.attributes.items()):
        return False
    found.update(zip(node.outputs, twin.outputs, strict=True))
    return True


def _same_value(value: ir.Value | None, twin: ir.Value | None, found: dict[ir.Value, ir.Value]) -> bool:
    if value is None or twin is None:
        return value is twin
    if value.const_value is not None and twin.const_value is not None:
        return found.setdefault(value, twin) is twin
    return found.get(value) is twin


def _same_attribute(one: ir.Attr, other: ir.Attr) -> bool:
    if one.type == ir.AttributeType.TENSOR:
        return one.value.numpy().tobytes() == other.value.numpy().tobytes()
    is_graph = one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return is_graph or bool(one.value == other.value)


def _differs(node: ir.Node | None, name: str, sizes: str) -> ModelError:
    where = name if node is None else f"{name}: node {origin(node)!r} ({node.op_type})"
    return ModelError(
        codes.DATA_DEPENDENT_SHAPE,
        f"the network has other nodes where {sizes} than at the end of the bucket",
        where=where,
        remedy="give these sizes a bucket of their own, or list the sizes that you need: --dim NAME=1,64,128",
    )
