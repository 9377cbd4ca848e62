"""Operators on blocked activations, as TensorIR.

The layout pass replaces those of Relax with them; beside a GPU kernels of plain activations make use of some.

A blocked activation is `[N, C / b, H, W, b]`: `b` channels of a pixel lie side by side and fill a vector, so
that convolution, pooling and element-wise operators need no shuffles within vectors
(Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures", SC 2018).
If `b` does not divide C, the last block is padded with finite values that are never used.

Weights are blocked too, zero where a channel does not exist: packed at compile time, or in every run by
`pack_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import te, tirx

from hybridc.schedules.annotation import (
    BLOCKED_CONV2D,
    BLOCKED_DEPTHWISE,
    BLOCKED_GROUPED_CONV2D,
    ConvAnnotation,
    Pattern,
)


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """How a kernel slides over the two spatial axes."""

    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    """Top, left, bottom, right."""
    dilation: tuple[int, int]

    def outputs(self, axis: int, extent: int, taps: int) -> int:
        """Positions of a kernel of `taps` along an axis (0: rows, 1: columns) of `extent`."""
        padded = extent + self.padding[axis] + self.padding[axis + 2]
        return (padded - (taps - 1) * self.dilation[axis] - 1) // self.strides[axis] + 1

    def attributes(self, operator: str, groups: int = 1, group_outputs: int = 0) -> dict[str, object]:
        """For `te.compute`: what the schedule rule of an operator reads."""
        window = self.strides, self.padding, self.dilation
        return ConvAnnotation(operator, *window, groups, group_outputs).attributes()


def blocked_conv2d(data: Sequence[int], weight: Sequence[int], window: ConvWindow) -> tirx.PrimFunc:
    """Convolution of blocked data, `[N, IB, H, W, i]`, or of plain data, `[N, I, H, W]`, to blocked data.

    Weights are `[OB, IB, KH, KW, i, o]`, for plain data `[OB, KH, KW, I, o]`; the result is
    `[N, OB, OH, OW, o]`.
    """
    x, w = _tensor(data, "data"), _tensor(weight, "weight")
    padded = _padded(x, window.padding)
    blocks, (kh, kw), lanes = weight[0], weight[-4:-2], weight[-1]
    rows, columns = (window.outputs(a, data[2 + a], k) for a, k in enumerate((kh, kw)))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    a, b, c = (
        sum_over(kh, "kh"),
        sum_over(kw, "kw"),
        sum_over(weight[-2], "c"),
    )
    if len(data) == 4:

        def plain(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
            return te.sum(padded[n, c, y * sh + a * dh, z * sw + b * dw] * w[ob, a, b, c, o], axis=[c, a, b])

        body = plain
    else:
        cb = sum_over(weight[1], "cb")

        def blocked(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
            value = padded[n, cb, y * sh + a * dh, z * sw + b * dw, c]
            return te.sum(value * w[ob, cb, a, b, c, o], axis=[cb, a, b, c])

        body = blocked
    shape = extents(data[0], blocks, rows, columns, lanes)
    out = te.compute(shape, body, name="conv2d", attrs=window.attributes(BLOCKED_CONV2D))
    return _function([x, w, out], Pattern.OUT_ELEMENTWISE_FUSABLE)


def blocked_grouped_conv2d(
    data: Sequence[int], weight: Sequence[int], window: ConvWindow, group_outputs: int, lanes: int
) -> tirx.PrimFunc:
    """Convolution of blocked data, `[N, IB, H, W, i]`, in groups of `group_outputs` output channels.

    Weights are `[O, C, KH, KW]` for C input channels a group and O output channels, a multiple of `lanes`;
    the result is `[N, O / lanes, OH, OW, lanes]`. Groups need not fill blocks.
    """
    x, w = _tensor(data, "data"), _tensor(weight, "weight")
    padded = _padded(x, window.padding)
    outputs, inputs, kh, kw = weight
    rows, columns = (window.outputs(a, data[2 + a], k) for a, k in enumerate((kh, kw)))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    c, a, b = sum_over(inputs, "c"), sum_over(kh, "kh"), sum_over(kw, "kw")

    def at(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
        output = ob * lanes + o
        channel = output // group_outputs * inputs + c
        value = padded[n, channel // data[4], y * sh + a * dh, z * sw + b * dw, channel % data[4]]
        return te.sum(value * w[output, c, a, b], axis=[c, a, b])

    shape = extents(data[0], outputs // lanes, rows, columns, lanes)
    attributes = window.attributes(BLOCKED_GROUPED_CONV2D, -(-outputs // group_outputs), group_outputs)
    out = te.compute(shape, at, name="grouped_conv2d", attrs=attributes)
    return _function([x, w, out], Pattern.OUT_ELEMENTWISE_FUSABLE)


def blocked_depthwise(data: Sequence[int], weight: Sequence[int], window: ConvWindow) -> tirx.PrimFunc:
    """Depthwise convolution of `[N, CB, H, W, c]` with weights `[CB, KH, KW, c]`."""
    x, w = _tensor(data, "data"), _tensor(weight, "weight")
    padded = _padded(x, window.padding)
    kh, kw = weight[1:3]
    rows, columns = (window.outputs(a, data[2 + a], k) for a, k in enumerate((kh, kw)))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    a, b = sum_over(kh, "kh"), sum_over(kw, "kw")
    out = te.compute(
        extents(data[0], data[1], rows, columns, data[4]),
        lambda n, cb, y, z, c: te.sum(
            padded[n, cb, y * sh + a * dh, z * sw + b * dw, c] * w[cb, a, b, c], axis=[a, b]
        ),
        name="depthwise",
        attrs=window.attributes(BLOCKED_DEPTHWISE),
    )
    return _function([x, w, out], Pattern.OUT_ELEMENTWISE_FUSABLE)


def blocked_conv2d_wgrad(
    data: Sequence[int], gradient: Sequence[int], weight: Sequence[int], window: ConvWindow, groups: int = 1
) -> tirx.PrimFunc:
    """The gradient `[O, C / groups, KH, KW]` of the weights of a convolution of `data` whose result has
    `gradient`.

    Both are blocked, `[N, CB, H, W, c]` and `[N, OB, OH, OW, o]`; data may be plain, `[N, C, H, W]`.
    """
    x, dy = _tensor(data, "data"), _tensor(gradient, "gradient")
    padded = _padded(x, window.padding)
    n, y, z = (sum_over(e, name) for e, name in zip((data[0], *gradient[2:4]), ("n", "y", "x"), strict=True))
    (sh, sw), (dh, dw), lanes = window.strides, window.dilation, gradient[4]

    def at(o: te.Var, c: te.Var, a: te.Var, b: te.Var) -> te.Expr:
        channel = c if groups == 1 else o // (weight[0] // groups) * weight[1] + c
        block, lane = (channel, ()) if len(data) == 4 else (channel // data[4], (channel % data[4],))
        value = padded[(n, block, y * sh + a * dh, z * sw + b * dw, *lane)]
        return te.sum(dy[n, o // lanes, y, z, o % lanes] * value, axis=[n, y, z])

    attributes = window.attributes("conv2d_wgrad", groups)
    out = te.compute(extents(*weight), at, name="conv2d_wgrad", attrs=attributes)
    return _function([x, dy, out], Pattern.OUT_ELEMENTWISE_FUSABLE)


def pack_weight(
    weight: Sequence[int], lanes: int, input_lanes: int | None, *, depthwise: bool = False
) -> tirx.PrimFunc:
    """Weights `[O, I, KH, KW]` to `[OB, IB, KH, KW, i, o]`, zero where there is no channel.

    For plain data, whose `input_lanes` is None, to `[OB, KH, KW, I, o]`; depthwise ones to `[OB, KH, KW, o]`.
    """
    w = _tensor(weight, "weight")
    outputs, inputs, *taps = weight
    blocks = -(-outputs // lanes)

    def at(ob: te.Var, *rest: te.Var) -> te.Expr:
        o, c = ob * lanes + rest[-1], tirx.const(0, "int64")
        a, b = rest[:2] if depthwise or input_lanes is None else rest[1:3]
        if not depthwise:
            c = rest[-2] if input_lanes is None else rest[0] * input_lanes + rest[-2]
        bounds = [(o, outputs, lanes), (c, inputs, input_lanes or 1)]
        exists = [i < extent for i, extent, block in bounds if extent % block]
        value = w[o, c, a, b]
        return tirx.if_then_else(tirx.all(*exists), value, tirx.const(0, w.dtype)) if exists else value

    if depthwise:
        shape = extents(blocks, *taps, lanes)
    elif input_lanes is None:
        shape = extents(blocks, *taps, inputs, lanes)
    else:
        shape = extents(blocks, -(-inputs // input_lanes), *taps, input_lanes, lanes)
    return _function([w, te.compute(shape, at, name="pack_weight")], Pattern.INJECTIVE)


def to_blocked(plain: Sequence[int], lanes: int, dtype: str = "float32") -> tirx.PrimFunc:
    """`[N, C, H, W]` to `[N, ceil(C / lanes), H, W, lanes]`, zero where there is no channel."""
    x = _tensor(plain, "data", dtype)
    n, channels, h, w = plain

    def at(b: te.Var, cb: te.Var, y: te.Var, z: te.Var, c: te.Var) -> te.Expr:
        channel = cb * lanes + c
        if channels % lanes == 0:
            return x[b, channel, y, z]
        return tirx.if_then_else(channel < channels, x[b, channel, y, z], tirx.const(0, dtype))

    out = te.compute(extents(n, -(-channels // lanes), h, w, lanes), at, name="to_blocked")
    return _function([x, out], Pattern.INJECTIVE)


def to_plain(blocked: Sequence[int], channels: int, dtype: str = "float32") -> tirx.PrimFunc:
    """`[N, CB, H, W, c]` to `[N, channels, H, W]`."""
    x = _tensor(blocked, "data", dtype)
    n, _, h, w, lanes = blocked
    out = te.compute(
        extents(n, channels, h, w), lambda b, c, y, z: x[b, c // lanes, y, z, c % lanes], name="to_plain"
    )
    return _function([x, out], Pattern.INJECTIVE)


@dataclass(frozen=True, slots=True)
class DepthToSpace:
    """Moves groups of `block * block` channels into squares of pixels, and keeps a rectangle of the image."""

    channels: int
    """Of the result."""
    block: int
    depth_first: bool
    """Input channel `(py * block + px) * channels + c` goes to pixel (py, px) of the square of output channel
    c (ONNX's mode DCR); else `(c * block + py) * block + px` does (CRD)."""
    first: tuple[int, int]
    """Row and column of the first pixel kept, of the image `[H * block, W * block]`."""
    size: tuple[int, int]
    """Rows and columns kept."""


def blocked_depth_to_space(data: Sequence[int], lanes: int, moved: DepthToSpace) -> tirx.PrimFunc:
    """Depth to space: `[N, CB, H, W, i]` to `[N, ceil(channels / lanes), *size, lanes]`."""
    x = _tensor(data, "data")
    n, _, _, _, width = data
    channels, block = moved.channels, moved.block

    def at(b: te.Var, cb: te.Var, y: te.Var, z: te.Var, lane: te.Var) -> te.Expr:
        y, z = y + moved.first[0], z + moved.first[1]
        c, py, px = cb * lanes + lane, y % block, z % block
        channel = (py * block + px) * channels + c if moved.depth_first else (c * block + py) * block + px
        value = x[b, channel // width, y // block, z // block, channel % width]
        return (
            value if channels % lanes == 0 else tirx.if_then_else(c < channels, value, tirx.const(0, x.dtype))
        )

    shape = extents(n, -(-channels // lanes), *moved.size, lanes)
    return _function([x, te.compute(shape, at, name="depth_to_space")], Pattern.INJECTIVE)


def _tensor(shape: Sequence[int], name: str, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(extents(*shape), dtype, name=name)


def extents(*shape: int) -> list[tirx.IntImm]:
    """A shape for TE with 64-bit indices: functions are fused only with others of the same index type,
    Relax's."""
    return [tirx.IntImm("int64", int(extent)) for extent in shape]


def sum_over(extent: int, name: str) -> tirx.IterVar:
    """A reduction axis from 0 to `extent`, with 64-bit indices."""
    return te.reduce_axis((tirx.IntImm("int64", 0), tirx.IntImm("int64", int(extent))), name)


def _padded(x: te.Tensor, padding: tuple[int, int, int, int]) -> te.Tensor:
    if not any(padding):
        return x
    top, left, bottom, right = padding
    n, c, h, w, *lanes = (int(e) for e in x.shape)

    def at(b: te.Var, cb: te.Var, y: te.Var, z: te.Var, *lane: te.Var) -> te.Expr:
        inside = [y >= top, y < h + top, z >= left, z < w + left]
        return tirx.if_then_else(
            tirx.all(*inside), x[(b, cb, y - top, z - left, *lane)], tirx.const(0, x.dtype)
        )

    return te.compute(extents(n, c, h + top + bottom, w + left + right, *lanes), at, name="pad")


def _function(tensors: list[te.Tensor], pattern: Pattern) -> tirx.PrimFunc:
    function = te.create_prim_func(tensors)
    return function.with_attr("op_pattern", int(pattern)).with_attr("tirx.noalias", True)
