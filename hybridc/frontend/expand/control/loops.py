"""Loop and Scan, unrolled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    TRIP,
    Builder,
    Expansion,
    NotYet,
    Unsupported,
    dtype_of,
    given,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of
from hybridc.frontend.values import constant_array

MAX_UNROLLED_NODES = 10_000
"""Of one loop: trips times nodes of its body."""
_TRIPS = "hybridc.trips"
"""Key of the metadata of a loop of which some trips are unrolled: how many, and a node for each that reads
what it left to stack. Such a node is in no graph, but is told, as a user, when folding replaces a value."""
_KEPT = "hybridc.kept"
FEWER_TRIPS = "give a smaller number of trips by --bound, and the loop's name in the model"
"""A remedy for Loop, not for Scan, whose trips follow from a shape."""


def _loop(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """One trip and a loop of the others, or the results: whether there is a trip is known by then."""
    body = node.attributes["body"].as_graph()
    states = list(node.inputs[2:])
    stacks = len(body.outputs) - 1 - len(states)
    done, kept = node.meta.get(_TRIPS, (0, ()))
    # what is left out never ends a loop
    most, condition = (_number(given(node, i)) for i in (0, 1))
    if not condition or done >= most:
        discard(body)
        _, pieces = unrolled_trips(node)
        return [*states, *(_stacked(each, 0, build) for each in pieces or [()] * stacks)]
    check_size(done + 1, body, FEWER_TRIPS)
    operands = [build.constant(done, "int64"), build.constant(True), *states]
    goes_on, *results = copy_body(body, operands, build, trip_of(node, done))
    new_states, new = results[: len(states)], results[len(states) :]
    rest = build.ops(
        "Loop", [given(node, 0), goes_on, *new_states], {"body": body}, results=len(states) + stacks
    )
    build.nodes[-1].meta[TRIP] = node.meta.get(TRIP, "")
    build.nodes[-1].metadata_props.update(node.metadata_props)
    build.nodes[-1].meta[_TRIPS] = (done + 1, (*kept, ir.Node("", _KEPT, new)))
    return list(rest)[: len(node.outputs)]


def _number(value: ir.Value | None) -> float:
    """What an operand says, infinity if it is left out. Raises NotYet."""
    if value is None:
        return math.inf
    array = constant_array(value)
    if array is None:
        raise NotYet
    return float(array.reshape(()))


def _scan(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Trips over slices of the inputs, all at once."""
    if build.opset < 9:
        return _batched_scan(node, build)
    body = node.attributes["body"].as_graph()
    count = node.attributes["num_scan_inputs"].as_int()
    states, sequences = list(node.inputs[:-count]), [operand(node, i) for i in range(-count, 0)]
    axes, is_reversed = (_listed(node, f"scan_input_{what}", count) for what in ("axes", "directions"))
    last, steps = _trips(node, states, sequences, axes, is_reversed, build)
    stacks = len(body.outputs) - len(states)
    discard(body)
    stacked = []
    output_axes = _listed(node, "scan_output_axes", stacks)
    for i, backwards in enumerate(_listed(node, "scan_output_directions", stacks)):
        pieces = [step[i] for step in steps]
        stacked.append(_stacked(pieces[::-1] if backwards else pieces, output_axes[i], build))
    return [*last, *stacked][: len(node.outputs)]


def _batched_scan(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Of opset 8: each element of the first axis by itself; trips are along the second."""
    if given(node, 0) is not None:
        raise Unsupported("with lengths of its sequences is not supported")
    body = node.attributes["body"].as_graph()
    count = node.attributes["num_scan_inputs"].as_int()
    is_reversed = _listed(node, "directions", count)
    operands = [operand(node, i) for i in range(1, len(node.inputs))]
    by_image: list[list[ir.Value]] = []

    def part(value: ir.Value, image: int) -> ir.Value:
        own = build.squeeze(build.slice(value, 0, image, image + 1), [0])
        return typed(own, dtype_of(value), shape_of(value)[1:])

    for image in range(shape_of(operands[0])[0]):
        own = [part(value, image) for value in operands]
        prefix = f"{image}/"
        last, steps = _trips(node, own[:-count], own[-count:], [0] * count, is_reversed, build, prefix)
        stacks = range(len(body.outputs) - len(last))
        stacked = [_stacked([step[i] for step in steps], 0, build) for i in stacks]
        by_image.append([*(value for value in last if value is not None), *stacked])
    discard(body)
    return [_stacked(pieces, 0, build) for pieces in zip(*by_image, strict=True)][: len(node.outputs)]


def _trips(
    node: ir.Node,
    states: Sequence[ir.Value | None],
    sequences: Sequence[ir.Value],
    axes: Sequence[int],
    is_reversed: Sequence[int],
    build: Builder,
    prefix: str = "",
) -> tuple[Sequence[ir.Value | None], list[list[ir.Value]]]:
    """The last states of a Scan, and what each trip leaves to stack. `prefix` tells its trips from others."""
    body = node.attributes["body"].as_graph()
    shapes = [shape_of(value) for value in sequences]
    trips = shapes[0][axes[0]]
    check_size(trips, body)
    steps: list[list[ir.Value]] = []
    for trip in range(trips):
        taken = []
        for value, shape, axis, backwards in zip(sequences, shapes, axes, is_reversed, strict=True):
            at = trips - 1 - trip if backwards else trip
            along = axis % len(shape)
            taken.append(build.squeeze(build.slice(value, along, at, at + 1), [along]))
        results = copy_body(body, [*states, *taken], build, trip_of(node, f"{prefix}{trip}"))
        states = results[: len(states)]
        steps.append(results[len(states) :])
    return states, steps


def _listed(node: ir.Node, name: str, count: int) -> Sequence[int]:
    return node.attributes.get_ints(name, None) or [0] * count


def _stacked(pieces: Sequence[ir.Value], axis: int, build: Builder) -> ir.Value:
    if not pieces:
        raise Unsupported("of no trips leaves results of an unknown shape")
    return build.op("Concat", *(build.unsqueeze(piece, [axis]) for piece in pieces), axis=axis)


def unrolled_trips(loop: ir.Node) -> tuple[int, Sequence[Sequence[ir.Value]]]:
    """How many trips of a loop are unrolled, and are no longer to be made; and what they left to stack, which
    is for the caller to use from now on."""
    done, kept = loop.meta.get(_TRIPS, (0, ()))
    pieces = list(zip(*(tuple(each.inputs) for each in kept), strict=True))
    for each in kept:  # no user any more, or else what nobody reads would never go away
        for position in range(len(each.inputs)):
            each.replace_input_with(position, None)
    return done, pieces


def check_size(trips: int, body: ir.Graph, remedy: str | None = None) -> None:
    """Raises Unsupported if so many trips are too many nodes."""
    if trips * len(body) > MAX_UNROLLED_NODES:
        raise Unsupported(f"would become more than {MAX_UNROLLED_NODES} nodes, unrolled", remedy)


STANDARD: Mapping[str, Expansion] = {"Loop": _loop, "Scan": _scan}
