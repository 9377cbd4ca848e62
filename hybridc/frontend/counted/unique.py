"""Unique: slices of an axis, or elements, that differ, compared pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.ledger import Ledger
from hybridc.frontend.expand.builder import Builder, Unsupported, dtype_of, is_used, operand, shape_of, typed

MAX_SLICES = 8192
"""There are as many pairs as the square of it."""
MAX_SLICE_ELEMENTS = 64
"""Each makes some nodes."""


def unique(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value | None]:
    """Values, positions of their first occurrences, for each slice the position of its value, and counts."""
    x = operand(node, 0)
    if ledger.axes(x):
        raise Unsupported("of what has an extent that is not fixed")
    shape, axis = shape_of(x), node.attributes.get_int("axis", None)
    rows, rest = _rows(x, axis, build)
    count, width = shape_of(rows)
    if count > MAX_SLICES or width > MAX_SLICE_ELEMENTS:
        raise Unsupported(f"of more than {MAX_SLICES} slices, or of {MAX_SLICE_ELEMENTS} elements each")
    before, same = _compared(rows, build)
    earlier = build.constant(np.tril(np.ones((count, count), bool), -1))
    # [i, j]: slice j is like slice i, and stands before it
    is_first = build.op("Not", _any(build.op("And", same, earlier), build))
    first = typed(is_first, ir.DataType.BOOL, (count,))
    if not node.attributes.get_int("sorted", 1):
        before = build.constant(np.tril(np.ones((count, count), bool), -1))
        group = build.op("ArgMax", build.cast(same, ir.DataType.INT32), axis=1, keepdims=0)
        before = build.op("Gather", before, group, axis=0)
    # the place of slice i among the values: how many different ones come before
    place = _sum(build.op("And", before, build.unsqueeze(first, [0])), 1, build)
    number = build.reduce("ReduceSum", build.cast(first, ir.DataType.INT64), [0])
    # the value at place p is that of the slice that is the first of its kind and has this place
    slots = build.constant(np.arange(count).reshape(-1, 1), "int64")
    is_there = build.op("Equal", slots, build.unsqueeze(place, [0]))
    takes = build.op("And", is_there, build.unsqueeze(first, [0]))
    indices = build.op("ArgMax", build.cast(takes, ir.DataType.INT32), axis=1, keepdims=0)
    counts = _sum(is_there, 1, build)
    padded = {0: ledger.add(number)}
    values = build.op("Gather", rows, indices, axis=0)
    results = [
        _restored(values, rest, axis, len(shape), build),
        indices,
        place,
        counts,
    ]
    at = 0 if axis is None else axis % len(shape)
    ledger.mark(results[0], {at: padded[0]})
    for result in (indices, counts):
        ledger.mark(result, padded)
    return [result if is_used(node, i) or not i else None for i, result in enumerate(results)]


def _rows(x: ir.Value, axis: int | None, build: Builder) -> tuple[ir.Value, tuple[int, ...]]:
    """Slices as rows, [slices, elements], and the shape of a slice."""
    shape = shape_of(x)
    if axis is None:
        total = math.prod(shape)
        return typed(build.reshape(x, [total, 1]), dtype_of(x), (total, 1)), ()
    axis %= len(shape)
    rest = shape[:axis] + shape[axis + 1 :]
    moved = build.transpose(x, [axis, *(i for i in range(len(shape)) if i != axis)])
    rows = (shape[axis], math.prod(rest))
    return typed(build.reshape(moved, rows), dtype_of(x), rows), rest


def _restored(
    values: ir.Value, rest: tuple[int, ...], axis: int | None, rank: int, build: Builder
) -> ir.Value:
    if axis is None:
        return build.squeeze(values, [1])
    axis %= rank
    slices = build.reshape(values, [0, *rest]) if 0 not in rest else build.reshape(values, [-1, *rest])
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return build.transpose(slices, order)


def _compared(rows: ir.Value, build: Builder) -> tuple[ir.Value, ir.Value]:
    """[i, j]: whether row j comes before row i, and whether they are the same."""
    count, width = shape_of(rows)
    before, same = None, None
    for column in reversed(range(width)):
        one = build.slice(rows, 1, column, column + 1)
        other = build.transpose(one, [1, 0])
        less, equal = build.op("Less", other, one), build.op("Equal", other, one)
        if before is None or same is None:
            before, same = less, equal
            continue
        before = build.op("Or", less, build.op("And", equal, before))
        same = build.op("And", equal, same)
    if before is None or same is None:
        raise Unsupported("of slices without elements")
    square = (count, count)
    return typed(before, ir.DataType.BOOL, square), typed(same, ir.DataType.BOOL, square)


def _sum(mask: ir.Value, axis: int, build: Builder) -> ir.Value:
    numbers = build.op("Cast", mask, to=int(ir.DataType.INT64))
    return build.reduce("ReduceSum", numbers, [axis], keepdims=False)


def _any(mask: ir.Value, build: Builder) -> ir.Value:
    return build.op("Less", build.constant(0, "int64"), _sum(mask, 1, build))
