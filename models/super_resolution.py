"""Super-resolution."""

from __future__ import annotations

import math

import onnx

from hybridc.models.builder import LINEAR_GAIN, RELU_GAIN, GraphBuilder, Value, batch_dim, require


def super_resolution(
    *,
    batch: int = 1,
    size: int = 256,
    width: int = 64,
    blocks: int = 16,
    scale: int = 2,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """EDSR baseline (Lim et al., CVPR workshops 2017) with sub-pixel upsampling (Shi et al., CVPR 2016).

    x [batch, 3, size, size] to image [batch, 3, scale * size, scale * size], scale a power of two.
    1.4 million weights beside activations of width * size^2 floats each: memory goes to activations.
    """
    require(scale.bit_count() == 1, f"scale {scale} is not a power of two")
    g = GraphBuilder("super_resolution", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    head = y = _conv(g, x, width)
    for _ in range(blocks):
        branch = _conv(g, g.relu(_conv(g, y, width)), width, RELU_GAIN / math.sqrt(blocks))
        y = g.add(branch, y)
    y = g.add(_conv(g, y, width), head)
    for _ in range(scale.bit_length() - 1):
        y = _pixel_shuffle(g, _conv(g, y, 4 * width))
    return g.model(image=_conv(g, y, 3))


def _conv(g: GraphBuilder, x: Value, channels: int, gain: float = LINEAR_GAIN) -> Value:
    return g.conv(x, channels, 3, padding=1, gain=gain)


def _pixel_shuffle(g: GraphBuilder, x: Value) -> Value:
    """[N, 4C, H, W] to [N, C, 2H, 2W]."""
    shape = (x.shape[0], x.size(1) // 4, *(2 * size for size in x.spatial))
    return g.apply("DepthToSpace", [x], shape, blocksize=2, mode="CRD")
