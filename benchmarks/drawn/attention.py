"""Transformer encoders over long sequences, where attention takes as long as the products of weights."""

from __future__ import annotations

import numpy as np
import onnx

from drawn.case import Case, even
from hybridc.models.builder import GraphBuilder
from hybridc.models.transformer import attention, feed_forward


def draw_attention(rng: np.random.Generator) -> Case:
    """1,000 to 2,000 positions."""
    positions, depth = int(rng.integers(1000, 2001)), int(rng.choice([32, 48, 64, 80, 128]))
    heads, layers = even(rng, 128, 768, depth) // depth, int(rng.integers(1, 4))
    name = f"attention {positions} positions, {heads} heads of {depth}, {layers} layers"
    return Case(name, lambda: encoder(positions, heads, depth, layers))


def encoder(positions: int, heads: int, depth: int, layers: int) -> onnx.ModelProto:
    g = GraphBuilder("encoder", 0)
    x = g.input("x", (1, positions, heads * depth))
    for _ in range(layers):
        x = g.add(attention(g, g.layer_norm(x, 1e-5), heads), x)
        x = g.add(feed_forward(g, g.layer_norm(x, 1e-5), 4 * heads * depth), x)
    return g.model(y=x)
