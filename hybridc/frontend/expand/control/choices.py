"""If and Loop whose conditions only a run knows: all branches and trips, and choices between what they make.

Both branches of an If are inlined, and so are all trips that a Loop may have. A choice, a `Where` of one
condition, takes the results of the branch that counts, and keeps the states of a loop that has ended. All of
it is planned; a run executes only what choices need of it (`passes/guards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx import NodeProto
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from hybridc.frontend.expand.builder import (
    ORIGIN,
    TRIP,
    Builder,
    Unsupported,
    dtype_of,
    given,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of
from hybridc.frontend.expand.control.loops import FEWER_TRIPS, check_size, unrolled_trips
from hybridc.frontend.inputs.loop_bounds import BOUND, BOUNDED
from hybridc.frontend.values import constant_array, static_shape

Pad = Callable[[ir.Value, ir.Value], ir.Value]
"""Notes that a value is padded along its first axis: an int64 of one element says how many elements count."""
Inlining = Callable[[ir.Node, Builder, Pad], "Sequence[ir.Value | None] | None"]
"""As an expansion, but for nodes of which nothing more will be known before a run."""
CHOOSE = "choose"
"""Name of the function that a choice calls: `choose(condition, taken, other)`."""
CHECKED_TRIPS = "CheckedTrips"
"""Of our own: a number of trips, int64, that is at most `most`, or else a fault of `operator`."""
CHOICE = "hybridc.choice"
"""Key of the metadata of a Where that chooses between values of one shape; its value says whose they are."""


def _if(node: ir.Node, build: Builder, pad: Pad) -> Sequence[ir.Value | None]:
    """Both branches, and a choice between their results."""
    condition = _scalar(operand(node, 0), build)
    results = []
    for name in ("then_branch", "else_branch"):
        body = node.attributes[name].as_graph()
        results.append(copy_body(body, [], build, node.meta.get(TRIP, "")))
        discard(body)
    return [
        _chosen(condition, taken, other, "branches", build) for taken, other in zip(*results, strict=True)
    ]


def _loop(node: ir.Node, build: Builder, pad: Pad) -> Sequence[ir.Value | None] | None:
    """All trips that there may be, each of which changes the states only if the loop has not ended.

    What trips leave to stack has room for all of them, and is padded behind those that there were.
    """
    most, bound = given(node, 0), node.metadata_props.get(BOUND)
    known = None if most is None else constant_array(most)
    limits = [int(n) for n in (bound, None if known is None else known.item()) if n is not None]
    if not limits:
        return None
    last = min(limits)
    asks_for_more = bound is not None and (known is None or known.item() > last)
    fed = None if known is not None or most is None else _scalar(most, build)
    body = node.attributes["body"].as_graph()
    check_size(last, body, FEWER_TRIPS)
    states = [operand(node, position) for position in range(2, len(node.inputs))]
    first, left = unrolled_trips(node)
    stacks = [list(pieces) for pieces in left] or [[] for _ in body.outputs[1 + len(states) :]]
    condition = _within(_scalar(operand(node, 1), build), first, fed, build)
    conditions: list[ir.Value] = []
    for trip in range(first, last):
        operands = [build.constant(trip, "int64"), build.constant(True), *states]
        asked, *made = copy_body(body, operands, build, trip_of(node, trip))
        goes_on = _within(_scalar(asked, build), trip + 1, fed, build)
        new = dict(zip(made[len(states) :], body.outputs[1 + len(states) :], strict=True))
        old = [*states, *(_zeros(piece, declared, build) for piece, declared in new.items())]
        if asks_for_more and trip + 1 == last:
            made = _refused(node, goes_on, last, made, old, build)
        chosen = [
            _chosen(condition, value, before, "states", build)
            for value, before in zip(made, old, strict=True)
        ]
        states = chosen[: len(states)]
        for stack, piece in zip(stacks, chosen[len(states) :], strict=True):
            stack.append(piece)
        conditions.append(condition)
        # nobody asks a trip that there is not whether there is another one
        condition = _chosen(condition, goes_on, condition, "conditions", build)
    discard(body)
    stacked = _stacked(stacks, first, conditions, build, pad) if stacks else []
    return [*states, *stacked][: len(node.outputs)]


def _within(goes_on: ir.Value, trip: int, most: ir.Value | None, build: Builder) -> ir.Value:
    """Whether a trip is made, where the number of trips is fed."""
    if most is None:
        return goes_on
    return build.op("And", goes_on, build.op("Less", build.constant(trip, "int64"), most))


def _refused(
    node: ir.Node,
    goes_on: ir.Value,
    last: int,
    made: Sequence[ir.Value],
    old: Sequence[ir.Value],
    build: Builder,
) -> list[ir.Value]:
    """What the last trip that there may be leaves, with a check that nobody asks for one more."""
    name, outer = node.metadata_props[BOUNDED], node.meta.get(ORIGIN) or node.name
    attributes = {"most": last, "operator": "Loop" if name == outer else f"Loop {name!r} of"}
    trips = build.constant(last, "int64")
    wanted = build.op("Add", build.op("Cast", goes_on, to=int(ir.DataType.INT64)), trips)
    checked = typed(build.ops(CHECKED_TRIPS, [wanted], attributes)[0], ir.DataType.INT64, ())
    # never, once it is checked; but so the results wait for the check
    is_over = build.op("Greater", checked, trips)
    return [build.op("Where", is_over, before, value) for value, before in zip(made, old, strict=True)]


def _zeros(piece: ir.Value, declared: ir.Value, build: Builder) -> ir.Value:
    """Of the shape of what a trip leaves to stack, for a trip that there is not."""
    zero = ir.tensor(np.zeros(1, dtype_of(declared).numpy()))
    return build.op("ConstantOfShape", build.op("Shape", piece), value=zero)


def _stacked(
    stacks: Sequence[Sequence[ir.Value]],
    first: int,
    conditions: Sequence[ir.Value],
    build: Builder,
    pad: Pad,
) -> list[ir.Value]:
    """What the trips have left, padded to the most that there may be, and counted."""
    if not stacks[0]:
        raise Unsupported("of no trips leaves results of an unknown shape")
    made = [build.op("Cast", condition, to=int(ir.DataType.INT64)) for condition in conditions]
    trips = build.op(
        "Add", build.op("Sum", *made) if len(made) > 1 else made[0], build.constant([first], "int64")
    )
    count = typed(trips, ir.DataType.INT64, (1,))
    found = []
    for pieces in stacks:
        stacked = build.op("Concat", *(build.unsqueeze(piece, [0]) for piece in pieces), axis=0)
        found.append(pad(stacked, count))
    return found


def undecided_choices(graph: ir.Graph) -> list[ir.Node]:
    """Choices between values whose shapes are not known."""
    choices = [node for node in graph if CHOICE in node.meta]
    return [node for node in choices if None in map(static_shape, node.inputs[1:])]


def check_choice(node: ir.Node) -> None:
    """Raises Unsupported if a choice is between values of different shapes, NotYet if these are not known."""
    if CHOICE in node.meta and len({shape_of(operand(node, position)) for position in (1, 2)}) > 1:
        raise Unsupported(f"cannot choose: {node.meta[CHOICE]} have different shapes")


def import_choice(importer: ONNXGraphImporter, proto: NodeProto, node: ir.Node) -> relax.Expr | None:
    """A function of its own for a choice, which stays one kernel; None for any other Where."""
    if CHOICE not in node.meta:
        return None
    return importer.bb.call_te(
        _choose, *(importer._nodes[name] for name in proto.input), primfunc_name_hint=CHOOSE
    )


def _choose(condition: te.Tensor, taken: te.Tensor, other: te.Tensor) -> te.Tensor:
    return te.compute(taken.shape, lambda *at: tirx.Select(condition(), taken(*at), other(*at)), name=CHOOSE)


def _chosen(condition: ir.Value, taken: ir.Value, other: ir.Value, whose: str, build: Builder) -> ir.Value:
    """The value of a choice; what a condition that is known takes."""
    known = constant_array(condition)
    if known is not None:
        return taken if known.item() else other
    if taken is other:
        return taken
    chosen = build.op("Where", condition, taken, other)
    build.nodes[-1].meta[CHOICE] = whose
    return chosen


def _scalar(condition: ir.Value, build: Builder) -> ir.Value:
    """A condition may be a list of one."""
    shape = condition.shape
    return build.squeeze(condition, range(len(shape))) if shape is not None and len(shape) else condition


CHOICES: Mapping[str, Inlining] = {"If": _if, "Loop": _loop}


def has_choices(graph: ir.Graph) -> bool:
    """Whether any branch or trip is left that only a run decides."""
    return any(node.op_type in CHOICES for node in graph)
