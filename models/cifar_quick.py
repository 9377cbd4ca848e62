"""Caffe's quick network for CIFAR-10."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, batch_dim


def cifar_quick(
    *,
    batch: int = 1,
    size: int = 32,
    width: int = 32,
    classes: int = 10,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """Caffe's cifar10_quick (Jia et al., Caffe, ACM Multimedia 2014; examples/cifar10).

    Pooling rounds sizes up, as Caffe does; the first pooling stands before its ReLU and the two fully
    connected layers follow each other. x [batch, 3, size, size] to logits [batch, classes].
    """
    g = GraphBuilder("cifar_quick", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = g.conv(x, width, 5, padding=2)
    x = g.relu(g.pool("MaxPool", x, 3, stride=2, ceil_mode=True))
    for channels in (width, 2 * width):
        x = g.relu(g.conv(x, channels, 5, padding=2))
        x = g.pool("AveragePool", x, 3, stride=2, ceil_mode=True)
    x = g.gemm(g.flatten(x), 2 * width)
    return g.model(logits=g.gemm(x, classes, LINEAR_GAIN))
