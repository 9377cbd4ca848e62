"""Inputs with open dimensions as padded values, whose counts a session feeds; and constants that depend on
sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.errors import ModelError
from hybridc.frontend import codes
from hybridc.frontend.counted.ledger import TRUSTED, Axes, Count, Ledger
from hybridc.frontend.expand.builder import Builder, typed
from hybridc.frontend.folding import origin
from hybridc.frontend.inputs.shape_inputs import SHAPE_OPERANDS
from hybridc.frontend.ranges.compare import Match, matched
from hybridc.frontend.ranges.opening import Opening
from hybridc.frontend.ranges.replay import Replay, Tape
from hybridc.frontend.values import constant_array, static_shape
from hybridc.sizes import Bucket, listing_remedy, named_text

Folded = Callable[[Bucket, bool], ir.Graph]
"""The network with its constants folded at some sizes, as far as one round does if that is asked for."""

MAX_COMPUTED = 16
"""Elements of a constant that are computed from sizes: as many as a shape may have."""


def follow_sizes(
    graph: ir.Graph,
    opening: Opening,
    folded: Folded,
    ledger: Ledger,
    opset: int,
    name: str,
    refusals: codes.Refusals,
    tape: Tape | None = None,
) -> None:
    """Append an input for the size of each open dimension, int64[1], and tell the ledger what depends on it.

    Requires: the graph is folded at the bucket's largest sizes. It is compared with what is `folded` at each
    of `opening.samples()` before these, unless what it is there follows from its `tape`. Refuses ModelError
    HC114 where a node computes with a constant that sizes decide in another way than by a sum; raises HC117
    where sizes decide what nodes there are.
    """
    *samples, largest = opening.samples()
    replay = None if tape is None else Replay.of(graph, tape, opening.shapes(largest))
    found = [
        (None if replay is None else replay.at(opening.shapes(sizes)))
        or match_at(graph, opening, sizes, folded, name)
        for sizes in samples
    ]
    values = dict.fromkeys(value for match in found for value in match)
    matches: list[Match] = [*found, dict(zip(values, values, strict=True))]
    open_axes = _size_inputs(graph, opening, ledger)
    inputs = {value.name: value for value in graph.inputs}
    for (input_name, axis), number in open_axes.items():
        if input_name in inputs:
            value = inputs[input_name]
            ledger.mark(value, {**ledger.axes(value), axis: number})
            ledger.zero(value, axis)  # as a session feeds it
    for value in values:
        shapes = [static_shape(match[value]) for match in matches]
        if all(shape is not None for shape in shapes):
            ledger.sample(value, [shape for shape in shapes if shape is not None])
    build = Builder(opset)
    for value in values:
        if all(match[value].const_value is value.const_value for match in matches):
            continue  # no constant, or a weight, which is not read for it
        arrays = [constant_array(match[value]) for match in matches]
        known = [array for array in arrays if array is not None]
        if value.const_value is not None and len(known) == len(arrays):
            _follow_constant(value, known, ledger, build)
    _replace_computed(graph, ledger, build, name, refusals)
    _replace_outputs(graph, ledger, build, name, refusals)
    for node in build.nodes:
        node.meta[TRUSTED] = True
        node.name = f"sizes/{node.op_type}"
    first = next(iter(graph), None)
    if first is None:
        graph.extend(build.nodes)
    elif build.nodes:
        graph.insert_before(first, build.nodes)


def match_at(graph: ir.Graph, opening: Opening, sizes: Bucket, folded: Folded, name: str) -> Match:
    """The values at these sizes. Where a brief folding leaves the same nodes there is no need of another."""
    told = _told(opening, sizes)
    brief = folded(sizes, True)
    try:
        return matched(graph, brief, name, told)
    except ModelError:
        return matched(graph, folded(sizes, False), name, told)


def _told(opening: Opening, bucket: Sequence[object]) -> str:
    pairs = zip(opening.dimensions, bucket, strict=True)
    return " and ".join(f"{each.name} is {size}" for each, size in pairs)


def _size_inputs(graph: ir.Graph, opening: Opening, ledger: Ledger) -> dict[tuple[str, int], int]:
    """The number of the count of each axis of an input that is open in this bucket."""
    samples, found = opening.samples(), {}
    for i, (dimension, interval) in enumerate(zip(opening.dimensions, opening.bucket, strict=True)):
        size = typed(ir.Value(name=f"size of {dimension.name}"), ir.DataType.INT64, [1])
        graph.inputs.append(size)
        if not interval.is_exact:
            number = ledger.add(size, tuple(bucket[i].high for bucket in samples), dimension.name)
            found.update(dict.fromkeys(dimension.axes, number))
    return found


def _follow_constant(value: ir.Value, arrays: Sequence[np.ndarray], ledger: Ledger, build: Builder) -> None:
    """A longer constant whose first elements stay the same is padded; any other that changes varies."""
    whole = constant_array(value)
    assert whole is not None
    if all(np.array_equal(array, whole, equal_nan=True) for array in arrays):
        return
    axes = _axes_of(whole, arrays, ledger, build)
    if axes is None or not all(_is_part(array, whole) for array in arrays):
        ledger.vary(value, arrays)
    if axes is not None:
        ledger.mark(value, axes)


def _is_part(array: np.ndarray, whole: np.ndarray) -> bool:
    return np.array_equal(array, whole[tuple(map(slice, array.shape))], equal_nan=True)


def _axes_of(whole: np.ndarray, arrays: Sequence[np.ndarray], ledger: Ledger, build: Builder) -> Axes | None:
    """Axes whose extents sizes decide; None if one is no simple function of them."""
    if any(array.ndim != whole.ndim for array in arrays):
        return None
    found: dict[int, Count] = {}
    for axis, extent in enumerate(whole.shape):
        samples = tuple(array.shape[axis] for array in arrays)
        if any(each != extent for each in samples):
            count = ledger.sized(extent, samples, build)
            if count is None:
                return None
            found[axis] = count
    return found


def _replace_computed(
    graph: ir.Graph, ledger: Ledger, build: Builder, name: str, refusals: codes.Refusals
) -> None:
    """Where a node computes with a constant that sizes decide, it is computed from them when it runs."""
    computed: dict[ir.Value, ir.Value | None] = {}
    for node in graph:
        for position, value in enumerate(node.inputs):
            if value is None or not ledger.varying(value):
                continue
            if position in SHAPE_OPERANDS.get(node.op_type, ()) or _are_indices(node, position):
                continue
            if value not in computed:
                computed[value] = _computed(value, ledger, build)
            made = computed[value]
            if made is None:
                names = ledger.deciding(value)
                what = f"{node.op_type} computes with a constant that depends on sizes of open dimensions"
                what, remedy = what + named_text(names), listing_remedy(names)
                where = f"{name}: node {origin(node)!r} ({node.op_type})"
                refusals.add(ModelError(codes.WRONG_RESULT, what, where=where, remedy=remedy), node)
                continue
            node.replace_input_with(position, made)


def _are_indices(node: ir.Node, position: int) -> bool:
    """Whether an operand are places in an axis, which the rule of the operator looks at itself."""
    shape = static_shape(node.inputs[position])
    return node.op_type == "Gather" and position == 1 and shape is not None and math.prod(shape) > 1


def _computed(value: ir.Value, ledger: Ledger, build: Builder) -> ir.Value | None:
    """A constant whose few elements are sizes, but for what is added, or fixed; None for any other."""
    whole, arrays = constant_array(value), ledger.varying(value)
    if whole is None or whole.size > MAX_COMPUTED or any(array.shape != whole.shape for array in arrays):
        return None
    if value.dtype is None or not all((array == np.floor(array)).all() for array in arrays):
        return None
    parts = [
        _element(int(number), tuple(int(array.flat[i]) for array in arrays), ledger, build)
        for i, number in enumerate(whole.flat)
    ]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    together = typed(build.op("Concat", *known, axis=0), ir.DataType.INT64, [len(known)])
    made = build.reshape(together if len(known) > 1 else known[0], whole.shape)
    return typed(
        build.cast(typed(made, ir.DataType.INT64, whole.shape), value.dtype), value.dtype, whole.shape
    )


def _element(number: int, samples: tuple[int, ...], ledger: Ledger, build: Builder) -> ir.Value | None:
    """A number of a constant [1] that is fixed, or follows from a size; None for any other."""
    if all(each == number for each in samples):
        return build.constant([number], "int64")
    count = ledger.sized(number, samples, build)
    return None if count is None else ledger.count(count, build)


def _replace_outputs(
    graph: ir.Graph, ledger: Ledger, build: Builder, name: str, refusals: codes.Refusals
) -> None:
    """Outputs that sizes decide, and nothing else, are computed from them when it runs."""
    for i, output in enumerate(graph.outputs):
        if not ledger.varying(output):
            continue
        made = _computed(output, ledger, build)
        if made is None:
            names = ledger.deciding(output)
            what = f"output {output.name!r} is a constant that depends on sizes of open dimensions"
            what, remedy = what + named_text(names), listing_remedy(names)
            refusals.add(ModelError(codes.WRONG_RESULT, what, where=name, remedy=remedy))
            continue
        graph.outputs[i] = _renamed(output, made)


def _renamed(constant: ir.Value, made: ir.Value) -> ir.Value:
    """What takes the place of a constant output, with its name."""
    made.name, constant.name = constant.name, f"{constant.name}/largest"
    return made
