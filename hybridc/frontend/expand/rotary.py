"""RotaryEmbedding of com.microsoft: positions as rotations (Su et al., "RoFormer", 2021).

Definition: onnxruntime's docs/ContribOperators.md. Its attribute `scale` changes nothing there, nor here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.attention import merge_heads, split_heads
from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    bounded,
    dtype_of,
    operand,
    refuse_attributes,
    shape_of,
    typed,
)


def _rotary_embedding(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Inputs: input, position_ids, cos_cache, sin_cache."""
    refuse_attributes(node, ("is_packed_batching",))
    x, positions, cosines, sines = (operand(node, i) for i in range(4))
    is_flat = len(shape_of(x)) == 3
    if is_flat:
        heads = node.attributes.get_int("num_heads", 0)
        if not node.attributes.get_int("rotary_embedding_dim", 0):
            heads = shape_of(x)[2] // (2 * shape_of(cosines)[1])
        x = split_heads(x, heads, build)
    if shape_of(positions) == (1,):
        positions = counted(positions, shape_of(x)[2], build)
    is_interleaved = bool(node.attributes.get_int("interleaved", 0))
    result = rotated(
        x,
        positions,
        cosines,
        sines,
        is_interleaved=is_interleaved,
        build=build,
    )
    return [merge_heads(result, build) if is_flat else result]


def counted(first: ir.Value, length: int, build: Builder) -> ir.Value:
    """Positions (1, length) from the one given, of shape (1,)."""
    return build.op("Add", first, build.constant(np.arange(*bounded(length))[None], dtype_of(first)))


def rotated(
    x: ir.Value,
    positions: ir.Value,
    cosines: ir.Value,
    sines: ir.Value,
    *,
    is_interleaved: bool,
    build: Builder,
) -> ir.Value:
    """The pairs of the first elements of each head turned by the angles of its position.

    Shapes: x (batch, heads, length, depth), positions (batch or 1, length), cosines and sines (positions,
    pairs). A pair is an element of the first half and one of the second, or two neighbours if interleaved.
    """
    *outer, depth = shape_of(x)
    pairs = shape_of(cosines)[1]
    turned, rest = x, None
    if 2 * pairs < depth:
        turned, rest = build.split(x, 3, [2 * pairs, depth - 2 * pairs])
    cos, sin = (build.unsqueeze(build.op("Gather", table, positions), [1]) for table in (cosines, sines))
    if is_interleaved:
        apart = build.split(build.reshape(turned, (*outer, pairs, 2)), 4, [1, 1])
        real, imaginary = (build.squeeze(part, [4]) for part in apart)
    else:
        real, imaginary = build.split(turned, 3, [pairs, pairs])
    new = (
        build.op("Sub", build.op("Mul", real, cos), build.op("Mul", imaginary, sin)),
        build.op("Add", build.op("Mul", imaginary, cos), build.op("Mul", real, sin)),
    )
    if is_interleaved:
        joined = build.op("Concat", *(build.unsqueeze(part, [4]) for part in new), axis=4)
        result = build.reshape(joined, (*outer, 2 * pairs))
    else:
        result = build.op("Concat", *new, axis=3)
    if rest is not None:
        result = build.op("Concat", result, rest, axis=3)
    return typed(result, dtype_of(x), shape_of(x))


MICROSOFT: dict[str, Expansion] = {"RotaryEmbedding": _rotary_embedding}
