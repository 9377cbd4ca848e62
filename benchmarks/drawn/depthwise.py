"""ConvNeXt (Liu et al., CVPR 2022): 7 x 7 depthwise convolutions, layer norms over channels, GELUs."""

from __future__ import annotations

import numpy as np
import onnx

from drawn.case import Case, even
from hybridc.models.builder import GraphBuilder, Value
from hybridc.models.transformer import feed_forward


def draw_depthwise(rng: np.random.Generator) -> Case:
    """96 to 320 pixels, 32 to 128 channels in the first of two to four stages."""
    size, channels = even(rng, 96, 320, 32), even(rng, 32, 128, 8)
    stages = tuple(int(blocks) for blocks in rng.integers(1, 4, int(rng.integers(2, 5))))
    name = f"depthwise {size} pixels, {channels} channels, {'-'.join(map(str, stages))} blocks"
    return Case(name, lambda: convnext(size, channels, stages))


def convnext(size: int, channels: int, stages: tuple[int, ...]) -> onnx.ModelProto:
    g = GraphBuilder("convnext", 0)
    x = _norm(g, g.conv(g.input("x", (1, 3, size, size)), channels, 4, stride=4))
    for stage, blocks in enumerate(stages):
        if stage:
            x = g.conv(_norm(g, x), 2 * x.size(1), 2, stride=2)
        for _ in range(blocks):
            x = g.add(x, _block(g, x))
    return g.model(y=g.flatten(g.global_average_pool(x)))


def _block(g: GraphBuilder, x: Value) -> Value:
    rows = g.transpose(g.conv(x, x.size(1), 7, padding=3, groups=x.size(1)), 0, 2, 3, 1)
    return g.transpose(feed_forward(g, g.layer_norm(rows, 1e-6), 4 * x.size(1)), 0, 3, 1, 2)


def _norm(g: GraphBuilder, x: Value) -> Value:
    """Over the channels of an image."""
    return g.transpose(g.layer_norm(g.transpose(x, 0, 2, 3, 1), 1e-6), 0, 3, 1, 2)
