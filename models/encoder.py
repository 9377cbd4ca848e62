"""Transformer encoder."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim, require
from hybridc.models.transformer import attention, feed_forward

_DROPOUT = 0.1
_EPSILON = 1e-5


def encoder(
    *,
    batch: int = 1,
    tokens: int = 128,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    vocabulary: int = 37000,
    classes: int = 10,
    dropout: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """Transformer encoder (Vaswani et al., NeurIPS 2017) that classifies texts by the mean of their tokens.

    Positions are learned. With `dropout` there is one behind the embedding and behind each sublayer.
    input_ids int64 [batch, tokens] to logits [batch, classes].
    """
    require(hidden % heads == 0, f"{heads} heads do not divide a hidden width of {hidden}")
    g = GraphBuilder("encoder", seed)

    def dropped(x: Value) -> Value:
        return g.dropout(x, _DROPOUT) if dropout else x

    ids = g.input("input_ids", (batch_dim(batch, dynamic_batch), tokens), TensorProto.INT64)
    words = g.gather(g.normal("word_embeddings", (vocabulary, hidden), 1.0), ids)
    x = dropped(g.add(words, g.normal("position_embeddings", (tokens, hidden), 0.5)))
    for _ in range(layers):
        x = g.layer_norm(g.add(x, dropped(attention(g, x, heads))), _EPSILON)
        x = g.layer_norm(g.add(x, dropped(feed_forward(g, x, 4 * hidden))), _EPSILON)
    mean = g.apply("ReduceMean", [x], (x.shape[0], hidden), axes=[1], keepdims=0)
    # tokens of random weights differ, so their mean is small
    return g.model(logits=g.gemm(mean, classes, LINEAR_GAIN * np.sqrt(tokens)))
