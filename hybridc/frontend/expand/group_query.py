"""GroupQueryAttention of com.microsoft: heads of the query share keys and values, kept from run to run.

Definition: onnxruntime's docs/ContribOperators.md. The queries that share a head of keys become rows of one
product, so keys and values are not repeated; passes/fuse finds attention in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.appended import appended_rows, checked_count
from hybridc.frontend.expand.attention import (
    Heads,
    appended,
    context_of,
    for_group,
    logits,
    split_heads,
)
from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    bounded,
    constant_of,
    dtype_of,
    given,
    is_used,
    operand,
    refuse_attributes,
    shape_of,
    typed,
)
from hybridc.frontend.expand.rotary import counted, rotated
from hybridc.frontend.values import constant_array

_UNSUPPORTED = ("smooth_softmax", "qk_output", "sliding_window_cache")
_HEAD_SINK = 11
"""Position of the first input that is not supported: sinks, scales of quantised keys, norms, lengths."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a run adds to the keys and values that are kept."""

    length: int
    """Positions that are new."""
    before: ir.Value
    """Positions of each sequence, (batch, 1, 1, 1), before the new ones."""
    known_before: int | None
    """The same, where it is known and the same for all."""
    total: int
    """Positions that the longest sequence has afterwards."""
    kept: int
    """Positions that there is room for: of the past, or the total if that is more."""


def _group_query_attention(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Inputs: query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache,
    sin_cache, position_ids, attention_bias.
    """
    _refuse(node)
    shared = node.attributes.get_int("kv_num_heads", 0)
    query, key, value = _parts(node, shared, build)
    step = _step(node, query, build)
    if node.attributes.get_int("do_rotary", 0):
        query, key = (_turned(part, node, step, build) for part in (query, key))
    key, value = (_present(given(node, 3 + i), new, step, build) for i, new in enumerate((key, value)))
    seen_key, seen_value = (_first(kept, step.total, build) for kept in (key, value))
    batch, heads, length, depth = shape_of(query)
    group = heads // shared
    rows = (batch, shared, group * length, depth)
    operands = Heads(typed(build.reshape(query, rows), dtype_of(query), rows), seen_key, seen_value)
    scores = _scores(node, operands, step, group, build)
    context = build.reshape(context_of(scores, seen_value, build), (batch, heads, length, depth))
    result = build.reshape(build.transpose(context, (0, 2, 1, 3)), (batch, length, heads * depth))
    return [result, key, value]


def _refuse(node: ir.Node) -> None:
    refuse_attributes(node, _UNSUPPORTED)
    if not node.attributes.get_int("causal", 1):
        raise Unsupported("that is not causal is not supported")
    if any(value is not None for value in node.inputs[_HEAD_SINK:]):
        raise Unsupported(f"with more than {_HEAD_SINK} inputs is not supported")
    if is_used(node, 3):
        raise Unsupported("whose scores are used is not supported")


def _parts(node: ir.Node, shared: int, build: Builder) -> list[ir.Value]:
    """Query, key and value with their heads apart; the query may hold all three."""
    query, key, heads = operand(node, 0), given(node, 1), node.attributes.get_int("num_heads", 0)
    parts = [query]
    if key is not None:
        parts += [key, operand(node, 2)]
    else:
        batch, length, hidden = shape_of(query)
        sizes = [n * (hidden // (heads + 2 * shared)) for n in (heads, shared, shared)]
        parts = [
            typed(part, dtype_of(query), (batch, length, size))
            for part, size in zip(build.split(query, 2, sizes), sizes, strict=True)
        ]
    return [split_heads(part, n, build) for part, n in zip(parts, (heads, shared, shared), strict=True)]


def _step(node: ir.Node, query: ir.Value, build: Builder) -> Step:
    batch, _, length, _ = shape_of(query)
    total = int(constant_of(operand(node, 6), "a total_sequence_length").reshape(()))
    past, lengths = given(node, 3), operand(node, 5)
    (kept,) = bounded(max(total, 0 if past is None else shape_of(past)[2]))
    if length > total:
        raise Unsupported(f"with {length} new positions of {total} in all is not supported")
    if length == total:  # of the first run: what the past holds does not count
        return Step(length, build.constant(np.zeros((batch, 1, 1, 1)), dtype_of(lengths)), 0, total, kept)
    before = build.op("Sub", lengths, build.constant(length - 1, dtype_of(lengths)))
    known = constant_array(lengths)
    numbers = set() if known is None else {int(n) - (length - 1) for n in known.ravel()}
    if any(not 0 <= n <= total - length for n in numbers):
        raise Unsupported(f"has lengths that are not from {length - 1} to {total - 1}")
    placed = typed(build.reshape(before, (batch, 1, 1, 1)), dtype_of(lengths), (batch, 1, 1, 1))
    if known is None:
        placed = checked_count(placed, total - length, node.op_type, build)
    return Step(length, placed, numbers.pop() if len(numbers) == 1 else None, total, kept)


def _turned(part: ir.Value, node: ir.Node, step: Step, build: Builder) -> ir.Value:
    """Rotated by its positions; of the first run only the first one given counts."""
    batch, given_positions = shape_of(part)[0], given(node, 9)
    if given_positions is None:
        first = build.reshape(step.before, (batch, 1))
        positions = counted(typed(first, dtype_of(step.before)), step.length, build)
    elif step.known_before == 0 and step.length == step.total:
        first = build.slice(build.reshape(given_positions, (-1,)), 0, 0, 1)
        positions = counted(typed(first, dtype_of(given_positions)), step.length, build)
    else:
        positions = given_positions
    is_interleaved = bool(node.attributes.get_int("rotary_interleaved", 0))
    tables = operand(node, 7), operand(node, 8)
    return rotated(part, positions, *tables, is_interleaved=is_interleaved, build=build)


def _present(past: ir.Value | None, new: ir.Value, step: Step, build: Builder) -> ir.Value:
    """The new positions behind those of the past that count: (batch, heads, kept, depth).

    Behind them is what a past of so many positions has there, else zeros. So it is in onnxruntime, where such
    a present is the past's buffer.
    """
    batch, heads, length, depth = shape_of(new)
    dtype, shape = dtype_of(new), (batch, heads, step.kept, depth)
    has_room = past is not None and shape_of(past)[2] == step.kept
    if step.known_before is not None:
        before = step.known_before
        start = None if past is None or before == 0 else _first(past, before, build)
        made = appended(start, new, build)
        if past is not None and has_room and before + length < step.kept:
            behind = build.slice(past, 2, before + length, step.kept)
            return typed(build.op("Concat", made, behind, axis=2), dtype, shape)
        return _padded(made, step.kept, build)
    if past is not None and has_room and not build.for_training:  # where it would need a gradient
        return appended_rows(past, new, step.before, build)
    positions = build.constant(np.arange(step.kept).reshape(1, 1, -1, 1), dtype_of(step.before))
    after = build.op("Add", step.before, build.constant(length, dtype_of(step.before)))
    if length > 1:  # each place takes the new position that belongs there; outside of them any
        offset = build.op("Sub", positions, step.before)
        bounds = [build.constant(n, dtype_of(step.before)) for n in (0, length - 1)]
        index = build.op("Min", build.op("Max", offset, bounds[0]), bounds[1])
        index = build.op("Expand", index, build.constant(shape, "int64"))
        new = build.op("GatherElements", new, index, axis=2)
    zero = build.constant(0, dtype)
    added = build.op("Where", build.op("Less", positions, after), new, zero)
    if past is None:
        return typed(added, dtype, shape)
    is_past = build.op("Less", positions, step.before)
    return typed(build.op("Where", is_past, _padded(past, step.kept, build), added), dtype, shape)


def _padded(value: ir.Value, length: int, build: Builder) -> ir.Value:
    """Zeros behind the positions that there are."""
    batch, heads, positions, depth = shape_of(value)
    if positions == length:
        return value
    zeros = build.constant(np.zeros(bounded(batch, heads, length - positions, depth)), dtype_of(value))
    joined = build.op("Concat", value, zeros, axis=2)
    return typed(joined, dtype_of(value), (batch, heads, length, depth))


def _first(value: ir.Value, length: int, build: Builder) -> ir.Value:
    """The first positions."""
    batch, heads, positions, depth = shape_of(value)
    if positions == length:
        return value
    return typed(build.slice(value, 2, 0, length), dtype_of(value), (batch, heads, length, depth))


def _scores(node: ir.Node, operands: Heads, step: Step, group: int, build: Builder) -> ir.Value:
    masks = [_mask(node, operands.query, step, group, build)]
    if (bias := given(node, 10)) is not None:
        masks.append(for_group(bias, shape_of(bias), group, build))
    scale, softcap = (node.attributes.get_float(name, 0.0) for name in ("scale", "softcap"))
    if not softcap:
        return logits(operands, scale, masks, build)
    limit = build.like(operands.query, softcap)
    scores = build.op("Div", logits(operands, scale, (), build), limit)
    scores = build.op("Mul", build.op("Tanh", scores), limit)
    for mask in masks:
        scores = build.op("Add", scores, mask)
    return scores


def _mask(node: ir.Node, like: ir.Value, step: Step, group: int, build: Builder) -> ir.Value:
    """-inf where a key comes after the query, or is not within the window that ends with it.

    Not the least number of the type: that of float16 does not tell kernels, which compute in float32, that
    a key has no weight. A query sees its own position at least, so that no row is of -inf alone.
    """
    kind = dtype_of(step.before)
    offsets = build.constant(np.arange(*bounded(step.length)).reshape(1, 1, -1, 1), kind)
    columns = build.constant(np.arange(step.total).reshape(1, 1, 1, -1), kind)
    rows = build.op("Add", step.before, offsets)
    hidden = build.op("Greater", columns, rows)
    window = node.attributes.get_int("local_window_size", -1)
    if window > 0:
        reached = build.op("Add", columns, build.constant(window, kind))
        hidden = build.op("Or", hidden, build.op("Not", build.op("Greater", reached, rows)))
    mask = build.op("Where", hidden, build.like(like, -math.inf), build.like(like, 0.0))
    batch = shape_of(step.before)[0]
    return for_group(mask, (batch, 1, step.length, step.total), group, build)


MICROSOFT: dict[str, Expansion] = {"GroupQueryAttention": _group_query_attention}
