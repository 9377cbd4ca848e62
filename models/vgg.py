"""VGG networks."""

from __future__ import annotations

import onnx

from hybridc.models.builder import GraphBuilder, batch_dim, require

_CONVS_PER_STAGE = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(
    *,
    depth: int = 16,
    batch: int = 1,
    size: int = 224,
    width: int = 64,
    hidden: int = 4096,
    classes: int = 1000,
    dropout: bool = False,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """VGG-11, 13, 16 or 19 (Simonyan and Zisserman, Very deep convolutional networks, ICLR 2015).

    `width` is the number of channels of the first stage, `hidden` the width of the two fully
    connected layers, behind which there is a Dropout each with `dropout`.
    x [batch, 3, size, size] to logits [batch, classes].
    """
    require(depth in _CONVS_PER_STAGE, f"no VGG has depth {depth}", f"take one of {list(_CONVS_PER_STAGE)}")
    g = GraphBuilder(f"vgg{depth}", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    for stage, convs in enumerate(_CONVS_PER_STAGE[depth]):
        for _ in range(convs):
            x = g.relu(g.conv(x, width << min(stage, 3), 3, padding=1))
        x = g.pool("MaxPool", x, 2, stride=2)
    x = g.flatten(x)
    return g.model(logits=g.classifier(x, hidden, classes, dropout=dropout))
