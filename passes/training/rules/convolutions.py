"""Gradients of convolutions: data's is the transposed convolution with the same weight, and the reverse."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from hybridc.passes.program.program import tensor_dtype, tensor_shape
from hybridc.passes.training.gradients import Gradient, Reverse, gradient
from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient

nn = relax.op.nn
_FORWARD: tuple[Callable[..., relax.Call], ...] = (nn.conv1d, nn.conv2d, nn.conv3d)
_TRANSPOSED: tuple[Callable[..., relax.Call], ...] = (
    nn.conv1d_transpose,
    nn.conv2d_transpose,
    nn.conv3d_transpose,
)


@gradient("nn.conv1d", "nn.conv2d", "nn.conv3d")
def _convolution(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    data, weight = call.args
    window = Window.of(call)
    dx = _data_gradient(data, weight, dy, window) if reverse.wanted(data) else None
    dw = _weight_gradient(reverse, data, dy, weight, window) if reverse.wanted(weight) else None
    return [dx, dw]


@gradient("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
def _transposed(reverse: Reverse, call: relax.Call, y: relax.Var, dy: relax.Expr) -> list[Gradient]:
    """A transposed convolution is the data gradient of a convolution whose data is y."""
    data, weight = call.args
    window = Window.of(call)
    rank = len(window.strides)
    dx = None
    if reverse.wanted(data):
        forward = _FORWARD[rank - 1](
            dy, weight, window.strides, window.padding, window.dilation, window.groups
        )
        dx = _cut(reverse, forward, tensor_shape(data))
    dw = _weight_gradient(reverse, dy, data, weight, window) if reverse.wanted(weight) else None
    return [dx, dw]


def _data_gradient(data: relax.Expr, weight: relax.Expr, dy: relax.Expr, window: Window) -> relax.Call:
    """Data that no window reached at the end of an axis is the transposed convolution's output padding."""
    extents, taps, positions = (tensor_shape(t)[2:] for t in (data, weight, dy))
    rank = len(taps)
    unread = tuple(
        extents[i]
        + window.before[i]
        + window.after[i]
        - ((positions[i] - 1) * window.strides[i] + (taps[i] - 1) * window.dilation[i] + 1)
        for i in range(rank)
    )
    return _TRANSPOSED[rank - 1](
        dy, weight, window.strides, window.padding, unread, window.dilation, window.groups
    )


def _weight_gradient(
    reverse: Reverse, data: relax.Expr, dy: relax.Expr, weight: relax.Expr, window: Window
) -> relax.Var:
    taps = tensor_shape(weight)[2:]
    return reverse.call(
        (f"conv{len(taps)}d_wgrad", window, taps),
        lambda: convolution_weight_gradient(data, dy, window, taps),
        [data, dy],
        relax.TensorType(tensor_shape(weight), tensor_dtype(weight)),
    )


def _cut(reverse: Reverse, expr: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """The beginning of each axis: where output padding is as long as a stride, one more window fits."""
    expr = reverse.emit(expr)
    if tensor_shape(expr) == shape:
        return expr
    axes = list(range(len(shape)))
    return relax.op.strided_slice(expr, axes, [0] * len(shape), list(shape))
