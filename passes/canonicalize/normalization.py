"""Normalisation that is decomposed into several operators, or computed by a difference of squares, becomes
one kernel.

Exporters write layer and instance normalisation as a chain of means, differences and a root; each reduction
in it would be a kernel that reads the whole tensor again. TVM's own group normalisation computes the variance
as mean(x**2) - mean(x)**2, which in float32 keeps no digit of it where the mean is a few thousand times the
deviation. Both become `standardized`, whose epilogue (scale and shift) joins it like that of any reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import Pattern
from hybridc.schedules.shapes import index_shape


def standardized(
    shape: Sequence[int], axes: Sequence[int], groups: int, epsilon: float, *, is_centred: bool = True
) -> tirx.PrimFunc:
    """`(x - mean) / sqrt(variance + epsilon)` of float32 data, both over `axes`, and if there is more than
    one of `groups` over the indices of axis 1 in the same group. The mean counts as 0 if not `is_centred`.

    The variance is the mean of squared distances to the mean, so that the error relative to float64 is that
    of the mean, some roundings of the largest element, divided by the deviation.
    """
    x = te.placeholder(index_shape(shape), name="data")
    per_group = shape[1] // groups if groups > 1 else 1
    reduced = [*([1] if groups > 1 else []), *axes]
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    extents = [tirx.IntImm("int64", groups if axis in reduced else shape[axis]) for axis in kept]
    count = per_group * math.prod(shape[axis] for axis in axes)

    def mean(name: str, of: te.Tensor | None = None, *, is_squared: bool = False) -> te.Tensor:
        def body(*outer: te.Var) -> te.Expr:
            loops = {
                axis: te.reduce_axis(
                    (0, tirx.IntImm("int64", per_group if axis in kept else shape[axis])), "k"
                )
                for axis in reduced
            }
            index = dict(zip(kept, outer, strict=True))
            for axis, loop in loops.items():
                index[axis] = index[axis] * per_group + loop if axis in kept else loop
            element = x[tuple(index[axis] for axis in range(len(shape)))]
            distance = element if of is None else element - of[outer]
            return te.sum(distance * distance if is_squared else distance, axis=list(loops.values()))

        total = te.compute(extents, body, name=f"{name}_sum")
        return te.compute(extents, lambda *i: total[i] / tirx.const(count, "float32"), name=name)

    average = mean("mean") if is_centred else None
    variance = mean("variance", average, is_squared=True)

    def standard(*at: te.Var) -> te.Expr:
        row = tuple(at[axis] // per_group if axis in reduced else at[axis] for axis in kept)
        distance = x[at] if average is None else x[at] - average[row]
        return distance * tirx.rsqrt(variance[row] + tirx.const(epsilon, "float32"))

    out = te.compute(x.shape, standard, name="standardized")
    function = te.create_prim_func([x, out])
    return function.with_attr("op_pattern", int(Pattern.OUT_ELEMENTWISE_FUSABLE)).with_attr(
        "tirx.noalias", True
    )


def standardize_decomposed(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`(x - mean(x)) / sqrt(variance(x) + epsilon)`, where the variance may be a mean of squares too."""
    if not is_op(expr, "divide") or tensor_dtype(expr.args[0]) != "float32":
        return None
    difference, root = (context.definition(argument) for argument in expr.args)
    shifted = _operand(root, "sqrt", context)
    if not is_op(difference, "subtract") or not is_op(shifted, "add"):
        return None
    data, mean = difference.args
    variance, epsilon = shifted.args[0], context.weight(shifted.args[1])
    axes = _mean_axes(context.definition(mean), data)
    if axes is None or epsilon is None or epsilon.size != 1:
        return None
    if not _is_variance(context.definition(variance), data, axes, context):
        return None
    return _emit(data, axes, 1, float(epsilon.reshape(())), context)


def standardize_root_mean_square(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`x / sqrt(mean(x**2) + epsilon)`, or the product with the inverse; nobody else reads the root.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    if not is_op(expr, "divide", "multiply") or tensor_dtype(expr.args[0]) != "float32":
        return None
    orders = [expr.args] if is_op(expr, "divide") else [expr.args, expr.args[::-1]]
    for data, factor in orders:
        shifted = _rooted(expr, factor, context)
        if not is_op(shifted, "add"):
            continue
        mean, epsilon = context.definition(shifted.args[0]), context.weight(shifted.args[1])
        if not is_op(mean, "mean") or epsilon is None or epsilon.size != 1:
            continue
        square = context.definition(mean.args[0])
        if not _is_square(square, context) or not square.args[0].same_as(data):
            continue
        axes = _mean_axes(mean, mean.args[0])
        if axes is not None and tensor_shape(data) == tensor_shape(mean.args[0]):
            return _emit(data, axes, 1, float(epsilon.reshape(())), context, is_centred=False)
    return None


def _rooted(expr: relax.Call, factor: relax.Expr, context: Context) -> Any:
    """Of what the divisor is the root, or the factor the inverse root; None if others read it."""
    if context.uses[factor] != 1:
        return None
    if is_op(expr, "divide"):
        return _operand(context.definition(factor), "sqrt", context)
    inverse = context.definition(factor)
    if is_op(inverse, "rsqrt"):
        return context.definition(inverse.args[0])
    if not is_op(inverse, "divide"):
        return None
    one, root = context.weight(inverse.args[0]), inverse.args[1]
    if one is None or one.size != 1 or float(one.reshape(())) != 1.0 or context.uses[root] != 1:
        return None
    return _operand(context.definition(root), "sqrt", context)


def _operand(call: Any, operator: str, context: Context) -> Any:
    """What the operand of an operator was bound to, if `call` is that operator."""
    return context.definition(call.args[0]) if is_op(call, operator) else None


def standardize_groups(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """Group and instance normalisation of channels on axis 1; scale and shift follow as operators."""
    if not is_op(expr, "nn.group_norm", "nn.instance_norm"):
        return None
    data, scale, shift = expr.args
    shape, axes = tensor_shape(data), sorted(int(a) % len(tensor_shape(data)) for a in expr.attrs.axes)
    if int(expr.attrs.channel_axis) != 1 or tensor_dtype(data) != "float32" or 1 in axes or 0 in axes:
        return None
    groups = int(expr.attrs.num_groups) if is_op(expr, "nn.group_norm") else shape[1]
    if groups == 1:
        axes = [1, *axes]
    elif groups == shape[1]:
        groups = 1  # each channel is normalised separately
    wanted = [
        (operator, context.weight(value))
        for operator, value, is_wanted in (
            (relax.op.multiply, scale, expr.attrs.scale),
            (relax.op.add, shift, expr.attrs.center),
        )
        if is_wanted
    ]
    result = _emit(data, axes, groups, float(expr.attrs.epsilon), context)
    for operator, value in wanted:
        if value is None:
            return None
        per_channel = value.reshape(-1, *[1] * (len(shape) - 2))
        parameter = context.builder.weight(per_channel, f"{context.name}_parameter")
        result = context.emit(operator(result, parameter))
    return result


def _mean_axes(call: Any, data: relax.Expr) -> tuple[int, ...] | None:
    """The axes of a mean or variance of `data` that keeps its rank."""
    if not is_op(call, "mean", "variance") or not call.args[0].same_as(data) or not call.attrs.keepdims:
        return None
    rank = len(tensor_shape(data))
    axes = call.attrs.axis
    return tuple(range(rank)) if axes is None else tuple(sorted(int(a) % rank for a in axes))


def _is_variance(call: Any, data: relax.Expr, axes: tuple[int, ...], context: Context) -> bool:
    if is_op(call, "variance"):
        return _mean_axes(call, data) == axes
    square = _operand(call, "mean", context)
    if square is None or _mean_axes(call, call.args[0]) != axes or not _is_square(square, context):
        return False
    distance = context.definition(square.args[0])
    if not is_op(distance, "subtract") or not distance.args[0].same_as(data):
        return False
    return _mean_axes(context.definition(distance.args[1]), data) == axes


def _is_square(call: Any, context: Context) -> bool:
    if is_op(call, "power"):
        exponent = context.weight(call.args[1])
        return exponent is not None and exponent.size == 1 and float(exponent.reshape(())) == 2.0
    return is_op(call, "multiply") and call.args[0].same_as(call.args[1])


def _emit(
    data: relax.Expr,
    axes: Sequence[int],
    groups: int,
    epsilon: float,
    context: Context,
    *,
    is_centred: bool = True,
) -> relax.Expr:
    shape = tensor_shape(data)
    key = ("standardize" if is_centred else "root_mean_square", shape, tuple(axes), groups, epsilon)
    call = context.call(
        key, lambda: standardized(shape, axes, groups, epsilon, is_centred=is_centred), [data]
    )
    return context.emit(call)
