"""AtacWorks."""

from __future__ import annotations

import onnx

from hybridc.models.builder import LINEAR_GAIN, RELU_GAIN, GraphBuilder, Value, batch_dim, require

_BRANCH_GAIN = 0.5


def atacworks(
    *,
    batch: int = 1,
    length: int = 60000,
    channels: int = 15,
    kernel: int = 51,
    dilation: int = 8,
    blocks: int = 5,
    peak_blocks: int = 2,
    dynamic_batch: bool = False,
    seed: int = 0,
) -> onnx.ModelProto:
    """AtacWorks: dilated 1-D residual network (Lal et al., Nature Communications 2021).

    25 convolutions by default: `blocks` residual blocks of three that denoise a coverage track,
    then `peak_blocks` that call its peaks, each part with an input and an output projection.
    x [batch, 1, length] to track [batch, length] and the probabilities peaks [batch, length].
    """
    require(kernel % 2 == 1, f"a kernel of {kernel} cannot be centred", "take an odd one")
    g = GraphBuilder("atacworks", seed)
    x = g.input("x", (batch_dim(batch, dynamic_batch), 1, length))
    for _ in range(blocks):
        x = _residual_block(g, x, channels, kernel, dilation, bias=False)
    # A mean above zero keeps the last ReLU open, as in a trained network: coverage is not negative.
    track = g.relu(g.conv(x, 1, 1, bias=False, gain=0.25, mean=1 / channels))
    x = track
    for _ in range(peak_blocks):
        x = _residual_block(g, x, channels, kernel, dilation, bias=True)
    peaks = g.unary("Sigmoid", g.reshape(g.conv(x, 1, 1, gain=LINEAR_GAIN), length))
    return g.model(track=g.reshape(track, length), peaks=peaks)


def _residual_block(
    g: GraphBuilder, x: Value, channels: int, kernel: int, dilation: int, bias: bool
) -> Value:
    """Three dilated convolutions beside the identity, or beside a projection where the channels differ."""

    def conv(x: Value, gain: float = RELU_GAIN) -> Value:
        padding = dilation * (kernel - 1) // 2
        return g.conv(x, channels, kernel, padding=padding, dilation=dilation, bias=bias, gain=gain)

    y = g.relu(conv(x))
    y = g.relu(conv(y))
    y = conv(y, _BRANCH_GAIN)
    shortcut = x if x.size(1) == channels else g.relu(g.conv(x, channels, 1, bias=False))
    return g.relu(g.add(y, shortcut))
