"""Residual networks of any depth."""

from __future__ import annotations

import math

import onnx

from hybridc.models.builder import LINEAR_GAIN, GraphBuilder, Value, batch_dim, require

_PUBLISHED_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_BOTTLENECK_DEPTH = 50
_EXTRA_DEEP_BLOCKS = 152


def resnet(
    *,
    depth: int = 50,
    batch: int = 1,
    size: int = 224,
    width: int = 64,
    classes: int = 1000,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """ResNet of any depth (He et al., Deep residual learning, CVPR 2016), stride in the 3x3 convolution.

    Depths 18, 34, 50, 101 and 152 are the published ones; any other 3n+2 from 50 on, up to the
    ResNet-1517 of Layrub (Jin et al., TACO 2018), has n bottlenecks, and any other 2n+2 below has n
    basic blocks. `width` is the number of channels after the stem. x [batch, 3, size, size] to
    logits [batch, classes].
    """
    stages = blocks_of(depth)
    g = GraphBuilder(f"resnet{depth}", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 3, size, size))
    x = g.relu(g.batch_norm(g.conv(x, width, 7, stride=2, padding=3, bias=False)))
    x = g.pool("MaxPool", x, 3, stride=2, padding=1)
    block = _bottleneck if depth >= _BOTTLENECK_DEPTH else _basic
    # A sum of branches of variance 1/blocks each grows to e at most (Zhang et al., Fixup, ICLR 2019);
    # of variance 1 it would double in every block.
    branch_scale = 1 / math.sqrt(sum(stages))
    for stage, blocks in enumerate(stages):
        for index in range(blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            x = block(g, x, width << stage, stride, branch_scale)
    x = g.flatten(g.global_average_pool(x))
    return g.model(logits=g.gemm(x, classes))


def blocks_of(depth: int) -> tuple[int, ...]:
    """Residual blocks in each of the four stages. Raises UsageError HC502 where no such network exists."""
    if depth in _PUBLISHED_BLOCKS:
        return _PUBLISHED_BLOCKS[depth]
    layers_per_block = 3 if depth >= _BOTTLENECK_DEPTH else 2
    blocks, rest = divmod(depth - 2, layers_per_block)
    require(
        rest == 0 and blocks >= 4,
        f"no ResNet has depth {depth}",
        "take 2n+2 below 50 and 3n+2 from there on, with at least one block in each of four stages",
    )
    if blocks >= _EXTRA_DEEP_BLOCKS:
        # As SuperNeurons (Wang et al., PPoPP 2018) grows them: the third stage alone.
        return (6, 32, blocks - 44, 6)
    quarter, extra = divmod(blocks, 4)
    return (quarter, quarter, quarter + extra, quarter)


def _bottleneck(g: GraphBuilder, x: Value, width: int, stride: int, scale: float) -> Value:
    y = g.relu(g.batch_norm(g.conv(x, width, 1, bias=False)))
    y = g.relu(g.batch_norm(g.conv(y, width, 3, stride=stride, padding=1, bias=False)))
    y = g.batch_norm(g.conv(y, 4 * width, 1, bias=False), scale)
    return g.relu(g.add(y, _shortcut(g, x, 4 * width, stride)))


def _basic(g: GraphBuilder, x: Value, width: int, stride: int, scale: float) -> Value:
    y = g.relu(g.batch_norm(g.conv(x, width, 3, stride=stride, padding=1, bias=False)))
    y = g.batch_norm(g.conv(y, width, 3, padding=1, bias=False), scale)
    return g.relu(g.add(y, _shortcut(g, x, width, stride)))


def _shortcut(g: GraphBuilder, x: Value, channels: int, stride: int) -> Value:
    """The identity, or a projection where the shape changes."""
    if stride == 1 and x.size(1) == channels:
        return x
    return g.batch_norm(g.conv(x, channels, 1, stride=stride, bias=False, gain=LINEAR_GAIN))
