"""What onnxruntime's optimizer makes of U-Nets of Stable Diffusion for GPUs: channels last, groups.

Definitions: onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    WINDOW,
    Builder,
    Expansion,
    Unsupported,
    dtype_of,
    given,
    kept,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.expand.fused import gelu

_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def _nhwc_conv(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Conv of X [N, H, W, C] and W [M, kH, kW, C / group], and a bias."""
    sides = [build.transpose(operand(node, i), _TO_FIRST) for i in (0, 1)]
    (result,) = build.ops("Conv", [*sides, *node.inputs[2:3]], kept(node, WINDOW))
    return [build.transpose(result, _TO_LAST)]


def _group_norm(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """X, scale and bias of each channel."""
    return [_normalized(operand(node, 0), node, build)]


def _skip_group_norm(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """GroupNorm of the sum of X, what is skipped (3), for each position or for all, and a bias (4)."""
    x, skip = operand(node, 0), operand(node, 3)
    if len(shape_of(skip)) == 2:
        skip = build.unsqueeze(skip, [1, 2])
    total = build.op("Add", x, skip)
    if (bias := given(node, 4)) is not None:
        total = build.op("Add", total, bias)
    typed(total, dtype_of(x), shape_of(x))
    return [_normalized(total, node, build), total]


def _normalized(x: ir.Value, node: ir.Node, build: Builder) -> ir.Value:
    """Groups of channels, each brought to mean 0 and variance 1 in single precision; scaled, perhaps through
    SiLU.
    """
    is_last, groups = node.attributes.get_int("channels_last", 1), node.attributes.get_int("groups", 0)
    activation = node.attributes.get_int("activation", 0)
    shape = shape_of(x)
    channels = shape[-1] if is_last else shape[1]
    if len(shape) != 4 or groups < 1 or channels % groups or activation not in (0, 1):
        raise Unsupported(f"of {groups} groups, activation {activation} and shape {shape} is not supported")
    wide = build.cast(x, ir.DataType.FLOAT)
    planes = build.transpose(wide, _TO_FIRST) if is_last else wide
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    ones, zeros = (build.constant(np.full(groups, n, np.float32)) for n in (1, 0))
    parted = build.reshape(planes, (shape[0], groups, -1))
    normal = build.op("InstanceNormalization", parted, ones, zeros, epsilon=epsilon)
    scale, bias = (
        build.reshape(build.cast(operand(node, i), ir.DataType.FLOAT), (1, channels, 1, 1)) for i in (1, 2)
    )
    planar = [shape[axis] for axis in _TO_FIRST] if is_last else shape
    result = build.op("Add", build.op("Mul", build.reshape(normal, planar), scale), bias)
    if activation:
        result = build.op("Mul", result, build.op("Sigmoid", result))
    result = build.transpose(result, _TO_LAST) if is_last else result
    return build.cast(result, dtype_of(x))


def _bias_split_gelu(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """The first half of X + bias, times GELU of the other half."""
    x = operand(node, 0)
    half = shape_of(x)[-1] // 2
    total = build.op("Add", x, operand(node, 1))
    first, gate = build.split(total, len(shape_of(x)) - 1, [half, half])
    return [build.op("Mul", first, gelu(typed(gate, dtype_of(x)), build))]


def _bias_add(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """X, a bias, and what is skipped."""
    return [build.op("Add", build.op("Add", operand(node, 0), operand(node, 1)), operand(node, 2))]


MICROSOFT: dict[str, Expansion] = {
    "BiasAdd": _bias_add,
    "BiasSplitGelu": _bias_split_gelu,
    "GroupNorm": _group_norm,
    "NhwcConv": _nhwc_conv,
    "SkipGroupNorm": _skip_group_norm,
}
