"""AlexNet."""

from __future__ import annotations

import onnx

from hybridc.models.builder import GraphBuilder, batch_dim, require


def alexnet(
    *,
    batch: int = 1,
    size: int = 227,
    width: int = 96,
    hidden: int = 4096,
    classes: int = 1000,
    dropout: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """AlexNet (Krizhevsky, Sutskever and Hinton, NeurIPS 2012), in two groups like Caffe's bvlc_alexnet.

    `width` is the number of channels of the first convolution, a multiple of 6; `hidden` the width of the
    two fully connected layers, behind which there is a Dropout each with `dropout`.
    x [batch, 3, size, size] to logits [batch, classes].
    """
    require(width % 6 == 0, f"a width of {width} has no two groups", "take a multiple of 6")
    g = GraphBuilder("alexnet", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = g.lrn(g.relu(g.conv(x, width, 11, stride=4)))
    x = g.pool("MaxPool", x, 3, stride=2, ceil_mode=True)
    x = g.lrn(g.relu(g.conv(x, width * 8 // 3, 5, padding=2, groups=2)))
    x = g.pool("MaxPool", x, 3, stride=2, ceil_mode=True)
    for channels, groups in ((4 * width, 1), (4 * width, 2), (width * 8 // 3, 2)):
        x = g.relu(g.conv(x, channels, 3, padding=1, groups=groups))
    x = g.flatten(g.pool("MaxPool", x, 3, stride=2, ceil_mode=True))
    return g.model(logits=g.classifier(x, hidden, classes, dropout=dropout))
