"""Give loops the most trips that they may make, where the model does not say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import GraphProto, NodeProto

from hybridc.errors import UsageError

BOUND = "hybridc.bound"
"""Key of the metadata of a Loop: how many trips a run may ask for. More are an error of the run."""
BOUNDED = "hybridc.bounded"
"""Key of the metadata of such a Loop: its name in the model."""


def bound_loops(model: onnx.ModelProto, name: str, bounds: Mapping[str, int]) -> None:
    """Note these `bounds`, by name of a Loop node, in the model; also of loops within loops and branches.

    Raises UsageError HC528 if there is no such loop.
    """
    loops = list(_loops(model.graph))
    for given, most in bounds.items():
        named = [node for node in loops if node.name == given]
        if not named:
            known = ", ".join(dict.fromkeys(node.name for node in loops if node.name))
            remedy = f"loops are {known}" if known else "leave --bound out: the model has no loops with names"
            raise UsageError("HC528", f"the model has no loop {given!r}", where=name, remedy=remedy)
        for node in named:
            node.metadata_props.add(key=BOUND, value=str(most))
            node.metadata_props.add(key=BOUNDED, value=given)


def _loops(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        if node.op_type == "Loop":
            yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _loops(body)
