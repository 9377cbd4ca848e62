"""Operators of the standard that have no function body, or one that cannot be imported, by simpler ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.appended import appended_rows, checked_count
from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    kept,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.values import constant_array

MAX_DETERMINANT = 4
"""Rows of a matrix whose determinant is expanded by its first row: there are factorially many products."""


def _cast_like(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    how = kept(node, ("round_mode", "saturate"))
    return [build.op("Cast", operand(node, 0), to=int(dtype_of(operand(node, 1))), **how)]


def _is_inf(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Of one sign only, or of none: of both as it is."""
    x = operand(node, 0)
    above, below = (node.attributes.get_int(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    if above and below:
        return None
    if not above and not below:
        return [build.op("And", *[build.op("Less", x, x)] * 2)]
    return [build.op("Equal", x, build.like(x, math.inf if above else -math.inf))]


def _prelu(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """max(x, 0) + slope * min(x, 0); the slope broadcasts from the last axis."""
    x, slope = operand(node, 0), operand(node, 1)
    scaled = build.op("Mul", slope, x)
    return [build.op("Where", build.op("Less", x, build.like(x, 0)), scaled, x)]


def _reverse_sequence(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Elements t of the time axis come from length - 1 - t as long as that is not negative, else from t."""
    x, lengths = operand(node, 0), operand(node, 1)
    shape = shape_of(x)
    time, batch = node.attributes.get_int("time_axis", 0), node.attributes.get_int("batch_axis", 1)
    if time == batch or len(shape) < 2:
        raise Unsupported("needs a time axis and a batch axis")
    steps = [1] * len(shape)
    steps[time] = shape[time]
    t = build.constant(np.arange(*bounded(shape[time])).reshape(steps), "int64")
    by_batch = [1] * len(shape)
    by_batch[batch] = shape[batch]
    last = build.op(
        "Sub",
        build.reshape(build.op("Cast", lengths, to=int(ir.DataType.INT64)), by_batch),
        build.constant(1, "int64"),
    )
    back = build.op("Sub", last, t)
    index = build.op("Where", build.op("Less", back, build.constant(0, "int64")), t, back)
    index = build.op("Expand", index, build.constant(shape, "int64"))
    return [build.op("GatherElements", x, index, axis=time)]


def _col2im(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Blocks [N, C * kernel, L] added up to images [N, C, ...]: a transposed convolution by unit kernels."""
    x = operand(node, 0)
    image = [int(n) for n in constant_of(operand(node, 1), "an image shape")]
    kernel = [int(n) for n in constant_of(operand(node, 2), "a block shape")]
    count, rank, taps = shape_of(x)[0], len(image), math.prod(kernel)
    channels = shape_of(x)[1] // taps
    strides = node.attributes.get_ints("strides", [1] * rank)
    dilations = node.attributes.get_ints("dilations", [1] * rank)
    pads = node.attributes.get_ints("pads", [0] * 2 * rank)
    reach = [dilations[i] * (kernel[i] - 1) + 1 for i in range(rank)]
    room = [image[i] + pads[i] + pads[rank + i] - reach[i] for i in range(rank)]
    blocks = [room[i] // strides[i] + 1 for i in range(rank)]
    rows = build.reshape(x, [count * channels, taps, *blocks])
    unit = build.constant(np.eye(bounded(taps, taps)[0]).reshape(taps, 1, *kernel), dtype_of(x))
    extra = [room[i] % strides[i] for i in range(rank)]
    whole = build.op(
        "ConvTranspose",
        rows,
        unit,
        strides=list(strides),
        dilations=list(dilations),
        pads=list(pads),
        output_padding=extra,
    )
    return [build.reshape(whole, [count, channels, *image])]


def _cum_prod(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """By doubling: after step k an element is the product of the 2**k elements up to it."""
    x = operand(node, 0)
    shape = shape_of(x)
    axis = int(constant_of(operand(node, 1), "an axis").reshape(())) % len(shape)
    reverse, exclusive = (node.attributes.get_int(name, 0) for name in ("reverse", "exclusive"))
    extent = shape[axis]

    def shifted(value: ir.Value, by: int) -> ir.Value:
        ones = build.constant(np.ones(bounded(*shape[:axis], by, *shape[axis + 1 :])), dtype_of(x))
        if reverse:
            return build.op("Concat", build.slice(value, axis, by, extent), ones, axis=axis)
        return build.op("Concat", ones, build.slice(value, axis, 0, extent - by), axis=axis)

    total, reach = (shifted(x, 1) if exclusive else x), 1
    while reach < extent:
        total = build.op("Mul", total, shifted(total, reach))
        reach *= 2
    return [total]


def _determinant(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    x = operand(node, 0)
    *batch, rows, columns = shape_of(x)
    if rows != columns or rows > MAX_DETERMINANT:
        raise Unsupported(f"of matrices of more than {MAX_DETERMINANT} rows is not supported")
    axis = len(batch)

    def element(row: int, column: int) -> ir.Value:
        part = build.slice(build.slice(x, axis, row, row + 1), axis + 1, column, column + 1)
        return build.squeeze(part, [axis, axis + 1])

    def minor(row: int, kept: tuple[int, ...]) -> ir.Value:
        """The determinant of the rows from `row` on and these columns."""
        if len(kept) == 1:
            return element(row, kept[0])
        total: ir.Value | None = None
        for i, column in enumerate(kept):
            term = build.op("Mul", element(row, column), minor(row + 1, kept[:i] + kept[i + 1 :]))
            total = term if total is None else build.op("Sub" if i % 2 else "Add", total, term)
        assert total is not None
        return total

    return [minor(0, tuple(range(rows)))]


def _batch_normalization(node: ir.Node, build: Builder) -> Sequence[ir.Value | None] | None:
    """In training mode: by the batch's own mean and variance, and the running ones moved towards them."""
    if not node.attributes.get_int("training_mode", 0) or build.opset < 14:
        return None
    x, scale, bias, mean, variance = (operand(node, i) for i in range(5))
    rank = len(shape_of(x))
    axes, spread = [i for i in range(rank) if i != 1], [-1] + [1] * (rank - 2)
    batch_mean = build.reduce("ReduceMean", x, axes)
    centred = build.op("Sub", x, batch_mean)
    batch_variance = build.reduce("ReduceMean", build.op("Mul", centred, centred), axes)
    epsilon = build.like(x, node.attributes.get_float("epsilon", 1e-5))
    deviation = build.op("Sqrt", build.op("Add", batch_variance, epsilon))
    normal = build.op("Mul", build.op("Div", centred, deviation), build.reshape(scale, spread))
    momentum = node.attributes.get_float("momentum", 0.9)

    def moved(old: ir.Value, new: ir.Value) -> ir.Value:
        kept = build.op("Mul", old, build.like(x, momentum))
        return build.op("Add", kept, build.op("Mul", build.reshape(new, [-1]), build.like(x, 1 - momentum)))

    result = build.op("Add", normal, build.reshape(bias, spread))
    return [result, moved(mean, batch_mean), moved(variance, batch_variance)]


def _tensor_scatter(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Rows of `update` over those of the cache from each batch's write index on, or around its end.

    Heads of rows that are fed their index take their places as those of GroupQueryAttention do.
    """
    past, update, starts = operand(node, 0), operand(node, 1), given(node, 2)
    shape, new = shape_of(past), shape_of(update)
    axis = node.attributes.get_int("axis", -2) % len(shape)
    is_circular = node.attributes.get_string("mode", "linear") == "circular"
    is_fed = starts is not None and constant_array(starts) is None
    if (
        starts is not None
        and is_fed
        and not is_circular
        and len(shape) == 4
        and axis == 2
        and not build.for_training
    ):
        most = shape[axis] - new[axis]
        before = typed(build.reshape(starts, (-1, 1, 1, 1)), dtype_of(starts), (shape[0], 1, 1, 1))
        return [appended_rows(past, update, checked_count(before, most, node.op_type, build), build)]
    steps = [1] * len(shape)
    steps[axis] = new[axis]
    index = build.constant(np.arange(*bounded(new[axis])).reshape(steps), "int64")
    if starts is not None:
        index = build.op("Add", index, build.reshape(starts, [-1] + [1] * (len(shape) - 1)))
    if is_circular:
        index = build.op("Mod", index, build.constant(shape[axis], "int64"))
    index = build.op("Expand", index, build.constant(new, "int64"))
    return [build.op("ScatterElements", past, index, update, axis=axis)]


def _reduce_of_booleans(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Any or all, in int32."""
    x = operand(node, 0)
    if dtype_of(x) != ir.DataType.BOOL:
        return None
    kept = {name: attribute.value for name, attribute in node.attributes.items()}
    numbers = build.op("Cast", x, to=int(ir.DataType.INT32))
    (result,) = build.ops(node.op_type, [numbers, *node.inputs[1:]], kept)
    return [build.op("Cast", result, to=int(ir.DataType.BOOL))]


def _bit_cast(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    """Between integers of one width: a cast wraps around, as two's complement does. A boolean is 0 or 1."""
    x, target = operand(node, 0), ir.DataType(node.attributes["to"].as_int())
    source = dtype_of(x)
    if source == target:
        return [build.op("Identity", x)]
    if source.bitwidth != target.bitwidth:
        raise Unsupported("to a type of another width has no result")
    is_number = [dtype.is_integer() or dtype == ir.DataType.BOOL for dtype in (source, target)]
    return [build.op("Cast", x, to=int(target))] if all(is_number) else None


STANDARD: dict[str, Expansion] = {
    "BatchNormalization": _batch_normalization,
    "BitCast": _bit_cast,
    "CastLike": _cast_like,
    "Col2Im": _col2im,
    "CumProd": _cum_prod,
    "Det": _determinant,
    "IsInf": _is_inf,
    "PRelu": _prelu,
    "ReduceMax": _reduce_of_booleans,
    "ReduceMin": _reduce_of_booleans,
    "ReverseSequence": _reverse_sequence,
    "TensorScatter": _tensor_scatter,
}
