"""Operators that move elements to other places along padded axes, or make more of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.along import same
from hybridc.frontend.counted.extents import extents
from hybridc.frontend.counted.ledger import Axes, Count, Extents, Factors, Ledger
from hybridc.frontend.counted.rules import ALONG, check_places, elementwise
from hybridc.frontend.expand.builder import Builder, Unsupported, constant_of, dtype_of, operand, shape_of
from hybridc.frontend.values import constant_array

_MERGED = "of what has an extent that is not fixed, unless it stays an axis"


def reshape(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Axes are taken apart into what they were made of, and put together again.

    Where data determine an extent, it is -1 or 0 that must say it.
    """
    x = operand(node, 0)
    source = shape_of(x)
    listed = extents(operand(node, 1), ledger)
    if listed is None:
        raise Unsupported("needs a shape that is constant")
    told = [extent for extent, _ in listed]
    counts = {axis: count for axis, (_, count) in enumerate(listed) if count is not None}
    target = list(told)
    if not node.attributes.get_int("allowzero", 0):
        target = [source[axis] if extent == 0 else extent for axis, extent in enumerate(told)]
    if -1 in target:
        target[target.index(-1)] = math.prod(source) // -math.prod(target)
    found = _regrouped(source, ledger.axes(x), tuple(target))
    by_data = {axis: count for axis, count in found.items() if told[axis] > 0 and not ledger.samples(count)}
    if by_data != counts:
        raise Unsupported(_MERGED)
    made = build.reshape(x, target) if counts else same(node, x, build)[0]
    return [ledger.mark(made, found)]


def flatten(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """As `reshape`, to two axes."""
    x = operand(node, 0)
    source = shape_of(x)
    axis = node.attributes.get_int("axis", 1)
    axis += len(source) if axis < 0 else 0
    target = math.prod(source[:axis]), math.prod(source[axis:])
    found = _regrouped(source, ledger.axes(x), target)
    return [ledger.mark(same(node, x, build)[0], found)]


def _regrouped(source: tuple[int, ...], axes: Axes, target: tuple[int, ...]) -> dict[int, Count]:
    """Axes of the target, each made of the factors of the source that it covers. Raises Unsupported."""
    factors = _factors(source, axes)
    found: dict[int, Count] = {}
    rest: list[tuple[int, int | None]] = []
    for axis, extent in enumerate(target):
        group: list[tuple[int, int | None]] = []
        covered = 1
        while covered < extent:
            size, number = rest.pop() if rest else next(factors)
            needed = extent // covered
            if number is None and size > needed and size % needed == 0:
                rest.append((size // needed, None))
                size = needed
            if extent % (covered * size):
                raise Unsupported(_MERGED)
            covered *= size
            group.append((size, number))
        made = _joined(group)
        if any(number is not None for _, number in made):
            found[axis] = made[0][1] if len(made) == 1 and made[0][1] is not None else made
    return found


def _factors(source: tuple[int, ...], axes: Axes) -> Iterator[tuple[int, int | None]]:
    """What the axes are made of, but for what has one element."""
    for axis, extent in enumerate(source):
        count = axes.get(axis)
        if isinstance(count, tuple):
            yield from count
        elif count is not None or extent > 1:
            yield extent, count


def _joined(group: Sequence[tuple[int, int | None]]) -> Factors:
    """With neighbours that are not padded as one."""
    made: list[tuple[int, int | None]] = []
    for size, number in group:
        if made and number is None and made[-1][1] is None:
            made[-1] = (made[-1][0] * size, None)
        else:
            made.append((size, number))
    return tuple(made)


def expand(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """New axes are as long as sizes or data say; all elements along them are the same."""
    x, result = operand(node, 0), node.outputs[0]
    source = shape_of(x)
    listed = extents(operand(node, 1), ledger)
    if listed is None and ledger.axes(x):
        raise Unsupported("needs a shape that is constant")
    if listed is None or (constant_array(operand(node, 1)) is not None and not ledger.is_padded(node)):
        return None
    if any(count is not None for _, count in listed):
        return [_expanded(x, listed, build, ledger)]
    told = [extent for extent, _ in listed]
    target = np.broadcast_shapes(source, tuple(told))
    more = len(target) - len(source)
    found = {axis + more: count for axis, count in ledger.axes(x).items()}
    for axis, extent in enumerate(target):
        is_new = axis < more or (source[axis - more] == 1 and axis not in found)
        samples = ledger.extents(result, axis)
        if is_new and any(each != extent for each in samples):
            count = ledger.sized(extent, samples, build)
            if count is None:
                raise Unsupported("to an extent that is not fixed")
            found[axis] = count
    return [ledger.mark(same(node, x, build)[0], found)]


def _expanded(x: ir.Value, listed: Extents, build: Builder, ledger: Ledger) -> ir.Value:
    """To counts of elements that data determine. Raises Unsupported."""
    axes, shape = ledger.axes(x), shape_of(x)
    rank = max(len(listed), len(shape))
    own: Extents = tuple((extent, axes.get(axis)) for axis, extent in enumerate(shape))
    missing: Extents = ((1, None),)
    target, found = [], {}
    for axis, (mine, told) in enumerate(
        zip(missing * (rank - len(own)) + own, missing * (rank - len(listed)) + listed, strict=True)
    ):
        if mine[1] is not None and told not in ((1, None), mine):
            raise Unsupported("to an extent that may be another")
        extent, count = told if mine == (1, None) else mine
        target.append(extent)
        if count is not None:
            found[axis] = count
    return ledger.mark(build.op("Expand", x, build.constant(target, "int64")), found)


def tile(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """As often as a constant or a size says, along each axis."""
    x, result = operand(node, 0), node.outputs[0]
    source, axes = shape_of(x), ledger.axes(x)
    repeats = constant_of(operand(node, 1), "repeats").reshape(-1)
    target = [extent * int(often) for extent, often in zip(source, repeats, strict=True)]
    found: dict[int, Count] = {}
    for axis, (extent, after) in enumerate(zip(source, target, strict=True)):
        samples, count = ledger.extents(result, axis), axes.get(axis)
        if count is not None:
            inner: Factors = ((extent, count),) if isinstance(count, int) else count
            found[axis] = count if extent == after else ((after // extent, None), *inner)
        elif any(each != after for each in samples):
            told = ledger.sized(after, samples, build)
            if told is None:
                raise Unsupported("to an extent that is not fixed")
            found[axis] = told
    return [ledger.mark(same(node, x, build)[0], found)]


def concat(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Along a padded axis only the last operand may be padded: what follows it would stand behind padding."""
    rank = len(shape_of(operand(node, 0)))
    axis = node.attributes.get_int("axis", 0) % rank
    operands = [operand(node, i) for i in range(len(node.inputs))]
    taken = [ledger.axes(each) for each in operands]
    others = [{a: count for a, count in axes.items() if a != axis} for axes in taken]
    if any(each != others[0] for each in others):
        raise Unsupported("of operands of different extents")
    if any(axis in axes for axes in taken[:-1]):
        raise Unsupported(f"{ALONG}, unless it is the last operand's")
    found = dict(others[0])
    if axis in taken[-1]:
        count = taken[-1][axis]
        if not isinstance(count, int):
            raise Unsupported(ALONG)
        found[axis] = ledger.plus(count, sum(shape_of(each)[axis] for each in operands[:-1]), build)
    return [ledger.mark(same(node, operands[0], build)[0], found)]


def gather(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Axes of the indices stand at the place of the one that they index. Negative ones count from its end."""
    x, indices = operand(node, 0), operand(node, 1)
    of_data, of_indices = ledger.axes(x), ledger.axes(indices)
    axis = node.attributes.get_int("axis", 0) % len(shape_of(x))
    indices = _looked_up(indices, of_data.get(axis), build, ledger)
    more = len(shape_of(operand(node, 1))) - 1
    found = {a + (more if a > axis else 0): count for a, count in of_data.items() if a != axis}
    found |= {axis + a: count for a, count in of_indices.items()}
    return [ledger.mark(build.op("Gather", x, indices, axis=axis), found)]


def packed_gather(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Of a constant; the indices' axes come first."""
    indices = operand(node, 0)
    axes = ledger.axes(indices)
    return [ledger.mark(same(node, ledger.zeroed(indices, axes, build), build)[0], axes)]


def gather_nd(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Along padded axes by constants that count from the start, which exist where the network is right."""
    x, indices = operand(node, 0), operand(node, 1)
    of_data, axes, shape = ledger.axes(x), ledger.axes(indices), shape_of(indices)
    batch, known = node.attributes.get_int("batch_dims", 0), constant_array(indices)
    looked_up = [count for axis, count in of_data.items() if batch <= axis < batch + shape[-1]]
    is_safe = known is not None and (known >= 0).all() and all(map(ledger.samples, looked_up))
    check_places(dict(enumerate(looked_up)))
    is_shared = all(axes.get(axis) == count for axis, count in of_data.items() if axis < batch)
    if (looked_up and not is_safe) or not is_shared or len(shape) - 1 in axes:
        raise Unsupported("from what has an extent that is not fixed")
    behind = {a - shape[-1] - batch: count for a, count in of_data.items() if a >= batch + shape[-1]}
    found = dict(axes) | {len(shape) - 1 + a: count for a, count in behind.items()}
    made = build.op("GatherND", x, ledger.zeroed(indices, axes, build), batch_dims=batch or None)
    return [ledger.mark(made, found)]


def gather_elements(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Each index has its own place along the other axes."""
    x, indices = operand(node, 0), operand(node, 1)
    of_data, of_indices = ledger.axes(x), ledger.axes(indices)
    axis = node.attributes.get_int("axis", 0) % len(shape_of(x))
    if any(of_indices.get(each, count) != count for each, count in of_data.items() if each != axis):
        raise Unsupported("of operands of different extents")
    if any(each not in of_indices for each in of_data if each != axis):
        raise Unsupported("of operands of different extents")
    looked_up = _looked_up(indices, of_data.get(axis), build, ledger)
    return [ledger.mark(build.op("GatherElements", x, looked_up, axis=axis), of_indices)]


def division(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value] | None:
    """Of integers: the padding is divided by 1, as nothing divides by 0."""
    dividend, divisor = operand(node, 0), operand(node, 1)
    axes = ledger.axes(divisor)
    if not axes or dtype_of(divisor).is_floating_point():
        return None
    attributes = {name: each.value for name, each in node.attributes.items()}
    divisor = ledger.filled(divisor, axes, build.like(divisor, 1), build)
    [result] = build.ops(node.op_type, [dividend, divisor], attributes)
    [found] = elementwise(node, [ledger.axes(dividend), axes])
    return [ledger.mark(result, found)]


def _check_constant(indices: ir.Value, count: Count | None, ledger: Ledger) -> None:
    """Constant indices of an axis that merges several ones must stand for the same places at all sizes:
    those at the largest sizes are then right where all are so large. Raises Unsupported."""
    arrays, whole = ledger.varying(indices), constant_array(indices)
    is_merged = count is not None and not ledger.is_prefix(count)
    if whole is None or not (arrays or (is_merged and whole.any())):
        return
    if not isinstance(count, tuple) or not ledger.samples(count):
        raise Unsupported(f"{ALONG}, at elements that depend on its extent")
    arrays = arrays or (whole,) * len(ledger.samples(count))
    extents = [extent for extent, _ in count]
    for sample, array in enumerate(arrays):
        own = [extent if n is None else ledger.samples(n)[sample] for extent, n in count]
        part = whole[tuple(map(slice, array.shape))]
        is_there = array.max(initial=-1) < math.prod(own)
        if part.shape != array.shape or min(part.min(initial=0), array.min(initial=0)) < 0 or not is_there:
            raise Unsupported(f"{ALONG}, at elements that depend on its extent")
        places = np.unravel_index(array, own), np.unravel_index(part, extents)
        if not np.array_equal(*places):
            raise Unsupported(f"{ALONG}, at elements that depend on its extent")


def _looked_up(indices: ir.Value, count: Count | None, build: Builder, ledger: Ledger) -> ir.Value:
    """Indices of an axis that count from its start, and are 0 in their own padding. Raises Unsupported."""
    _check_constant(indices, count, ledger)
    padded = ledger.axes(indices)
    filled = ledger.zeroed(indices, padded, build)
    return filled if count is None else _from_start(indices, filled, count, build, ledger)


def _from_start(
    indices: ir.Value, filled: ir.Value, count: Count, build: Builder, ledger: Ledger
) -> ir.Value:
    """Of indices, `filled` where they are padded, the places from the start."""
    known = constant_array(indices)
    least = ledger.least(count)
    if known is not None and (known >= 0).all():
        is_padded = bool(ledger.axes(indices))  # the first ones exist if the network is right
        if ledger.samples(count) and known.max(initial=-1) >= least and not is_padded:
            raise Unsupported(f"{ALONG}, at an element that it may not have")
        return filled
    if not ledger.samples(count) or not ledger.is_prefix(count):
        raise Unsupported(ALONG)
    if known is not None and known.min() < -least:
        raise Unsupported(f"{ALONG}, at an element that it may not have")
    wide = build.cast(filled, ir.DataType.INT64)
    is_negative = build.op("Less", wide, build.constant(np.int64(0)))
    extent = build.squeeze(ledger.count(count, build), [0])
    return build.op("Where", is_negative, build.op("Add", wide, extent), wide)


def total(
    shape: tuple[int, ...], axes: Axes, chosen: Sequence[int], build: Builder, ledger: Ledger
) -> ir.Value:
    """The number of elements that there are along some axes, a scalar."""
    fixed = math.prod(shape[axis] for axis in chosen if axis not in axes)
    found = build.constant([fixed], "int64")
    for axis in chosen:
        if axis in axes:
            found = build.op("Mul", found, ledger.count(axes[axis], build))
    return build.squeeze(found, [0])
