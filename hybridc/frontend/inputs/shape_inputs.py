"""Inputs whose values decide shapes: what a compiler for fixed shapes wants as constants."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import GraphProto, NodeProto

SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "Compress": (1,),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "If": (0,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""Positions of operands that say how many elements there are, along which axes, or how often."""
_SHAPES_ALONE = ("Shape", "Size")
"""Results do not depend on values."""
LARGEST_RANK = 1
"""Of an input that counts: shapes and axes are lists. What has more dimensions is data, even where a size
depends on it."""


def shape_inputs(model: onnx.ModelProto) -> frozenset[str]:
    """Names of scalar inputs and lists that shapes are computed from, in a model that need not be valid."""
    candidates = {
        value.name
        for value in model.graph.input
        if value.type.HasField("tensor_type") and len(value.type.tensor_type.shape.dim) <= LARGEST_RANK
    }
    nodes = list(_nodes_within(model.graph))
    producers = {output: node for node in nodes for output in node.output if output}
    open_names = [
        node.input[position]
        for node in nodes
        for position in SHAPE_OPERANDS.get(node.op_type, ())
        if position < len(node.input)
    ]
    seen: set[str] = set()
    while open_names:
        name = open_names.pop()
        if name in seen:
            continue
        seen.add(name)
        producer = producers.get(name)
        if producer is not None and producer.op_type not in _SHAPES_ALONE:
            open_names += producer.input
            # what a branch or a trip computes, too
            open_names += (used for inner in _nodes_of_bodies(producer) for used in inner.input)
    return frozenset(candidates & seen)


def _nodes_within(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        yield from _nodes_of_bodies(node)


def _nodes_of_bodies(node: NodeProto) -> Iterator[NodeProto]:
    for attribute in node.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _nodes_within(inner)
