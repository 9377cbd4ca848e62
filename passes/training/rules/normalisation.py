"""Normalisation in training: batch statistics forward, and the gradients of all kinds of normalisation."""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.passes.program.means import MEAN_OF_RANKS
from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import (
    Gradient,
    Reverse,
    constant,
    gradient,
    operands,
    training_form,
)
from hybridc.passes.training.kernels import normalisation as kernels
from hybridc.passes.training.kernels.normalisation import Normalisation

op = relax.op


# -------------------------------------------------------------------------------------- BatchNorm


@training_form("nn.batch_norm")
def _batch_norm(reverse: Reverse, call: relax.Call) -> relax.Expr | None:
    """In training: the batch's statistics and the new running ones in one function, then scale and shift."""
    if not call.attrs.training:
        return None
    data, scale, shift, running_mean, running_variance = call.args
    norm = _per_channel(call)
    momentum = float(call.attrs.momentum)
    row = relax.TensorType(norm.rows, norm.dtype)
    if reverse.norm_parts > 1:
        mean, variance = _synchronized(reverse, norm, data)
        made = reverse.call(
            ("batch_norm_running", norm, momentum, reverse.norm_parts),
            lambda: kernels.running_statistics(norm, momentum, reverse.norm_parts),
            [mean, variance, running_mean, running_variance],
            [row] * 3,
        )
        rstd, new_mean, new_variance = (reverse.item(made, i) for i in range(3))
    else:
        made = reverse.call(
            ("batch_norm_statistics", norm, momentum),
            lambda: kernels.batch_statistics(norm, momentum, is_counted=reverse.examples is not None),
            [data, running_mean, running_variance, *_examples(reverse)],
            [row] * 4,
        )
        mean, rstd, new_mean, new_variance = (reverse.item(made, i) for i in range(4))
    scale = scale if call.attrs.scale else _filled(1, norm)
    shift = shift if call.attrs.center else _filled(0, norm)
    result = reverse.call(
        ("batch_norm", norm),
        lambda: kernels.normalised(norm),
        [data, mean, rstd, scale, shift],
        relax.TensorType(norm.shape, norm.dtype),
    )
    return relax.Tuple([result, new_mean, new_variance])


def _synchronized(reverse: Reverse, norm: Normalisation, data: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """Mean and variance over all ranks, whose parts are of one size.

    The mean comes first, so that the variance keeps its digits.
    """
    row = relax.TensorType(norm.rows, norm.dtype)
    own = reverse.call(("batch_norm_mean", norm), lambda: kernels.mean(norm), [data], row)
    (mean,) = _means_of_ranks(reverse, [own])
    distance = reverse.call(
        ("batch_norm_variance", norm), lambda: kernels.distance_from(norm), [data, mean], row
    )
    (variance,) = _means_of_ranks(reverse, [distance])
    return mean, variance


def _means_of_ranks(reverse: Reverse, values: list[relax.Expr]) -> list[relax.Expr]:
    """Each by a rank's own and all others'."""
    types = [relax.TensorType(tensor_shape(value), tensor_dtype(value)) for value in values]
    made = reverse.call(
        (MEAN_OF_RANKS,), lambda: kernels.copies(values), values, types if len(types) > 1 else types[0]
    )
    return [reverse.item(made, i) for i in range(len(types))] if len(types) > 1 else [made]


@gradient(MEAN_OF_RANKS, "batch_norm_mean", "batch_norm_variance", "batch_norm_running")
def _part_of_statistics(reverse: Reverse, call: relax.Call, y: relax.Var, dy: object) -> list[Gradient]:
    """As of `batch_norm_statistics`."""
    return [None] * len(operands(call))


def _examples(reverse: Reverse) -> list[relax.Expr]:
    """One more operand of kernels that count them."""
    return [] if reverse.examples is None else [reverse.examples]


def _per_channel(call: relax.Call) -> Normalisation:
    shape = tensor_shape(call.args[0])
    channel = int(call.attrs.axis) % len(shape)
    axes = tuple(axis for axis in range(len(shape)) if axis != channel)
    return Normalisation(shape, tensor_dtype(call.args[0]), axes, (channel,), float(call.attrs.epsilon))


def _filled(value: float, norm: Normalisation) -> relax.Expr:
    return relax.const(np.full(norm.parameters, value, norm.dtype), norm.dtype)


@gradient("batch_norm_statistics")
def _statistics(reverse: Reverse, call: relax.Call, y: relax.Var, dy: object) -> list[Gradient]:
    """What goes through mean and deviation is part of the gradient of `batch_norm`."""
    return [None] * len(operands(call))


@gradient("batch_norm")
def _batch_norm_gradient(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    (norm,), (data, mean, rstd, scale, _) = reverse.parameters(call), operands(call)
    dscale, dshift = _parameter_gradients(reverse, norm, [data, dy, mean, rstd])
    dx = None
    if reverse.wanted(data):
        sums: list[relax.Expr] = [dscale, dshift]
        if reverse.norm_parts > 1:  # all examples have moved mean and variance, those of other ranks, too
            sums = _means_of_ranks(reverse, sums)
        dx = reverse.call(
            ("batch_norm_data_gradient", norm),
            lambda: kernels.batch_data_gradient(norm, is_counted=reverse.examples is not None),
            [data, dy, mean, rstd, scale, *sums, *_examples(reverse)],
            relax.TensorType(norm.shape, norm.dtype),
        )
    return [dx, None, None, dscale, dshift]


def _parameter_gradients(
    reverse: Reverse, norm: Normalisation, arguments: list[relax.Expr]
) -> tuple[relax.Var, relax.Var]:
    made = reverse.call(
        ("norm_parameter_gradients", norm),
        lambda: kernels.parameter_gradients(norm),
        arguments,
        [relax.TensorType(norm.parameters, norm.dtype)] * 2,
    )
    return reverse.item(made, 0), reverse.item(made, 1)


@gradient("nn.batch_norm")
def _frozen_batch_norm(
    reverse: Reverse, call: relax.Call, y: relax.Var, dy: list[relax.Expr | None]
) -> list[Gradient]:
    """With given statistics it is a scale and a shift of each channel.

    They may be computed, as those of a layer that keeps no running ones: then they have gradients, too.
    """
    data, scale, _, mean, variance = call.args
    [of_result, *_] = dy
    assert of_result is not None and not call.attrs.training
    norm = _per_channel(call)
    channel = norm.parameter_axes[0]
    per_channel = [n if axis == channel else 1 for axis, n in enumerate(norm.shape)]
    rstd = _rstd(reverse, variance, norm)
    factor = _product(reverse, rstd, scale) if call.attrs.scale else rstd
    dx = dscale = dshift = dmean = dvariance = None
    if reverse.wanted(data):
        dx = op.multiply(of_result, reverse.shaped(factor, per_channel))
    if any(map(reverse.wanted, call.args[1:])):
        dscale, dshift = _parameter_gradients(reverse, norm, [data, of_result, mean, rstd])
    if dshift is not None and reverse.wanted(mean):
        dmean = op.negative(op.multiply(dshift, factor))
    if dscale is not None and reverse.wanted(variance):
        slope = op.multiply(op.multiply(rstd, factor), constant(-0.5, rstd))
        dvariance = op.multiply(dscale, slope)
    return [dx, dscale, dshift, dmean, dvariance]


def _rstd(reverse: Reverse, variance: relax.Expr, norm: Normalisation) -> relax.Expr:
    """Folded where the variance is known: what depends on weights alone is a weight."""
    known = reverse.known(variance)
    if known is not None:
        value = 1 / np.sqrt(known.astype(np.float64) + norm.epsilon)
        return reverse.builder.weight(value.astype(norm.dtype), "rstd")
    return reverse.emit(op.rsqrt(op.add(variance, constant(norm.epsilon, variance))))


def _product(reverse: Reverse, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    left, right = reverse.known(a), reverse.known(b)
    if left is not None and right is not None:
        return reverse.builder.weight(left * right, "scale")
    return reverse.emit(op.multiply(a, b))


# --------------------------------------------------------- normalisation within each example


@gradient("nn.layer_norm")
def _layer_norm(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, scale, shift = call.args
    shape = tensor_shape(data)
    axes = tuple(sorted(int(axis) % len(shape) for axis in call.attrs.axes))
    norm = Normalisation(shape, tensor_dtype(data), axes, axes, float(call.attrs.epsilon))
    wanted = reverse.wanted(data), any(map(reverse.wanted, (scale, shift)))
    return _normalised_rows(reverse, norm, data, scale, dy, wanted)


@gradient("nn.rms_norm")
def _rms_norm(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, scale = call.args
    shape = tensor_shape(data)
    axes = tuple(sorted(int(axis) % len(shape) for axis in call.attrs.axes))
    norm = Normalisation(shape, tensor_dtype(data), axes, axes, float(call.attrs.epsilon), is_centered=False)
    wanted = reverse.wanted(data), reverse.wanted(scale)
    return _normalised_rows(reverse, norm, data, scale, dy, wanted)[:2]


@gradient("nn.group_norm", "nn.instance_norm")
def _group_norm(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """Each group of channels is an axis of its own."""
    data, scale, shift = call.args
    shape, attrs = tensor_shape(data), call.attrs
    channel = int(attrs.channel_axis) % len(shape)
    groups = int(attrs.num_groups) if call.op.name == "relax.nn.group_norm" else shape[channel]
    split = (*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :])
    reduced = {int(axis) % len(shape) for axis in attrs.axes}
    axes = tuple(sorted({channel + 1, *(axis + (axis > channel) for axis in reduced - {channel})}))
    norm = Normalisation(split, tensor_dtype(data), axes, (channel, channel + 1), float(attrs.epsilon))
    x, grad = reverse.shaped(data, split), reverse.shaped(dy, split)
    scale_view = reverse.shaped(scale, norm.parameters)
    wanted = reverse.wanted(data), any(map(reverse.wanted, (scale, shift)))
    made = _normalised_rows(reverse, norm, x, scale_view, grad, wanted)
    return [
        expr if expr is None else reverse.shaped(expr, tensor_shape(like))
        for expr, like in zip(made, call.args, strict=True)
    ]


def _normalised_rows(
    reverse: Reverse,
    norm: Normalisation,
    data: relax.Expr,
    scale: relax.Expr,
    dy: relax.Expr,
    wanted: tuple[bool, bool],
) -> list[relax.Var | None]:
    """Gradients of data, scale and shift; `wanted`: that of the data, those of the parameters.

    Mean and deviation are computed again: the forward operator does not give them.
    """
    of_data, of_parameters = wanted
    row = relax.TensorType(norm.rows, norm.dtype)
    made = reverse.call(("norm_statistics", norm), lambda: kernels.statistics(norm), [data], [row, row])
    mean, rstd = reverse.item(made, 0), reverse.item(made, 1)
    dx = dscale = dshift = None
    if of_parameters:
        dscale, dshift = _parameter_gradients(reverse, norm, [data, dy, mean, rstd])
    if of_data:
        dx = reverse.call(
            ("norm_data_gradient", norm),
            lambda: kernels.data_gradient(norm),
            [data, dy, mean, rstd, scale],
            relax.TensorType(norm.shape, norm.dtype),
        )
    return [dx, dscale, dshift]
