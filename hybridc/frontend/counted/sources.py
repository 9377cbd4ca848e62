"""Operators whose results have as many elements as data say: padded to the most that there can be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.counted.ledger import Ledger
from hybridc.frontend.counted.operators import SUPPRESSION, positions
from hybridc.frontend.counted.rewrites import Rewrite
from hybridc.frontend.counted.rules import check_places
from hybridc.frontend.counted.unique import unique
from hybridc.frontend.expand.builder import Builder, Unsupported, bounded, given, operand, shape_of, typed
from hybridc.frontend.values import constant_array


def _non_zero(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """[rank, elements], row by row the elements' indices along an axis."""
    x = operand(node, 0)
    shape = shape_of(x)
    if not shape:
        raise Unsupported("of a scalar is not supported")
    check_places(ledger.axes(x))
    flat = build.reshape(_mask(x, build, ledger), [-1])
    found, count = positions(typed(flat, ir.DataType.BOOL, (math.prod(shape),)), build)
    rows = []
    for axis, extent in enumerate(shape):
        stride = build.constant(math.prod(shape[axis + 1 :]), "int64")
        along = build.op("Div", found, stride)
        along = build.op("Mod", along, build.constant(extent, "int64")) if axis else along
        rows.append(build.unsqueeze(along, [0]))
    number = ledger.add(count)
    if not ledger.axes(x) and x.dtype == ir.DataType.BOOL:  # a sum of other numbers is no count
        ledger.choose_by(x, number)
    return [ledger.mark(build.op("Concat", *rows, axis=0), {1: number})]


def _mask(x: ir.Value, build: Builder, ledger: Ledger) -> ir.Value:
    """Where the value is not zero, nor padding."""
    mask = x
    if x.dtype != ir.DataType.BOOL:
        mask = build.op("Not", build.op("Equal", x, build.like(x, 0)))
    if ledger.axes(x):
        mask = build.op("And", mask, ledger.valid(x, ledger.axes(x), build))
    return typed(mask, ir.DataType.BOOL, shape_of(x))


def _compress(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    x, condition = operand(node, 0), operand(node, 1)
    shape, padded = shape_of(x), dict(ledger.axes(x))
    axis = node.attributes.get_int("axis", None)
    if axis is None:
        if padded and len(shape) > 1:
            raise Unsupported("of all elements of what has an extent that is not fixed")
        x, shape, axis = build.reshape(x, [-1]), (math.prod(shape),), 0
    axis %= len(shape)
    chosen = constant_array(condition)
    if chosen is not None and axis not in padded:
        indices = build.constant(np.flatnonzero(chosen), "int64")
        return [ledger.mark(build.op("Gather", x, indices, axis=axis), padded)]
    mask = condition
    if axis in padded and ledger.axes(condition) != {0: padded[axis]}:
        raise Unsupported("by a condition and along an axis of different extents")
    mask = _mask(condition, build, ledger)
    extent = min(shape_of(condition)[0], shape[axis])
    found, count = positions(_begin(mask, extent, build), build)
    padded[axis] = ledger.add(count)
    return [ledger.mark(build.op("Gather", x, found, axis=axis), padded)]


def _begin(mask: ir.Value, extent: int, build: Builder) -> ir.Value:
    if shape_of(mask) == (extent,):
        return mask
    return typed(build.slice(mask, 0, 0, extent), ir.DataType.BOOL, (extent,))


def _non_max_suppression(node: ir.Node, build: Builder, ledger: Ledger) -> Sequence[ir.Value]:
    """Rows of batch, class and box [rows, 3], in that order, and the best boxes of a class first."""
    boxes, scores = operand(node, 0), operand(node, 1)
    batch, classes, count = shape_of(scores)
    most, iou, least = (given(node, i) for i in (2, 3, 4))
    known = None if most is None else constant_array(most)
    limit = 0 if most is None else count if known is None else int(np.reshape(known, ()))
    picks = max(min(limit, count), 0)
    if not picks * batch * classes:
        return [build.constant(np.empty((0, 3)), "int64")]
    bounded(batch * classes, picks)

    def number(value: ir.Value | None, default: float, dtype: ir.DataType) -> ir.Value:
        return build.constant([default], dtype) if value is None else build.reshape(value, [1])

    operands = [
        *(boxes, scores, number(most, 0, ir.DataType.INT64), number(iou, 0, ir.DataType.FLOAT)),
        *(number(least, 0, ir.DataType.FLOAT), _boxes(node, count, build, ledger)),
    ]
    attributes = {
        "picks": picks,
        "is_centred": node.attributes.get_int("center_point_box", 0),
        "has_threshold": int(least is not None),
    }
    picked, work = build.ops(SUPPRESSION, operands, attributes, results=2)
    typed(picked, ir.DataType.INT64, (batch * classes, picks))
    typed(work, ir.DataType.INT64, (batch * classes, count + 3))
    flat = build.reshape(picked, [-1])
    is_picked = build.op("Not", build.op("Less", flat, build.constant(0, "int64")))
    total = batch * classes * picks
    found, rows = positions(typed(is_picked, ir.DataType.BOOL, (total,)), build)
    row = build.op("Div", found, build.constant(picks, "int64"))
    own = build.op("Mod", row, build.constant(classes, "int64"))
    image = build.op("Div", row, build.constant(classes, "int64"))
    # behind the last pick there is box 0, which exists
    box = build.op("Max", build.op("Gather", flat, found, axis=0), build.constant(0, "int64"))
    columns = [build.unsqueeze(each, [1]) for each in (image, own, box)]
    return [ledger.mark(build.op("Concat", *columns, axis=1), {0: ledger.add(rows)})]


def _boxes(node: ir.Node, count: int, build: Builder, ledger: Ledger) -> ir.Value:
    """How many boxes there are."""
    of_boxes, of_scores = (ledger.axes(operand(node, i)) for i in (0, 1))
    if not of_boxes and not of_scores:
        return build.constant([count], "int64")
    if set(of_boxes) != {1} or set(of_scores) != {2} or of_boxes[1] != of_scores[2]:
        raise Unsupported("of boxes and scores of different numbers")
    check_places(of_boxes)
    return ledger.count(of_boxes[1], build)


SOURCES: Mapping[str, Rewrite] = {
    "Compress": _compress,
    "NonMaxSuppression": _non_max_suppression,
    "NonZero": _non_zero,
    "Unique": unique,
}
