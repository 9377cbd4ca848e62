"""Forms of elementwise operators, and of those that move elements, that the importer does not take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.values import constant_array, static_shape

SHIFT_WITHIN = "ShiftWithin"
"""BitShift by numbers from 0 to below the width of the type: an operator that no file can have."""


def _bit_shift(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """By other numbers than those below the width nothing is left but, to the right, the sign."""
    x, shift = operand(node, 0), operand(node, 1)
    dtype, known = dtype_of(x), constant_array(shift)
    width, shape = dtype.bitwidth, np.broadcast_shapes(shape_of(x), shape_of(shift))
    if known is not None and ((known >= 0) & (known < width)).all():
        return None
    zero = build.like(x, 0)
    is_outside = build.op("Not", build.op("Less", shift, build.constant(width, dtype)))
    if dtype.is_signed():
        is_outside = build.op("Or", is_outside, build.op("Less", shift, zero))
    within = typed(build.op("Where", is_outside, zero, shift), dtype, shape_of(shift))
    direction = node.attributes["direction"].as_string()
    shifted = typed(build.op(SHIFT_WITHIN, x, within, direction=direction), dtype, shape)
    left = zero
    if dtype.is_signed() and direction == "RIGHT":
        left = build.op("Where", build.op("Less", x, zero), build.like(x, -1), zero)
    return [build.op("Where", is_outside, left, shifted)]


def _product(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """With a constant 0, which TVM takes for 0 whatever the other operand is."""
    for x, factor in ((0, 1), (1, 0)):
        if _is_zero(operand(node, factor)):
            return _nothing(node, operand(node, x), build)
    return None


def _difference(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of a value and itself, as of a product with 0."""
    x = operand(node, 0)
    return _nothing(node, x, build) if x is operand(node, 1) else None


def _nothing(node: ir.Node, x: ir.Value, build: Builder) -> Sequence[ir.Value] | None:
    """0 where a number is finite, else no number."""
    shape = static_shape(node.outputs[0])
    if not dtype_of(x).is_floating_point() or shape is None or shape != static_shape(x):
        return None
    is_finite = build.op("Less", build.op("Abs", x), build.like(x, math.inf))
    return [build.op("Where", is_finite, build.like(x, 0), build.like(x, math.nan))]


def _is_zero(value: ir.Value) -> bool:
    """Whether a value is one constant 0; of longer ones, such as weights, nothing is read."""
    shape = static_shape(value)
    known = constant_array(value) if shape is not None and math.prod(shape) == 1 else None
    return known is not None and not known.any()


def _division(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """By a constant 0, which TVM refuses to divide by: a product with infinity is the same."""
    if not _is_zero(operand(node, 1)) or not dtype_of(operand(node, 1)).is_floating_point():
        return None
    divisor = constant_of(operand(node, 1), "a divisor")
    reciprocal = np.copysign(np.full_like(divisor, np.inf), divisor)
    return [build.op("Mul", operand(node, 0), build.constant(reciprocal, dtype_of(operand(node, 1))))]


def _equal(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of booleans, which code generation compares as if they were floating-point numbers."""
    if dtype_of(operand(node, 0)) != ir.DataType.BOOL:
        return None
    return [build.op("Not", build.op("Xor", operand(node, 0), operand(node, 1)))]


def _one_hot(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """By comparison, with values or a depth in a form that the importer does not take."""
    indices, values = operand(node, 0), operand(node, 2)
    depth = constant_array(operand(node, 1))
    if depth is None or (depth.ndim == 0 and constant_array(values) is not None):
        return None
    count, rank = bounded(int(depth.reshape(())))[0], len(shape_of(indices)) + 1
    axis = node.attributes.get_int("axis", -1) % rank
    index = build.cast(indices, ir.DataType.INT64)
    is_from_end = build.op("Less", index, build.constant(0, "int64"))
    index = build.op("Where", is_from_end, build.op("Add", index, build.constant(count, "int64")), index)
    steps = [1] * rank
    steps[axis] = count
    places = build.constant(np.arange(count).reshape(steps), "int64")
    is_hot = build.op("Equal", build.unsqueeze(index, [axis]), places)
    off, on = (build.slice(values, 0, i, i + 1) for i in range(2))
    return [build.op("Where", is_hot, on, off)]


def _pad(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """With a number that is computed: zeros first, and the number in their place."""
    x, value = operand(node, 0), given(node, 2)
    mode = node.attributes.get_string("mode", "constant")
    if value is None or constant_array(value) is not None or mode != "constant":
        return None
    pads, shape = constant_of(operand(node, 1), "paddings").reshape(2, -1), shape_of(x)
    axes = list(range(len(shape)))
    if given(node, 3) is not None:
        axes = [int(axis) % len(shape) for axis in constant_of(operand(node, 3), "axes").reshape(-1)]
    if (pads < 0).any():
        raise Unsupported("with negative paddings and a number that is computed is not supported")
    widths = [(0, 0)] * len(shape)
    for i, axis in enumerate(axes):
        widths[axis] = (int(pads[0, i]), int(pads[1, i]))
    bounded(*(extent + sum(width) for extent, width in zip(shape, widths, strict=True)))
    is_padding = build.constant(np.pad(np.zeros(shape, bool), widths, constant_values=True))
    zeros = build.constant([begin for begin, _ in widths] + [end for _, end in widths], "int64")
    return [build.op("Where", is_padding, value, build.op("Pad", x, zeros))]


def _space_to_depth(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """In the order of columns, rows and depth."""
    if node.attributes.get_string("mode", "DCR") != "CRD":
        return None
    x, block = operand(node, 0), node.attributes["blocksize"].as_int()
    batch, channels, height, width = shape_of(x)
    parts = build.reshape(x, [batch, channels, height // block, block, width // block, block])
    moved = build.transpose(parts, [0, 1, 3, 5, 2, 4])
    return [build.reshape(moved, [batch, channels * block**2, height // block, width // block])]


def _top_k(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """In any order: sorted."""
    if node.attributes.get_int("sorted", 1):
        return None
    attributes = {name: each.value for name, each in node.attributes.items() if name != "sorted"}
    return build.ops("TopK", list(node.inputs), attributes, results=2)


def _unsqueeze(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of one axis that is not in a list, as torch writes it for queries in groups."""
    axes = constant_array(given(node, 1))
    if axes is None or axes.ndim:
        return None
    return [build.unsqueeze(operand(node, 0), [int(axes)])]


STANDARD: Mapping[str, Expansion] = {
    "BitShift": _bit_shift,
    "Div": _division,
    "Equal": _equal,
    "Mul": _product,
    "OneHot": _one_hot,
    "Pad": _pad,
    "SpaceToDepth": _space_to_depth,
    "Sub": _difference,
    "TopK": _top_k,
    "Unsqueeze": _unsqueeze,
}
