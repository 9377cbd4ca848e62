"""MobileNetV2."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim

_STAGES = (
    # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_BRANCH_SCALE = 0.5
"""Ten residual sums then grow the variance by 1.25^10, where branches of scale 1 make it 2^10."""


def mobilenet_v2(
    *,
    batch: int = 1,
    size: int = 224,
    width: float = 1.0,
    classes: int = 1000,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """MobileNetV2: depthwise convolutions in inverted residuals, ReLU6 (Sandler et al., CVPR 2018).

    `width` multiplies every number of channels. x [batch, 3, size, size] to logits [batch, classes].
    """
    g = GraphBuilder("mobilenet_v2", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = _relu6(g, g.batch_norm(g.conv(x, _channels(32, width), 3, stride=2, padding=1, bias=False)))
    for expansion, channels, blocks, first_stride in _STAGES:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            x = _inverted_residual(g, x, expansion, _channels(channels, width), stride)
    x = _relu6(g, g.batch_norm(g.conv(x, _channels(1280, max(width, 1.0)), 1, bias=False)))
    return g.model(logits=g.gemm(g.flatten(g.global_average_pool(x)), classes))


def _inverted_residual(g: GraphBuilder, x: Value, expansion: int, channels: int, stride: int) -> Value:
    residual = stride == 1 and x.size(1) == channels
    y, hidden = x, x.size(1) * expansion
    if expansion > 1:
        y = _relu6(g, g.batch_norm(g.conv(x, hidden, 1, bias=False)))
    y = _relu6(g, g.batch_norm(g.conv(y, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False)))
    y = g.batch_norm(g.conv(y, channels, 1, bias=False, gain=LINEAR_GAIN), _BRANCH_SCALE if residual else 1.0)
    return g.add(x, y) if residual else y


def _relu6(g: GraphBuilder, x: Value) -> Value:
    return g.apply("Clip", [x, g.scalar(0.0), g.scalar(6.0)], x.shape)


def _channels(channels: int, width: float) -> int:
    """Scaled and rounded to a multiple of 8, never by more than a tenth down."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * scaled else rounded + 8
