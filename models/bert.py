"""BERT encoder."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from hybridc.models.builder import GraphBuilder, Value, batch_dim, require
from hybridc.models.transformer import attention, feed_forward

_EPSILON = 1e-12
_TOKEN_TYPES = 2


def bert(
    *,
    batch: int = 1,
    tokens: int = 128,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    positions: int = 512,
    attention_mask: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """BERT-base encoder without its pooler (Devlin et al., NAACL 2019), every token of segment A.

    input_ids int64 [batch, tokens] to last_hidden_state [batch, tokens, hidden]. With
    `attention_mask` there is a second int64 input of the same shape: 1 for a token, 0 for padding.
    """
    require(hidden % heads == 0, f"{heads} heads do not divide a hidden width of {hidden}")
    require(tokens <= positions, f"{tokens} tokens exceed {positions} positions", "raise `positions`")
    g = GraphBuilder("bert", seed)
    shape = (batch_dim(batch, dynamic_batch), tokens)
    ids = g.input("input_ids", shape, TensorProto.INT64)
    mask = _additive_mask(g, g.input("attention_mask", shape, TensorProto.INT64)) if attention_mask else None
    x = _embed(g, ids, hidden, vocabulary, positions)
    for _ in range(layers):
        x = g.layer_norm(g.add(attention(g, x, heads, mask), x), _EPSILON)
        x = g.layer_norm(g.add(feed_forward(g, x, 4 * hidden), x), _EPSILON)
    return g.model(last_hidden_state=x)


def _embed(g: GraphBuilder, ids: Value, hidden: int, vocabulary: int, positions: int) -> Value:
    """Sum of word, position and segment embeddings, normalised: [N, T] to [N, T, hidden]."""
    words = g.gather(g.normal("word_embeddings", (vocabulary, hidden), 1.0), ids)
    places = g.constant("position_ids", np.arange(ids.size(1), dtype=np.int64))
    positioned = g.add(words, g.gather(g.normal("position_embeddings", (positions, hidden), 1.0), places))
    segment = g.constant("token_type_id", np.array(0, np.int64))
    types = g.normal("token_type_embeddings", (_TOKEN_TYPES, hidden), 1.0)
    return g.layer_norm(g.add(positioned, g.gather(types, segment)), _EPSILON)


def _additive_mask(g: GraphBuilder, mask: Value) -> Value:
    """0 for a token and -10000 for padding, [N, T] to [N, 1, 1, T]."""
    present = g.apply("Cast", [mask], mask.shape, dtype=TensorProto.FLOAT, to=TensorProto.FLOAT)
    absent = g.apply("Sub", [g.scalar(1.0), present], mask.shape)
    return g.reshape(g.binary("Mul", absent, g.scalar(-10000.0)), 1, 1, mask.size(1))
