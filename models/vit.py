"""Vision Transformer."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim, require
from hybridc.models.transformer import attention, feed_forward

_EPSILON = 1e-6


def vit(
    *,
    batch: int = 1,
    size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    mlp: int = 3072,
    classes: int = 1000,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """ViT-B/16 (Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021).

    A class token and one token for each patch, `depth` encoder layers that normalise first.
    x [batch, 3, size, size] to logits [batch, classes].
    """
    require(width % heads == 0, f"{heads} heads do not divide a width of {width}")
    require(size % patch == 0, f"patches of {patch} do not divide a size of {size}")
    g = GraphBuilder("vit", seed)
    image = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = _embed(g, image, patch, width)
    for _ in range(depth):
        x = g.add(attention(g, g.layer_norm(x, _EPSILON), heads), x)
        x = g.add(feed_forward(g, g.layer_norm(x, _EPSILON), mlp), x)
    first = g.constant("class_position", np.array(0, np.int64))
    token = g.apply("Gather", [g.layer_norm(x, _EPSILON), first], (x.shape[0], width), axis=1)
    return g.model(logits=g.gemm(token, classes, LINEAR_GAIN))


def _embed(g: GraphBuilder, image: Value, patch: int, width: int) -> Value:
    """Class token and projected patches with their positions: [N, 3, S, S] to [N, 1 + (S/patch)^2, width]."""
    grid = g.conv(image, width, patch, stride=patch, gain=LINEAR_GAIN)
    count = grid.size(2) * grid.size(3)
    patches = g.transpose(g.reshape(grid, width, count), 0, 2, 1)
    x = g.concat([_class_tokens(g, image, width), patches], axis=1)
    return g.add(x, g.normal("position_embeddings", (1, 1 + count, width), 0.5))


def _class_tokens(g: GraphBuilder, image: Value, width: int) -> Value:
    """The class token once for each image of the batch, whose size may be known at run time only."""
    token = g.normal("class_token", (1, 1, width), 1.0)
    batch = g.apply("Shape", [image], (1,), dtype=TensorProto.INT64, start=0, end=1)
    tail = g.constant("class_token.shape", np.array([1, width], np.int64))
    shape = g.apply("Concat", [batch, tail], (3,), axis=0)
    return g.apply("Expand", [token, shape], (image.shape[0], 1, width))
