"""Convolution that samples where offsets say: samples between elements, and a convolution by one tap.

X. Zhu et al., Deformable ConvNets v2: More Deformable, Better Results (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    dtype_of,
    given,
    operand,
    shape_of,
)

_RANKS = (2, 3)
"""Axes of images that `GridSample` samples."""


def _deform_conv(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Image [N, C, *size], weight [O, C / groups, *kernel], offsets [N, parts * taps * rank, *out], bias [O],
    mask [N, parts * taps, *out]: each part of the channels has offsets of its own. To [N, O, *out]."""
    x, weight, bias = operand(node, 0), operand(node, 1), given(node, 3)
    (count, channels, *size), (features, depth, *kernel) = shape_of(x), shape_of(weight)
    if len(size) not in _RANKS:
        raise Unsupported("of images of other than 2 or 3 axes is not supported")
    out = shape_of(operand(node, 2))[2:]
    parts, taps = node.attributes.get_int("offset_group", 1), math.prod(kernel)
    # positions of many pixels are more than half precision can tell apart
    wide = ir.DataType.DOUBLE if dtype_of(x) == ir.DataType.DOUBLE else ir.DataType.FLOAT
    image = build.reshape(build.cast(x, wide), [count * parts, channels // parts, *size])
    grid = _grid(node, build, (size, kernel, out), wide)
    samples = build.op("GridSample", image, grid, align_corners=0, padding_mode="zeros")
    samples = build.reshape(samples, [count * parts, channels // parts, taps, math.prod(out)])
    mask = given(node, 4)
    if mask is not None:
        factors = build.reshape(build.cast(mask, wide), [count * parts, 1, taps, math.prod(out)])
        samples = build.op("Mul", samples, factors)
    columns = build.cast(build.reshape(samples, [count, channels * taps, *out]), dtype_of(x))
    flat = build.reshape(weight, [features, depth * taps, *[1] * len(size)])
    group = node.attributes.get_int("group", 1)
    return [build.op("Conv", *[columns, flat, bias][: 2 + (bias is not None)], group=group)]


def _grid(
    node: ir.Node,
    build: Builder,
    extents: tuple[Sequence[int], Sequence[int], Sequence[int]],
    dtype: ir.DataType,
) -> ir.Value:
    """What `GridSample` takes: positions [N * parts, taps * out[0], *out[1:], rank], the last axis first.

    `extents` are those of an image, the kernel and a result. From -1 to 1 there are all of an image's n
    elements: element p is at (2 p + 1) / n - 1.
    """
    size, kernel, out = extents
    rank, offsets = len(size), operand(node, 2)
    strides = node.attributes.get_ints("strides", [1] * rank)
    dilations = node.attributes.get_ints("dilations", [1] * rank)
    pads = node.attributes.get_ints("pads", [0] * 2 * rank)
    bounded(rank, *kernel, *out)
    places = np.empty((*kernel, rank, *out))
    for axis in range(rank):
        tap, place = np.arange(kernel[axis]) * dilations[axis], np.arange(out[axis]) * strides[axis]
        along = np.add.outer(tap - pads[axis], place)
        by_tap = [kernel[axis] if i == axis else 1 for i in range(rank)]
        by_place = [out[axis] if i == axis else 1 for i in range(rank)]
        places[(slice(None),) * rank + (axis,)] = along.reshape(*by_tap, *by_place)
    n = np.array(size, np.float64).reshape(rank, *[1] * rank)
    taps = math.prod(kernel)
    start = ((2 * places + 1) / n - 1).reshape(taps, rank, *out)
    moved = build.reshape(build.cast(offsets, dtype), [-1, taps, rank, *out])
    moved = build.op("Mul", moved, build.constant(2 / n, dtype))
    grid = build.op("Add", moved, build.constant(start, dtype))
    last_first = build.slice(grid, 2, -1, -rank - 1, -1)
    axes = [0, 1, *range(3, 3 + rank), 2]
    flat = [taps * out[0], *out[1:], rank]
    return build.reshape(build.transpose(last_first, axes), [-1, *flat])


STANDARD: dict[str, Expansion] = {"DeformConv": _deform_conv}
