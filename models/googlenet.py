"""GoogLeNet."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim, require

_DROPOUT = 0.4
_STEM = 64
_INCEPTIONS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Channels of the modules between poolings, the paper's table 1.

1x1; 3x3 reduce and 3x3; 5x5 reduce and 5x5; behind the pooling.
"""


def googlenet(
    *,
    batch: int = 1,
    size: int = 224,
    width: int = _STEM,
    classes: int = 1000,
    dropout: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """GoogLeNet, Inception v1 without auxiliary classifiers (Szegedy et al., CVPR 2015; bvlc_googlenet).

    `width` is the number of channels of the first convolution, a multiple of 8, and scales all others;
    with `dropout` there is one before the classifier. x [batch, 3, size, size] to logits [batch, classes].
    """
    require(width % 8 == 0, f"a width of {width} cannot be divided among branches", "take a multiple of 8")
    g = GraphBuilder("googlenet", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = g.relu(g.conv(x, width, 7, stride=2, padding=3))
    x = g.lrn(g.pool("MaxPool", x, 3, stride=2, ceil_mode=True))
    x = g.relu(g.conv(x, width, 1))
    x = g.lrn(g.relu(g.conv(x, 3 * width, 3, padding=1)))
    for modules in _INCEPTIONS:
        x = g.pool("MaxPool", x, 3, stride=2, ceil_mode=True)
        for channels in modules:
            x = _inception(g, x, [c * width // _STEM for c in channels])
    x = g.flatten(g.global_average_pool(x))
    x = g.dropout(x, _DROPOUT) if dropout else x
    return g.model(logits=g.gemm(x, classes, LINEAR_GAIN))


def _inception(g: GraphBuilder, x: Value, channels: list[int]) -> Value:
    """Four branches beside each other, joined by channels."""
    one, reduce3, three, reduce5, five, pooled = channels
    branches = [
        g.conv(x, one, 1),
        g.conv(g.relu(g.conv(x, reduce3, 1)), three, 3, padding=1),
        g.conv(g.relu(g.conv(x, reduce5, 1)), five, 5, padding=2),
        g.conv(g.pool("MaxPool", x, 3, stride=1, padding=1), pooled, 1),
    ]
    return g.concat([g.relu(branch) for branch in branches])
