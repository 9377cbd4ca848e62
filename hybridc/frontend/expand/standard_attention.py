"""ONNX's Attention in the form that passes/fuse finds; by ONNX's own body where this form does not do.

The body zeroes the weights of queries that see no key, between the softmax and the second product: here the
result of such a query is zeroed instead, which is the same, so that nothing stands between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.attention import (
    Heads,
    appended,
    context_of,
    for_group,
    logits,
    merge_heads,
    split_heads,
)
from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    bounded,
    dtype_of,
    given,
    is_used,
    operand,
    shape_of,
    typed,
)
from hybridc.frontend.expand.functions import by_body

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""All are computed in float32, as precisely as `softmax_precision` may ask for."""
_LENGTHS = 6
"""Position of nonpad_kv_seqlen."""


def _attention(node: ir.Node, build: Builder) -> Sequence[ir.Value | None]:
    """Inputs: query, key, value, mask, past_key, past_value."""
    query, key, value = (_heads_apart(node, i, build) for i in range(3))
    batch, heads, length, depth = shape_of(query)
    past, shared = given(node, 4), shape_of(key)[1]
    before, group = 0 if past is None else shape_of(past)[2], heads // shared
    if not _is_plain(node, (length, before + shape_of(key)[2]), group):
        build.nodes.clear()
        return by_body(node, build)
    key, value = appended(past, key, build), appended(given(node, 5), value, build)
    rows = (batch, shared, group * length, depth)
    operands = Heads(typed(build.reshape(query, rows), dtype_of(query), rows), key, value)
    mask = _mask(node, (length, shape_of(key)[2]), before, build)
    mask = None if mask is None else for_group(mask, shape_of(mask), group, build)
    scale = node.attributes.get_float("scale", 0.0)
    context = context_of(logits(operands, scale, [] if mask is None else [mask], build), value, build)
    if mask is not None and given(node, 3) is not None:
        nothing = build.op("Equal", build.reduce("ReduceMax", mask, [3]), build.like(query, -math.inf))
        context = build.op("Where", nothing, build.like(query, 0.0), context)
    if group > 1:
        context = build.reshape(context, (batch, heads, length, -1))
    return [merge_heads(context, build) if len(shape_of(operand(node, 0))) == 3 else context, key, value]


def _heads_apart(node: ir.Node, position: int, build: Builder) -> ir.Value:
    value = operand(node, position)
    if len(shape_of(value)) == 4:
        return value
    count = node.attributes.get_int("kv_num_heads" if position else "q_num_heads", 0)
    return split_heads(value, count, build)


def _is_plain(node: ir.Node, extent: tuple[int, int], group: int) -> bool:
    """Whether the use has nothing but what `_attention` emits; `extent` counts queries and keys."""
    given_mask, numbers = given(node, 3), node.attributes
    if dtype_of(operand(node, 0)) not in _FLOATS or given(node, _LENGTHS) is not None:
        return False
    is_windowed = any(numbers.get_int(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))
    is_capped = numbers.get_float("softcap", 0.0) != 0.0
    if is_windowed or is_capped or is_used(node, 3) or numbers.get_float("scale", 1.0) == 0.0:
        return False
    if given_mask is None:
        return True
    shape = shape_of(given_mask)
    return len(shape) > 1 and shape[-2:] == extent and (group == 1 or math.prod(shape[-3:-2]) == 1)


def _mask(node: ir.Node, extent: tuple[int, int], before: int, build: Builder) -> ir.Value | None:
    """What is added to the scores, of four dimensions; None for nothing."""
    masks: list[ir.Value] = []
    like = operand(node, 0)
    shape: tuple[int, ...] = (1, 1, *extent)
    if (fed := given(node, 3)) is not None:
        shape = (*[1] * (4 - len(shape_of(fed))), *shape_of(fed))
        if dtype_of(fed) == ir.DataType.BOOL:
            masks.append(build.op("Where", fed, build.like(like, 0.0), build.like(like, -math.inf)))
        else:
            masks.append(fed)
        masks = [build.reshape(masks[0], shape)]
    if node.attributes.get_int("is_causal", 0):
        rows, columns = bounded(*extent)
        seen = np.tri(rows, columns, before, dtype=bool)[None, None]
        masks.append(build.constant(np.where(seen, 0.0, -math.inf), dtype_of(like)))
    if not masks:
        return None
    both = masks[0] if len(masks) == 1 else build.op("Add", *masks)
    return typed(both, dtype_of(like), shape)


STANDARD: dict[str, Expansion] = {"Attention": _attention}
