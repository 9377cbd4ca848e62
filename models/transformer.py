"""What the encoders of BERT and ViT share."""

from __future__ import annotations

import math

from hybridc.models.builder import RELU_GAIN, GraphBuilder, Value


def attention(g: GraphBuilder, x: Value, heads: int, mask: Value | None = None) -> Value:
    """Multi-head self-attention (Vaswani et al., NeurIPS 2017): [N, T, H] to [N, T, H].

    `mask` is added to the scores [N, heads, T, T].
    """
    tokens, hidden = x.size(1), x.size(2)
    depth = hidden // heads

    def split(*axes: int) -> Value:
        return g.transpose(g.reshape(g.project(x, hidden), tokens, heads, depth), *axes)

    query, key, value = split(0, 2, 1, 3), split(0, 2, 3, 1), split(0, 2, 1, 3)
    scores = g.binary("Div", g.matmul(query, key), g.scalar(math.sqrt(depth)))
    if mask is not None:
        scores = g.add(scores, mask)
    context = g.matmul(g.unary("Softmax", scores, axis=-1), value)
    return g.project(g.reshape(g.transpose(context, 0, 2, 1, 3), tokens, hidden), hidden)


def feed_forward(g: GraphBuilder, x: Value, width: int) -> Value:
    """Two fully connected layers, the inner one `width` wide, with a gelu between them."""
    return g.project(gelu(g, g.project(x, width)), x.size(-1), RELU_GAIN)


def gelu(g: GraphBuilder, x: Value) -> Value:
    """x/2 * (1 + erf(x / sqrt 2)), spelled as exporters do."""
    erf = g.unary("Erf", g.binary("Div", x, g.scalar(math.sqrt(2))))
    return g.binary("Mul", g.binary("Mul", x, g.add(erf, g.scalar(1.0))), g.scalar(0.5))
