"""U-Net."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim, require


def unet(
    *,
    batch: int = 1,
    size: int = 256,
    width: int = 64,
    levels: int = 4,
    channels: int = 3,
    classes: int = 2,
    batch_norm: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """U-Net (Ronneberger, Fischer and Brox, MICCAI 2015), padded so that the size is kept.

    `width` is the number of channels at full resolution, doubled at each of `levels` halvings.
    x [batch, channels, size, size] to logits [batch, classes, size, size]. Its skips hold large
    activations from the way down until the way up.
    """
    require(size % (1 << levels) == 0, f"size {size} cannot be halved {levels} times")
    g = GraphBuilder("unet", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), channels, size, size))
    skips = []
    for level in range(levels):
        skips.append(_double_conv(g, x, width << level, batch_norm))
        x = g.pool("MaxPool", skips[-1], 2, stride=2)
    x = _double_conv(g, x, width << levels, batch_norm)
    for level in reversed(range(levels)):
        up = g.upsample_conv(x, width << level, 2)
        x = _double_conv(g, g.concat([skips[level], up]), width << level, batch_norm)
    return g.model(logits=g.conv(x, classes, 1, gain=LINEAR_GAIN))


def _double_conv(g: GraphBuilder, x: Value, channels: int, batch_norm: bool) -> Value:
    for _ in range(2):
        x = g.conv(x, channels, 3, padding=1, bias=not batch_norm)
        x = g.relu(g.batch_norm(x) if batch_norm else x)
    return x
