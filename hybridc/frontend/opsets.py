"""Versions of ONNX's operators: which are known, and how older models become ones of a known version."""

from __future__ import annotations

import onnx
from onnx import GraphProto, NodeProto, version_converter

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.inputs.shapes import forget_inferred
from hybridc.frontend.load import Loaded

OLDEST_OPSET = 7
"""Of the operators that TVM's importer and the folding passes know."""
NEWEST_OPSET = min(onnx.defs.onnx_opset_version(), 28)
"""From 24 to 28 operators take more types than TVM's importer knows. What else they have got, attributes and
operands, is refused where it is used (`restrictions.py`)."""


_BROADCASTING = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater")


def check_opset(loaded: Loaded) -> None:
    """Refuse a model of an unknown version. Raises ModelError HC106."""
    opset = loaded.source.opset
    if not 1 <= opset <= NEWEST_OPSET:
        remedy = f"convert it: onnx.version_converter.convert_version(model, {NEWEST_OPSET})"
        raise _refuse(f"opset {opset} is not between 1 and {NEWEST_OPSET}", loaded.source.name, remedy)


def modernize(loaded: Loaded) -> None:
    """Convert a model that is older than `OLDEST_OPSET` to that, in place.

    Requires: shapes of inputs are static, nodes are named. Raises ModelError HC106 if onnx's converter
    fails.
    """
    if loaded.source.opset >= OLDEST_OPSET:
        return
    model = loaded.proto
    try:
        model.CopyFrom(onnx.shape_inference.infer_shapes(model))
        _align_operands(model.graph)
        converted = version_converter.convert_version(model, OLDEST_OPSET)
    except Exception as error:  # RuntimeError, and what its adapters raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = f"opset {loaded.source.opset} cannot be converted to {OLDEST_OPSET}: {lines[0]}"
        remedy = "export the network again with a newer opset"
        raise _refuse(what, loaded.source.name, remedy) from error
    forget_inferred(converted)
    for i, node in enumerate(converted.graph.node):
        node.name = node.name or f"{node.op_type}_converted_{i}"
    model.CopyFrom(converted)


def _align_operands(graph: GraphProto) -> None:
    """Append dimensions of 1 to operands that are aligned with other than the last ones.

    So the last dimensions are aligned, as always since opset 7. An attribute `axis` says which, and onnx's
    converter refuses any other; slopes of PRelu are aligned with channels, which the converter passes over.
    """
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    ranks.update((tensor.name, len(tensor.dims)) for tensor in graph.initializer)
    nodes: list[NodeProto] = []
    for node in graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type in _BROADCASTING and {"axis", "broadcast"} <= attributes.keys():
            rank, other = (ranks.get(name) for name in node.input)
            if rank is not None and other is not None:
                nodes += _aligned(node, attributes["axis"].i % rank, rank, other)
                node.attribute.remove(attributes["axis"])
        elif node.op_type == "PRelu":
            rank, other = (ranks.get(name) for name in node.input)
            if rank is not None and other is not None:
                nodes += _aligned(node, 1, rank, other)
        nodes.append(node)
    if len(nodes) > len(graph.node):
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _aligned(node: NodeProto, axis: int, rank: int, other: int) -> list[NodeProto]:
    """What brings the second operand, of rank `other`, into line; none where it is in line."""
    if axis + other >= rank:
        return []
    aligned = f"{node.output[0]}_operand"
    axes = list(range(other, rank - axis))
    unsqueeze = onnx.helper.make_node(
        "Unsqueeze", [node.input[1]], [aligned], name=f"{node.name}_operand", axes=axes
    )
    node.input[1] = aligned
    return [unsqueeze]


def _refuse(what: str, name: str, remedy: str) -> ModelError:
    return ModelError(codes.UNSUPPORTED_OPSET, what, where=name, remedy=remedy)
