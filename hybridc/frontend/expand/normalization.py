"""Normalisation: what onnxruntime adds to ONNX's operators, and results that these give besides the first.

Definitions: onnxruntime's docs/ContribOperators.md, onnx's schemas of LayerNormalization and LpNormalization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    dtype_of,
    given,
    is_used,
    operand,
    shape_of,
    typed,
)

_SKIP_EPSILON = 1e-12
"""Default of onnxruntime's fused operators; 1e-5 of the others."""
_LAYER_NORMALIZATION = 17
"""The opset in which ONNX has got the operator."""


def _of_constants(node: ir.Node) -> np.ndarray | None:
    """The result for weights, such as tables of relative positions, if no other result is used."""
    tensors = [value.const_value for value in node.inputs if value is not None]
    if any(t is None for t in tensors) or is_used(node, 1) or is_used(node, 2):
        return None
    x, scale, *bias = (t.numpy().astype(np.float64) for t in tensors if t is not None)
    axes = tuple(_axes(node))
    centred = x - x.mean(axes, keepdims=True)
    variance = (centred * centred).mean(axes, keepdims=True)
    result = centred / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5)) * scale
    return np.asarray(result + (bias[0] if bias else 0.0), dtype_of(operand(node, 0)).numpy())


def _layer_normalization(node: ir.Node, build: Builder) -> Sequence[ir.Value | None] | None:
    """Mean and inverse deviation are computed beside, where they are used, in `stash_type`."""
    if (values := _of_constants(node)) is not None:
        return [build.constant(values)]
    if build.opset >= _LAYER_NORMALIZATION and not (is_used(node, 1) or is_used(node, 2)):
        return None
    x, axes = operand(node, 0), _axes(node)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    scale, bias = operand(node, 1), given(node, 2)
    result = layer_normalized(x, scale, bias, build, epsilon=epsilon, axis=axes[0])
    wide = build.cast(x, ir.DataType(node.attributes.get_int("stash_type", 1)))
    mean, _, inverse = _deviation(wide, axes, epsilon, build)
    return [result, mean, inverse]


def layer_normalized(
    x: ir.Value, scale: ir.Value, bias: ir.Value | None, build: Builder, *, epsilon: float, axis: int = -1
) -> ir.Value:
    """LayerNormalization, by its definition before opset 17. `axis` may be negative."""
    if build.opset >= _LAYER_NORMALIZATION:
        return build.op("LayerNormalization", x, scale, *([bias] if bias else []), epsilon=epsilon, axis=axis)
    rank = len(shape_of(x))
    _, centred, inverse = _deviation(x, list(range(axis % rank, rank)), epsilon, build)
    scaled = build.op("Mul", build.op("Mul", centred, inverse), scale)
    return scaled if bias is None else build.op("Add", scaled, bias)


def _deviation(
    x: ir.Value, axes: Sequence[int], epsilon: float, build: Builder
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Mean, what the elements differ from it, and 1 / sqrt(variance + epsilon)."""
    mean = build.reduce("ReduceMean", x, axes)
    centred = build.op("Sub", x, mean)
    return mean, centred, _inverse_root(typed(centred, dtype_of(x)), axes, epsilon, build)


def _inverse_root(value: ir.Value, axes: Sequence[int], epsilon: float, build: Builder) -> ir.Value:
    """1 / sqrt(mean of squares + epsilon)."""
    mean = build.reduce("ReduceMean", build.op("Mul", value, value), axes)
    return build.op("Reciprocal", build.op("Sqrt", build.op("Add", mean, build.like(value, epsilon))))


def _root_mean_square(
    x: ir.Value, scale: ir.Value, axes: Sequence[int], epsilon: float, build: Builder
) -> tuple[ir.Value, ir.Value]:
    """x / sqrt(mean(x**2) + epsilon) * scale, and the inverse of the root; at least in single precision."""
    dtype = dtype_of(x)
    is_narrow = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    value = build.cast(x, ir.DataType.FLOAT if is_narrow else dtype)
    inverse = _inverse_root(value, axes, epsilon, build)
    normal = typed(build.op("Mul", value, inverse), dtype_of(value))
    return build.op("Mul", build.cast(normal, dtype), scale), inverse


def _simplified(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    return _root_mean_square(operand(node, 0), operand(node, 1), _axes(node), epsilon, build)


def _skip(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """LayerNormalization of the sum of input, skip and bias, which is the fourth result."""
    total = _sum(node, 4, build)
    epsilon = node.attributes.get_float("epsilon", _SKIP_EPSILON)
    result = layer_normalized(total, operand(node, 2), given(node, 3), build, epsilon=epsilon)
    return [result, None, None, total]


def _skip_simplified(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    total = _sum(node, 3, build)
    epsilon = node.attributes.get_float("epsilon", _SKIP_EPSILON)
    axes = [len(shape_of(total)) - 1]
    result, _ = _root_mean_square(total, operand(node, 2), axes, epsilon, build)
    return [result, None, None, total]


def _sum(node: ir.Node, bias: int, build: Builder) -> ir.Value:
    """Of the first two operands, the second broadcast, and of the one at position `bias` if there is one."""
    if is_used(node, 1) or is_used(node, 2):
        raise Unsupported("whose mean or standard deviation output is used is not supported")
    x, addend = operand(node, 0), given(node, bias)
    total = build.op("Add", x, operand(node, 1))
    if addend is not None:
        total = build.op("Add", total, addend)
    return typed(total, dtype_of(x), shape_of(x))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Tables of words, positions and perhaps segments, and what their sum is normalized by."""

    words: ir.Value
    positions: ir.Value
    segments: ir.Value | None
    scale: ir.Value
    bias: ir.Value


def _embedding(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    words, positions, scale, bias = (operand(node, i) for i in (2, 3, 5, 6))
    return embedded(node, Embeddings(words, positions, given(node, 4), scale, bias), given(node, 8), build)


def embedded(
    node: ir.Node, tables: Embeddings, positions: ir.Value | None, build: Builder
) -> Sequence[ir.Value | None]:
    """Words, positions and segments looked up, added and normalised; positions from 0 if not given."""
    ids, segments = operand(node, 0), given(node, 1)
    _, length = shape_of(ids)
    words = build.op("Gather", tables.words, ids)
    if positions is None:
        placed = build.slice(tables.positions, 0, 0, length)
    else:
        placed = build.op("Gather", tables.positions, positions)
    total = build.op("Add", words, placed)
    if segments is not None:
        if tables.segments is None:
            raise Unsupported("of segments lacks their embeddings")
        total = build.op("Add", total, build.op("Gather", tables.segments, segments))
    typed(total, dtype_of(tables.words), (*shape_of(ids), shape_of(tables.words)[1]))
    epsilon = node.attributes.get_float("epsilon", _SKIP_EPSILON)
    result = layer_normalized(total, tables.scale, tables.bias, build, epsilon=epsilon)
    return [result, _words_counted(node, build) if is_used(node, 1) else None, total]


def _words_counted(node: ir.Node, build: Builder) -> ir.Value:
    """Words that the mask keeps, of each sentence: none if there is no mask."""
    mask = given(node, 7)
    if mask is None:
        return build.constant([0] * bounded(shape_of(operand(node, 0))[0])[0], "int32")
    kept = build.cast(build.op("Equal", mask, build.constant(1, "int32")), ir.DataType.INT32)
    return build.reduce("ReduceSum", kept, [1], keepdims=False)


def _lp_normalization(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """x / norm along one axis; 0 where the norm is."""
    x, order = operand(node, 0), node.attributes.get_int("p", 2)
    axis = node.attributes.get_int("axis", -1) % len(shape_of(x))
    norm = build.reduce("ReduceL1" if order == 1 else "ReduceL2", x, [axis])
    is_zero = build.op("Equal", norm, build.like(x, 0.0))
    return [build.op("Div", x, build.op("Where", is_zero, build.like(x, 1.0), norm))]


def _axes(node: ir.Node) -> list[int]:
    """From `axis` to the last."""
    rank = len(shape_of(operand(node, 0)))
    return list(range(node.attributes.get_int("axis", -1) % rank, rank))


STANDARD: dict[str, Expansion] = {
    "LayerNormalization": _layer_normalization,
    "LpNormalization": _lp_normalization,
    "SimplifiedLayerNormalization": _simplified,
}
"""In ONNX's domain; onnxruntime adds SimplifiedLayerNormalization, and LayerNormalization before opset 17."""

MICROSOFT: dict[str, Expansion] = {
    "EmbedLayerNormalization": _embedding,
    "SimplifiedLayerNormalization": _simplified,
    "SkipLayerNormalization": _skip,
    "SkipSimplifiedLayerNormalization": _skip_simplified,
}
