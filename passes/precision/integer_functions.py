"""Functions that multiply 8-bit integers, with sums in int32."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from hybridc.schedules.annotation import BLOCKED_CONV2D, Pattern
from hybridc.schedules.blocked_operators import ConvWindow, extents, sum_over

UNSIGNED_SHIFT = 128
"""Added to signed activations where kernels multiply unsigned by signed numbers."""


def int8_conv2d(
    data: Sequence[int], weight: Sequence[int], window: ConvWindow, dtype: str, zero: int
) -> tirx.PrimFunc:
    """Sums, int32, of a convolution of 8-bit data and int8 weights; shapes as in
    `layout.operators.blocked_conv2d`.

    `zero` is the value of the padding around the image. 128 is added to signed data.
    """
    x, w = te.placeholder(extents(*data), dtype, "data"), te.placeholder(extents(*weight), "int8", "weight")
    padded = _padded(x, window.padding, zero)
    blocks, (kh, kw), lanes = weight[0], weight[-4:-2], weight[-1]
    rows, columns = (window.outputs(axis, data[2 + axis], k) for axis, k in enumerate((kh, kw)))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    a, b, c = sum_over(kh, "kh"), sum_over(kw, "kw"), sum_over(weight[-2], "c")

    def plain(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
        value = _unsigned(padded[n, c, y * sh + a * dh, z * sw + b * dw], dtype)
        return te.sum(value * w[ob, a, b, c, o].astype("int32"), axis=[c, a, b])

    def blocked(n: te.Var, ob: te.Var, y: te.Var, z: te.Var, o: te.Var) -> te.Expr:
        value = _unsigned(padded[n, cb, y * sh + a * dh, z * sw + b * dw, c], dtype)
        return te.sum(value * w[ob, cb, a, b, c, o].astype("int32"), axis=[cb, a, b, c])

    cb = sum_over(weight[1], "cb")
    shape = extents(data[0], blocks, rows, columns, lanes)
    out = te.compute(
        shape,
        plain if len(data) == 4 else blocked,
        name="int8_conv2d",
        attrs=window.attributes(BLOCKED_CONV2D),
    )
    return _function([x, w, out])


def int8_plain_conv2d(
    data: Sequence[int], weight: Sequence[int], window: ConvWindow, dtype: str, zero: int
) -> tirx.PrimFunc:
    """Sums, int32, of a convolution of 8-bit `[N, C, H, W]` and int8 `[O, C, KH, KW]`.

    `zero` is the value of the padding around the image.
    """
    x, w = te.placeholder(extents(*data), dtype, "data"), te.placeholder(extents(*weight), "int8", "weight")
    padded = _padded(x, window.padding, zero)
    rows, columns = (window.outputs(axis, data[2 + axis], k) for axis, k in enumerate(weight[2:]))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    c, a, b = (sum_over(extent, name) for extent, name in zip(weight[1:], ("c", "kh", "kw"), strict=True))

    def at(n: te.Var, o: te.Var, y: te.Var, z: te.Var) -> te.Expr:
        value = padded[n, c, y * sh + a * dh, z * sw + b * dw].astype("int32")
        return te.sum(value * w[o, c, a, b].astype("int32"), axis=[c, a, b])

    return _function([x, w, te.compute(extents(data[0], weight[0], rows, columns), at, name="int8_conv2d")])


def int8_matmul(left: Sequence[int], right: Sequence[int], dtype: str, added: int) -> tirx.PrimFunc:
    """Sums, int32, of a product of 8-bit `[..., K]`, to which `added`, 128 or 0, is added, and int8
    `[K, N]`."""
    x, w = te.placeholder(extents(*left), dtype, "left"), te.placeholder(extents(*right), "int8", "right")
    k = sum_over(right[0], "k")

    def at(*point: te.Var) -> te.Expr:
        value = x[(*point[:-1], k)].astype("int32")
        value = value + added if added else value
        return te.sum(value * w[k, point[-1]].astype("int32"), axis=[k])

    return _function([x, w, te.compute(extents(*left[:-1], right[1]), at, name="int8_matmul")])


def _unsigned(value: te.Expr, dtype: str) -> te.Expr:
    wide = value.astype("int32")
    return wide if dtype == "uint8" else wide + UNSIGNED_SHIFT


def _padded(x: te.Tensor, padding: tuple[int, int, int, int], zero: int) -> te.Tensor:
    if not any(padding):
        return x
    top, left, bottom, right = padding
    n, c, h, w, *lanes = (int(e) for e in x.shape)

    def at(b: te.Var, cb: te.Var, y: te.Var, z: te.Var, *lane: te.Var) -> te.Expr:
        inside = tirx.all(y >= top, y < h + top, z >= left, z < w + left)
        return tirx.if_then_else(inside, x[(b, cb, y - top, z - left, *lane)], tirx.const(zero, str(x.dtype)))

    return te.compute(extents(n, c, h + top + bottom, w + left + right, *lanes), at, name="pad")


def _function(tensors: list[te.Tensor]) -> tirx.PrimFunc:
    function = te.create_prim_func(tensors)
    return function.with_attr("op_pattern", int(Pattern.OUT_ELEMENTWISE_FUSABLE)).with_attr(
        "tirx.noalias", True
    )
