"""Resize in the modes that the importer does not take: constant matrices, or indices, along the axes.

Positions and weights are those of ONNX's operator documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    NotYet,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    operand,
    shape_of,
)
from hybridc.frontend.restrictions import refused_resize
from hybridc.frontend.values import constant_array


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is resized: by a factor, from a window that `roi` gives in shares of the extent."""

    axis: int
    source: int
    target: int
    scale: float
    window: tuple[float, float]


def _resize(node: ir.Node, build: Builder) -> Sequence[ir.Value] | None:
    if len(node.inputs) < 2 or refused_resize(node) is None:
        return None
    result, mode = operand(node, 0), node.attributes.get_string("mode", "nearest")
    dtype = dtype_of(result)
    outside: np.ndarray | None = None
    axes = _axes(node)
    rank = len(shape_of(result))
    for axis in axes:
        # weights of a row: with antialias for up to four times as many elements as there are
        bounded(axis.target, *([] if mode == "nearest" else [4 * axis.source]))
        positions = _positions(axis, node)
        if mode == "nearest":
            index = _nearest(positions, node).clip(0, axis.source - 1)
            result = build.op("Gather", result, build.constant(index, "int64"), axis=axis.axis)
        elif dtype.is_floating_point():
            result = _multiplied(result, _weights(axis, positions, mode, node), axis.axis, rank, dtype, build)
        else:
            raise Unsupported(f"({mode}) of integers is not supported")
        if _coordinates(node) == "tf_crop_and_resize":
            away = (positions < 0) | (positions > axis.source - 1)
            away = away.reshape([-1 if i == axis.axis else 1 for i in range(rank)])
            outside = away if outside is None else outside | away
    if outside is not None and outside.any():
        filling = build.constant(node.attributes.get_float("extrapolation_value", 0.0), dtype)
        result = build.op("Where", build.constant(outside, "bool"), filling, result)
    return [result]


def _axes(node: ir.Node) -> list[_Axis]:
    """The axes whose extents or windows change."""
    source = shape_of(operand(node, 0))
    chosen = [axis % len(source) for axis in node.attributes.get_ints("axes", range(len(source)))]
    windows = _windows(node, len(chosen))
    scales, sizes = (constant_array(given(node, i)) for i in (2, 3))
    if sizes is not None and sizes.size:
        ratios = [float(size) / source[axis] for axis, size in zip(chosen, sizes, strict=True)]
        policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(chosen)
            targets = [math.floor(ratios[0] * source[axis] + 0.5) for axis in chosen]
        else:
            targets = [int(size) for size in sizes]
    elif scales is not None and scales.size:
        ratios = [float(scale) for scale in scales]
        targets = [math.floor(source[axis] * ratio) for axis, ratio in zip(chosen, ratios, strict=True)]
    else:
        raise NotYet
    found = [
        _Axis(axis, source[axis], target, ratio, window)
        for axis, target, ratio, window in zip(chosen, targets, ratios, windows, strict=True)
    ]
    crops = _coordinates(node) == "tf_crop_and_resize"
    return [a for a in found if a.target != a.source or a.scale != 1 or (crops and a.window != (0, 1))]


def _windows(node: ir.Node, count: int) -> list[tuple[float, float]]:
    if _coordinates(node) != "tf_crop_and_resize":
        return [(0.0, 1.0)] * count
    roi = constant_of(operand(node, 1), "a region")
    return [(float(roi[i]), float(roi[count + i])) for i in range(count)]


def _coordinates(node: ir.Node) -> str:
    return node.attributes.get_string("coordinate_transformation_mode", "half_pixel") or "half_pixel"


def _positions(axis: _Axis, node: ir.Node) -> np.ndarray:
    """Where each element of the result lies in the source, in float32 as in onnxruntime: it decides ties."""
    mode, x, scale = _coordinates(node), np.arange(axis.target, dtype=np.float32), np.float32(axis.scale)
    half = (x + np.float32(0.5)) / scale - np.float32(0.5)
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and axis.target > 1):
        return half
    if mode == "half_pixel_symmetric":
        whole = np.float32(axis.target) / (scale * np.float32(axis.source))
        return np.float32(axis.source / 2) * (np.float32(1) - whole) + half
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        # by the whole size, as ONNX's text, torch and onnxruntime do; onnx's reference takes a fractional one
        return x * np.float32(axis.source - 1) / np.float32(max(axis.target - 1, 1))
    if mode == "tf_crop_and_resize":
        begin, end = axis.window
        if axis.target == 1:
            return np.full(1, 0.5 * (begin + end) * (axis.source - 1))
        return begin * (axis.source - 1) + x * (end - begin) * (axis.source - 1) / (axis.target - 1)
    return 0 * x  # pytorch_half_pixel to one pixel


def _nearest(positions: np.ndarray, node: ir.Node) -> np.ndarray:
    mode = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    if mode == "round_prefer_floor":
        return np.ceil(positions - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(positions + 0.5)
    return np.floor(positions) if mode == "floor" else np.ceil(positions)


def _weights(axis: _Axis, positions: np.ndarray, mode: str, node: ir.Node) -> np.ndarray:
    """The matrix [target, source] of linear or cubic interpolation."""
    antialias, excludes = (bool(node.attributes.get_int(n, 0)) for n in ("antialias", "exclude_outside"))
    scale = min(axis.scale, 1.0) if antialias else 1.0
    reach = 1 if mode == "linear" else 2
    first = math.floor(-reach / scale) + 1
    steps = np.arange(first, 2 - first)
    base = np.floor(positions)
    distances = np.abs(scale * (steps - (positions - base)[:, None]))
    if mode == "linear":
        weights = (1 - distances).clip(0, 1)
    else:
        weights = _cubic(distances, node.attributes.get_float("cubic_coeff_a", -0.75))
    index = base[:, None].astype(int) + steps
    if excludes:
        weights = np.where((index < 0) | (index >= axis.source), 0, weights)
    if antialias or excludes:
        weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((axis.target, axis.source))
    rows = np.broadcast_to(np.arange(axis.target)[:, None], index.shape)
    np.add.at(matrix, (rows, index.clip(0, axis.source - 1)), weights)
    return matrix


def _cubic(x: np.ndarray, a: float | None) -> np.ndarray:
    """Keys' kernel of distances."""
    a = -0.75 if a is None else a
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def _multiplied(
    value: ir.Value, matrix: np.ndarray, axis: int, rank: int, dtype: ir.DataType, build: Builder
) -> ir.Value:
    """The value with the matrix applied along an axis."""
    if axis == rank - 2:
        return build.op("MatMul", build.constant(matrix, dtype), value)
    right = build.constant(matrix.T, dtype)
    if axis == rank - 1:
        return build.op("MatMul", value, right)
    order = [i for i in range(rank) if i != axis] + [axis]
    product = build.op("MatMul", build.transpose(value, order), right)
    return build.transpose(product, np.argsort(order).tolist())


STANDARD: dict[str, Expansion] = {"Resize": _resize}
