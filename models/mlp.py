"""Multilayer perceptron."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, batch_dim


def mlp(
    *,
    batch: int = 1,
    inputs: int = 784,
    hidden: int = 1024,
    layers: int = 3,
    classes: int = 10,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """Multilayer perceptron with ReLUs (Rumelhart, Hinton and Williams, Nature 1986).

    `layers` counts the weight matrices. x [batch, inputs] to logits [batch, classes].
    """
    g = GraphBuilder("mlp", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), inputs))
    for _ in range(layers - 1):
        x = g.relu(g.gemm(x, hidden))
    return g.model(logits=g.gemm(x, classes, LINEAR_GAIN))
