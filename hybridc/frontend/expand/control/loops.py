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
    given,
    operand,
    shape_of,
)
from hybridc.frontend.expand.control.copies import copy_body, discard, trip_of
from hybridc.frontend.values import constant_array

MAX_UNROLLED_NODES = 10_000
"""Of one loop: trips times nodes of its body."""
_TRIPS = "hybridc.trips"
"""Key of the metadata of a loop of which some trips are unrolled: how many, and what they left to stack."""


def _loop(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """One trip and a loop of the others, or the results: whether there is a trip is known by then."""
    body = node.attributes["body"].as_graph()
    states = list(node.inputs[2:])
    stacks = len(body.outputs) - 1 - len(states)
    done, pieces = node.meta.get(_TRIPS, (0, [()] * stacks))
    # what is left out never ends a loop
    most, condition = (_number(given(node, i)) for i in (0, 1))
    if not condition or done >= most:
        discard(body)
        return [*states, *(_stacked(each, 0, build) for each in pieces)]
    _check_size(done + 1, body)
    operands = [build.constant(done, "int64"), build.constant(True), *states]
    goes_on, *results = copy_body(body, operands, build, trip_of(node, done))
    new_states, new = results[: len(states)], results[len(states) :]
    rest = build.ops(
        "Loop", [given(node, 0), goes_on, *new_states], {"body": body}, results=len(states) + stacks
    )
    build.nodes[-1].meta[TRIP] = node.meta.get(TRIP, "")
    build.nodes[-1].meta[_TRIPS] = (done + 1, [(*old, each) for old, each in zip(pieces, new, strict=True)])
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
        raise Unsupported("needs opset 9")
    body = node.attributes["body"].as_graph()
    count = node.attributes["num_scan_inputs"].as_int()
    states, sequences = list(node.inputs[:-count]), [operand(node, i) for i in range(-count, 0)]
    stacks = len(body.outputs) - len(states)
    shapes = [shape_of(value) for value in sequences]
    axes = [
        axis % len(shape) for axis, shape in zip(_listed(node, "scan_input_axes", count), shapes, strict=True)
    ]
    trips = shapes[0][axes[0]]
    _check_size(trips, body)
    is_reversed = _listed(node, "scan_input_directions", count)
    steps: list[list[ir.Value]] = []
    for trip in range(trips):
        taken = []
        for value, axis, backwards in zip(sequences, axes, is_reversed, strict=True):
            at = trips - 1 - trip if backwards else trip
            taken.append(build.squeeze(build.slice(value, axis, at, at + 1), [axis]))
        results = copy_body(body, [*states, *taken], build, trip_of(node, trip))
        states = list(results[: len(states)])
        steps.append(results[len(states) :])
    discard(body)
    stacked = []
    output_axes = _listed(node, "scan_output_axes", stacks)
    for i, backwards in enumerate(_listed(node, "scan_output_directions", stacks)):
        pieces = [step[i] for step in steps]
        stacked.append(_stacked(pieces[::-1] if backwards else pieces, output_axes[i], build))
    return [*states, *stacked][: len(node.outputs)]


def _listed(node: ir.Node, name: str, count: int) -> Sequence[int]:
    return node.attributes.get_ints(name, None) or [0] * count


def _stacked(pieces: Sequence[ir.Value], axis: int, build: Builder) -> ir.Value:
    if not pieces:
        raise Unsupported("of no trips leaves results of an unknown shape")
    return build.op("Concat", *(build.unsqueeze(piece, [axis]) for piece in pieces), axis=axis)


def _check_size(trips: int, body: ir.Graph) -> None:
    if trips * len(body) > MAX_UNROLLED_NODES:
        raise Unsupported(f"would become more than {MAX_UNROLLED_NODES} nodes, unrolled")


STANDARD: Mapping[str, Expansion] = {"Loop": _loop, "Scan": _scan}
