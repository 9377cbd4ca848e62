"""If and Loop whose conditions only a run knows: what every branch and trip computes, and a choice of it.

Both branches of an If are inlined, and so are all trips that a Loop may have; `Where` takes the results of
the branch that counts, and keeps the states of a loop that has ended. So a plan has the same steps in every
run, its memory is that of any other, and a run takes the time of both branches, or of all trips.

What is computed and not taken may be anything but a fault: of nodes that check what they are fed, such as
Gather, the operand is replaced by a legal one where their result does not count (`guarded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    TRIP,
    Builder,
    Expansion,
    Unsupported,
    given,
    operand,
    shape_of,
)
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of
from hybridc.frontend.expand.control.loops import check_size, unrolled_trips
from hybridc.frontend.expand.group_query import CHECKED_COUNT
from hybridc.frontend.expand.quantized.packed_product import PACKED_GATHER
from hybridc.frontend.values import constant_array

PREDICATE = "hybridc.predicate"
"""Key of the metadata of a node: a bool, whether its results count."""
CHOICE = "hybridc.choice"
"""Key of the metadata of a Where that chooses between values of one shape; its value says whose they are."""
_CHECKED: Mapping[str, tuple[int, int]] = {
    CHECKED_COUNT: (0, 0),
    "Gather": (1, 0),
    "GatherElements": (1, 0),
    "GatherND": (1, 0),
    PACKED_GATHER: (0, 0),
    "MaxRoiPool": (1, 0),
    "MaxUnpool": (1, 0),
    "RoiAlign": (2, 0),
    "Scatter": (1, 0),
    "ScatterElements": (1, 0),
    "ScatterND": (1, 0),
    "TopK": (1, 0),
}
"""Of operators that check what they are fed: the position of the operand, and a number that is legal."""
_DIVISIONS = ("Div", "Mod")


def _if(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Both branches, and a choice between their results."""
    condition, outer = _scalar(operand(node, 0), build), node.meta.get(PREDICATE)
    otherwise = build.op("Not", condition)
    results = []
    for name, counts in (("then_branch", build.op("Not", otherwise)), ("else_branch", otherwise)):
        body = node.attributes[name].as_graph()
        counts = counts if outer is None else build.op("And", outer, counts)
        first = len(build.nodes)
        results.append(copy_body(body, [], build, node.meta.get(TRIP, "")))
        _mark(build.nodes[first:], counts)
        discard(body)
    return [
        _chosen(condition, taken, other, "branches", build) for taken, other in zip(*results, strict=True)
    ]


def _loop(node: ir.Node, build: Builder) -> Sequence[ir.Value | None] | None:
    """All trips that there may be, each of which changes the states only if the loop has not ended."""
    body = node.attributes["body"].as_graph()
    states = [operand(node, position) for position in range(2, len(node.inputs))]
    most = given(node, 0)
    trips = None if most is None else constant_array(most)
    if trips is None:
        return None
    if len(body.outputs) - 1 > len(states):
        raise Unsupported("stacks results, of which only a run knows how many there are")
    first_trip = unrolled_trips(node)
    check_size(int(trips.reshape(())), body)
    condition, outer = _scalar(operand(node, 1), build), node.meta.get(PREDICATE)
    for trip in range(first_trip, int(trips.reshape(()))):
        counts = condition if outer is None else build.op("And", outer, condition)
        first = len(build.nodes)
        operands = [build.constant(trip, "int64"), build.constant(True), *states]
        goes_on, *results = copy_body(body, operands, build, trip_of(node, trip))
        _mark(build.nodes[first:], counts)
        states = [
            _chosen(condition, new, old, "states", build) for new, old in zip(results, states, strict=True)
        ]
        condition = build.op("And", condition, _scalar(goes_on, build))
    discard(body)
    return states[: len(node.outputs)]


def guarded(node: ir.Node) -> Expansion | None:
    """What makes a node harmless where its results do not count; None if it cannot do harm."""
    counts = node.meta.get(PREDICATE)
    position, legal = _CHECKED.get(node.op_type, (1, 1))
    if counts is None or not (node.op_type in _CHECKED or node.op_type in _DIVISIONS):
        return None
    checked = given(node, position)
    if checked is None or checked.dtype is None or constant_array(checked) is not None:
        return None
    if node.op_type in _DIVISIONS and not checked.dtype.is_integer():
        return None

    def guard(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
        inputs = list(node.inputs)
        inputs[position] = build.op("Where", counts, checked, build.like(checked, legal))
        results = build.ops(node.op_type, inputs, {}, results=len(node.outputs))
        build.nodes[-1].attributes.update(node.attributes)
        build.nodes[-1].meta[PREDICATE] = None
        for result, old in zip(results, node.outputs, strict=True):  # of operators of ours, ONNX infers none
            result.type, result.shape = old.type, old.shape
        return results

    return guard


def inherit(made: Sequence[ir.Node], node: ir.Node) -> None:
    """Results of the nodes that replace a node count where its own did."""
    if PREDICATE in node.meta:
        for each in made:
            each.meta.setdefault(PREDICATE, node.meta[PREDICATE])


def check_choice(node: ir.Node) -> None:
    """Raises Unsupported if a choice is between values of different shapes, NotYet if these are not known."""
    if CHOICE in node.meta and len({shape_of(operand(node, position)) for position in (1, 2)}) > 1:
        raise Unsupported(f"cannot choose: {node.meta[CHOICE]} have different shapes")


def _mark(made: Sequence[ir.Node], counts: ir.Value) -> None:
    for node in made:
        node.meta[PREDICATE] = counts


def _chosen(condition: ir.Value, taken: ir.Value, other: ir.Value, whose: str, build: Builder) -> ir.Value:
    chosen = build.op("Where", condition, taken, other)
    build.nodes[-1].meta[CHOICE] = whose
    return chosen


def _scalar(condition: ir.Value, build: Builder) -> ir.Value:
    """A condition may be a list of one."""
    shape = condition.shape
    return build.squeeze(condition, range(len(shape))) if shape is not None and len(shape) else condition


CHOICES: Mapping[str, Expansion] = {"If": _if, "Loop": _loop}
"""As expansions, for nodes of which nothing more will be known before a run."""


def has_choices(graph: ir.Graph) -> bool:
    """Whether any branch or trip is left that only a run decides."""
    return any(node.op_type in CHOICES for node in graph)
