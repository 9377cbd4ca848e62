"""Operators whose results are constants if their operands are, and that folding leaves as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    MAX_CONSTANT_ELEMENTS,
    Builder,
    Expansion,
    bounded,
    constant_of,
    dtype_of,
    operand,
    shape_of,
)
from hybridc.frontend.values import constant_array

MAX_SPLIT_ELEMENTS = 1024


def _eye_like(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    rows, columns = shape_of(operand(node, 0))
    dtype = node.attributes.get_int("dtype", None)
    kind = ir.DataType(dtype) if dtype is not None else dtype_of(operand(node, 0))
    rows, columns = bounded(rows, columns)
    return [build.constant(np.eye(rows, columns, node.attributes.get_int("k", 0)), kind)]


def _range(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of constants: in floating point each number is a multiple that is added to the first one."""
    bounds = [constant_array(operand(node, i)) for i in range(3)]
    if any(bound is None for bound in bounds):
        return None
    start, limit, step = (np.reshape(bound, ()).astype(np.float64) for bound in bounds if bound is not None)
    count = max(math.ceil((limit - start) / step), 0) if step else 0
    if count > MAX_CONSTANT_ELEMENTS:  # which is refused before import
        return None
    dtype = dtype_of(operand(node, 0))
    if dtype.is_integer():
        first, by = (int(np.reshape(bound, ())) for bound in (bounds[0], bounds[2]) if bound is not None)
        return [build.constant(first + by * np.arange(count), dtype)]
    return [build.constant(start + step * np.arange(count), dtype)]


def _split(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of a small constant, such as a shape: folding leaves nodes of several results as they are."""
    known = constant_array(operand(node, 0))
    if known is None or known.size > MAX_SPLIT_ELEMENTS:
        return None
    axis = node.attributes.get_int("axis", 0)
    ends = np.cumsum([shape_of(output)[axis] for output in node.outputs])
    return [build.constant(part) for part in np.split(known, ends[:-1], axis)]


def _mel_weights(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Triangles of bins around frequencies that are evenly spaced in mel: [spectrum bins, mel bins]."""
    bins, length, rate, low, high = (
        float(np.reshape(constant_of(operand(node, i), "operands"), ())) for i in range(5)
    )
    count, rows = bounded(int(bins), int(length) // 2 + 1)
    mels = 2595 * np.log10(1 + np.array([low, high]) / 700)
    step = (mels[1] - mels[0]) / (count + 2)
    corners = 700 * (10 ** ((np.arange(count + 2) * step + mels[0]) / 2595) - 1)
    places = ((int(length) + 1) * corners // rate).astype(np.int64)
    weights = np.zeros((rows, count))
    for i in range(count):
        first, middle, last = (int(place) for place in places[i : i + 3])
        if first == middle:
            weights[middle, i] = 1
        else:
            weights[first : middle + 1, i] = np.arange(middle + 1 - first) / (middle - first)
        if last > middle:
            weights[middle:last, i] = (last - np.arange(middle, last)) / (last - middle)
    dtype = node.attributes.get_int("output_datatype", int(ir.DataType.FLOAT))
    return [build.constant(weights, ir.DataType(dtype))]


STANDARD: Mapping[str, Expansion] = {
    "EyeLike": _eye_like,
    "MelWeightMatrix": _mel_weights,
    "Range": _range,
    "Split": _split,
}
