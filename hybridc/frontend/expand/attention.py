"""Attention of com.microsoft: Attention, which projects its input first, and MultiHeadAttention.

Definitions: onnxruntime's docs/ContribOperators.md; what it leaves open, which number a mask adds, is as its
kernels for the CPU have it. What is emitted is softmax(query @ key^T * scale + mask) @ value with the heads
in a dimension of their own: attention as passes/fuse finds it.
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
    Unsupported,
    bounded,
    dtype_of,
    given,
    is_used,
    operand,
    refuse_attributes,
    shape_of,
    typed,
)


@dataclass(frozen=True, slots=True)
class Heads:
    """Operands of attention, of shapes (batch, heads, query or key positions, depth)."""

    query: ir.Value
    key: ir.Value
    value: ir.Value


def split_heads(value: ir.Value, heads: int, build: Builder) -> ir.Value:
    """(batch, heads, positions, depth) of (batch, positions, heads * depth)."""
    batch, length, hidden = shape_of(value)
    if heads < 1 or hidden % heads:
        raise Unsupported(f"of {heads} heads for {hidden} elements is not supported")
    shape = (batch, length, heads, hidden // heads)
    parted = build.transpose(build.reshape(value, shape), (0, 2, 1, 3))
    return typed(parted, dtype_of(value), (batch, heads, length, hidden // heads))


def merge_heads(context: ir.Value, build: Builder) -> ir.Value:
    """(batch, positions, heads * depth) of (batch, heads, positions, depth)."""
    return build.reshape(build.transpose(context, (0, 2, 1, 3)), (0, 0, -1))


def appended(past: ir.Value | None, new: ir.Value, build: Builder) -> ir.Value:
    """Positions of the past before the new ones; there may be none."""
    if past is None or shape_of(past)[2] == 0:
        return new
    batch, heads, length, depth = shape_of(new)
    joined = build.op("Concat", past, new, axis=2)
    return typed(joined, dtype_of(new), (batch, heads, length + shape_of(past)[2], depth))


def logits(operands: Heads, scale: float, masks: Sequence[ir.Value], build: Builder) -> ir.Value:
    """query @ key^T, scaled (0: by the root of the depth), plus masks of four dimensions."""
    depth = shape_of(operands.query)[3]
    scores = build.op("MatMul", operands.query, build.transpose(operands.key, (0, 1, 3, 2)))
    scores = build.op("Mul", scores, build.like(operands.query, scale or 1.0 / math.sqrt(depth)))
    for mask in masks:
        scores = build.op("Add", scores, mask)
    return scores


def context_of(scores: ir.Value, value: ir.Value, build: Builder) -> ir.Value:
    """softmax(scores) @ value."""
    return build.op("MatMul", build.op("Softmax", scores, axis=3), value)


def for_group(mask: ir.Value, shape: Sequence[int], group: int, build: Builder) -> ir.Value:
    """A mask for the rows (head of the group, position) of one (batch, heads or 1, position, key)."""
    batch, heads, rows, columns = shape
    if heads > 1 or group == 1:
        return build.reshape(mask, (batch, max(heads // group, 1), group * rows, columns))
    if rows == 1:
        return mask
    repeated = build.op("Concat", *[mask] * group, axis=2)
    return build.reshape(repeated, (batch, 1, group * rows, columns))


def lowest(like: ir.Value) -> float:
    """The least number of a type."""
    return float(ir.DataType(dtype_of(like)).min)


# ---------------------------------------------------------------------------------------- operators


def _attention(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Inputs: input, weights, bias, mask_index, past, attention_bias."""
    refuse_attributes(node, ("do_rotary", "past_present_share_buffer"))
    x, weights = operand(node, 0), operand(node, 1)
    hidden = shape_of(weights)[1]
    packed = build.op("MatMul", x, weights)
    if (bias := given(node, 2)) is not None:
        packed = build.op("Add", packed, bias)
    typed(packed, dtype_of(x), (*shape_of(x)[:2], hidden))
    sizes = list(node.attributes.get_ints("qkv_hidden_sizes", ())) or [hidden // 3] * 3
    return attended(node, packed, sizes, past=4, mask=given(node, 3), bias=given(node, 5), build=build)


def attended(
    node: ir.Node,
    packed: ir.Value,
    sizes: Sequence[int],
    *,
    past: int,
    mask: ir.Value | None,
    bias: ir.Value | None,
    build: Builder,
) -> Sequence[ir.Value | None]:
    """Attention of query, key and value, of these sizes side by side, with the keys and values before them
    that the operand number `past` may hold: the result, and keys and values for the next run.
    """
    heads = node.attributes.get_int("num_heads", 0)
    batch, length, _ = shape_of(packed)
    parts = [
        typed(part, dtype_of(packed), (batch, length, size))
        for part, size in zip(build.split(packed, 2, sizes), sizes, strict=True)
    ]
    query, key, value = (split_heads(part, heads, build) for part in parts)
    former = given(node, past)
    if former is not None and shape_of(former)[3]:
        pair = [
            typed(build.squeeze(part, [0]), dtype_of(packed), shape_of(former)[1:])
            for part in build.split(former, 0, [1, 1])
        ]
        key, value = appended(pair[0], key, build), appended(pair[1], value, build)
    present = None
    if is_used(node, 1):
        present = build.op("Concat", *(build.unsqueeze(part, [0]) for part in (key, value)), axis=0)
    scores = _masked(node, Heads(query, key, value), former, mask=mask, bias=bias, build=build)
    return [merge_heads(context_of(scores, value, build), build), present]


def _multi_head(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Inputs: query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value."""
    if given(node, 8) is not None or given(node, 9) is not None:
        raise Unsupported("with buffers that past and present share is not supported")
    heads = node.attributes.get_int("num_heads", 0)
    query, key, value = _parts(node, heads, build)
    key, value = appended(given(node, 6), key, build), appended(given(node, 7), value, build)
    operands = Heads(query, key, value)
    scores = _masked(node, operands, given(node, 6), mask=given(node, 4), bias=given(node, 5), build=build)
    return [merge_heads(context_of(scores, value, build), build), key, value, scores]


def _parts(node: ir.Node, heads: int, build: Builder) -> list[ir.Value]:
    """Query, key and value with their heads apart, given in one, two or three tensors, with the bias."""
    query, key = operand(node, 0), given(node, 1)
    if key is None:
        parts = _unpacked(query, build)
    elif len(shape_of(key)) == 5:
        parts = [query, *_unpacked(key, build)]
    else:
        parts = [query, key, operand(node, 2)]
    if (bias := given(node, 3)) is not None:
        sizes = [shape_of(part)[-1] for part in parts]
        biases = build.split(bias, 0, sizes)
        parts = [
            typed(build.op("Add", part, addend), dtype_of(part), shape_of(part))
            for part, addend in zip(parts, biases, strict=True)
        ]
    # keys and values of an encoder come with their heads apart
    return [part if len(shape_of(part)) == 4 else split_heads(part, heads, build) for part in parts]


def _unpacked(packed: ir.Value, build: Builder) -> list[ir.Value]:
    """Tensors (batch, positions, heads * depth) of one (batch, positions, heads, number, depth)."""
    if len(shape_of(packed)) != 5:
        raise Unsupported("without key and value needs a packed query of five dimensions")
    batch, length, heads, number, depth = shape_of(packed)
    shape = (batch, length, heads * depth)
    parts = build.split(packed, 3, [1] * number)
    return [typed(build.reshape(part, shape), dtype_of(packed), shape) for part in parts]


# -------------------------------------------------------------------------------------------- masks


def _masked(
    node: ir.Node,
    operands: Heads,
    past: ir.Value | None,
    *,
    mask: ir.Value | None,
    bias: ir.Value | None,
    build: Builder,
) -> ir.Value:
    masks = [] if bias is None else [bias]
    allowed = _causal(operands, past) if node.attributes.get_int("unidirectional", 0) else None
    if mask is not None:
        hidden = node.attributes.get_float("mask_filter_value", -10000.0)
        masks.append(_of_padding(_kept(mask, operands, build), allowed, hidden, operands.query, build))
    elif allowed is not None:
        masks.append(build.constant(np.where(allowed, 0.0, lowest(operands.query)), dtype_of(operands.query)))
    return logits(operands, node.attributes.get_float("scale", 0.0), masks, build)


def _causal(operands: Heads, past: ir.Value | None) -> np.ndarray | None:
    """Keys that each query may see, [1, 1, query, key]: those of the past, and new ones up to its own.

    None for one query, which onnxruntime lets see all keys. Which key is a query's own is not defined if
    their numbers differ.
    """
    rows, columns = shape_of(operands.query)[2], shape_of(operands.key)[2]
    before = 0 if past is None else shape_of(past)[-2]
    if rows == 1:
        return None
    if rows != columns - before:
        raise Unsupported("that is unidirectional needs as many new keys as queries")
    rows, columns = bounded(rows, columns)
    return np.tri(rows, columns, before, dtype=bool)[None, None]


def _of_padding(
    kept: ir.Value, allowed: np.ndarray | None, hidden: float, like: ir.Value, build: Builder
) -> ir.Value:
    """0 where keys are kept, `hidden` elsewhere, and the least number where they must not be seen."""
    mask = build.op("Where", kept, build.like(like, 0.0), build.like(like, hidden))
    if allowed is None:
        return mask
    return build.op("Where", build.constant(allowed), mask, build.like(like, lowest(like)))


def _kept(mask: ir.Value, operands: Heads, build: Builder) -> ir.Value:
    """Booleans [batch, 1, query or 1, key] of a mask, or of where the keys of each sequence end and begin."""
    (batch, _, rows, _), columns = shape_of(operands.query), shape_of(operands.key)[2]
    shape, none = shape_of(mask), build.constant(0, dtype_of(mask))
    if shape == (batch, columns):
        return build.unsqueeze(build.op("Greater", mask, none), [1, 2])
    if shape == (batch, rows, columns):
        return build.unsqueeze(build.op("Greater", mask, none), [1])
    if shape not in ((batch,), (2 * batch,)):
        raise Unsupported(f"with a mask of shape {shape} is not supported")
    positions = build.constant(np.arange(*bounded(columns)).reshape(1, 1, 1, columns), dtype_of(mask))
    limits = build.reshape(mask, (-1, batch, 1, 1, 1))
    if shape == (batch,):
        return build.op("Less", positions, build.squeeze(limits, [0]))
    ends, starts = (build.squeeze(part, [0]) for part in build.split(limits, 0, [1, 1]))
    is_before_end = build.op("Less", positions, ends)
    return build.op("And", is_before_end, build.op("Not", build.op("Less", positions, starts)))


MICROSOFT: dict[str, Expansion] = {
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
}
