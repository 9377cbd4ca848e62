"""LeNet-5."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, batch_dim


def lenet(
    *,
    batch: int = 1,
    size: int = 32,
    channels: int = 1,
    classes: int = 10,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """LeNet-5: tanh units and average pooling (LeCun et al., Gradient-based learning, Proc. IEEE 1998).

    x [batch, channels, size, size] to logits [batch, classes]; size at least 32.
    """
    g = GraphBuilder("lenet", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), channels, size, size))
    for features in (6, 16):
        x = g.unary("Tanh", g.conv(x, features, 5, gain=LINEAR_GAIN))
        x = g.pool("AveragePool", x, 2, stride=2)
    x = g.unary("Tanh", g.conv(x, 120, 5))
    x = g.unary("Tanh", g.gemm(g.flatten(x), 84))
    return g.model(logits=g.gemm(x, classes))
