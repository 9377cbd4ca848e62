"""Scatters of which data say how many elements there are: what padding says goes to a slice of its own, which
is cut off."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from hybridc.frontend.counted.ledger import Axes, Count, Ledger
from hybridc.frontend.counted.rules import ALONG, check_places
from hybridc.frontend.expand.builder import Builder, Unsupported, dtype_of, operand, shape_of, typed
from hybridc.frontend.values import constant_array


def scatter_nd(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Padded are the numbers of slices that are written, or what these have axes of."""
    data, indices, updates = (operand(node, i) for i in range(3))
    rows, depth = len(shape_of(indices)) - 1, shape_of(indices)[-1]
    of_data, padded = ledger.axes(data), ledger.axes(indices)
    of_slices = {axis - depth + rows: count for axis, count in of_data.items() if axis >= depth}
    written = {axis: count for axis, count in ledger.axes(updates).items() if axis >= rows}
    if rows in padded or not depth or written != of_slices:
        raise Unsupported(ALONG)
    _check_read(indices, [count for axis, count in of_data.items() if axis < depth], ledger)
    indices, updates = _of_same_extents(indices, updates, range(rows), build, ledger)
    return [_scattered(node, data, indices, updates, 0, [1] + [0] * (depth - 1), build, ledger)]


def scatter_elements(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Each index has its own place along the other axes."""
    data, indices, updates = (operand(node, i) for i in range(3))
    shape, of_data = shape_of(data), ledger.axes(data)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    _check_read(indices, [of_data[axis]] if axis in of_data else [], ledger)
    indices, updates = _of_same_extents(indices, updates, range(len(shape)), build, ledger)
    others = [each for each in range(len(shape)) if each != axis]
    if any(shape_of(indices)[each] > shape[each] for each in others):
        raise Unsupported(ALONG)
    return [_scattered(node, data, indices, updates, axis, 1, build, ledger)]


def _check_read(indices: ir.Value, counts: Sequence[Count], ledger: Ledger) -> None:
    """Along padded axes of the data only constants that count from the start are known to exist."""
    if not counts:
        return
    known = constant_array(indices)
    is_safe = known is not None and (known >= 0).all() and all(map(ledger.samples, counts))
    check_places(dict(enumerate(counts)))
    if not is_safe:
        raise Unsupported(ALONG)


def _of_same_extents(
    indices: ir.Value, updates: ir.Value, axes: Sequence[int], build: Builder, ledger: Ledger
) -> tuple[ir.Value, ir.Value]:
    """Both up to the lower bound: there are as many of one as of the other."""
    padded = ledger.axes(indices), ledger.axes(updates)
    found = [indices, updates]
    shapes = [list(shape_of(value)) for value in found]
    for axis in axes:
        counts = [each[axis] for each in padded if axis in each]
        if len(set(counts)) > 1 or len({shape[axis] for shape in shapes}) > 1:
            check_places(dict(enumerate(counts)))
        bound = min(shape[axis] for shape in shapes)
        for i, shape in enumerate(shapes):
            if shape[axis] > bound:
                dtype, shape[axis] = dtype_of(found[i]), bound
                found[i] = typed(build.slice(found[i], axis, 0, bound), dtype, shape)
    return found[0], found[1]


def _scattered(
    node: ir.Node,
    data: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    axis: int,
    step: int | list[int],
    build: Builder,
    ledger: Ledger,
) -> ir.Value:
    """Padding of the indices is written in front of the data, where no index leads that counts: what leads
    in front of the data leads in front of that, too, as it is refused when the network runs."""
    padded: Axes = ledger.axes(operand(node, 1))
    attributes = {name: each.value for name, each in node.attributes.items()}
    if not padded:
        [result] = build.ops(node.op_type, [data, indices, updates], attributes)
        return ledger.mark(result, ledger.axes(data))
    dtype, extent = dtype_of(indices), shape_of(data)[axis]
    steps = build.constant(step, dtype)
    behind, before = build.op("Add", indices, steps), build.op("Sub", indices, steps)
    from_end = build.op("Less", indices, build.like(indices, 0))
    is_outside = build.op("Less", indices, build.like(indices, -extent))
    moved = build.op("Where", from_end, build.op("Where", is_outside, before, indices), behind)
    moved = typed(moved, dtype, shape_of(indices))
    moved = ledger.filled(moved, padded, build.like(indices, 0), build)
    longer = build.op("Concat", build.slice(data, axis, 0, 1), data, axis=axis)
    [result] = build.ops(node.op_type, [longer, moved, updates], attributes)
    return ledger.mark(build.slice(result, axis, 1, extent + 1), ledger.axes(data))
