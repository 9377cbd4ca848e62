"""What each family of functions means, in float64 numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray


def windows(x: Array, size: int, stride: int = 1, dilation: int = 1) -> Array:
    """[N, C, *out, *window] of an already padded [N, C, *in]."""
    rank = x.ndim - 2
    span = (size - 1) * dilation + 1
    view = sliding_window_view(x, (span,) * rank, axis=tuple(range(2, x.ndim)))
    steps = (slice(None, None, stride),) * rank + (slice(None, None, dilation),) * rank
    return view[(slice(None), slice(None), *steps)]


def pad(x: Array, padding: int, value: float = 0.0) -> Array:
    return np.pad(x, [(0, 0), (0, 0)] + [(padding, padding)] * (x.ndim - 2), constant_values=value)


def conv(
    x: Array, w: Array, *, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> Array:
    """Convolution of any rank with square windows: x [N, C, *in], w [F, C / groups, *window]."""
    rank = x.ndim - 2
    view = windows(pad(x, padding), w.shape[-1], stride, dilation)
    parts = [
        np.tensordot(xs, ws, axes=([1, *range(2 + rank, 2 + 2 * rank)], list(range(1, 2 + rank))))
        for xs, ws in zip(np.split(view, groups, 1), np.split(w, groups, 0), strict=True)
    ]
    return np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)


def conv_transpose(x: Array, w: Array, *, stride: int, padding: int) -> Array:
    """Transposed convolution: x [N, C, H, W], w [C, F, k, k]."""
    n, c, height, width = x.shape
    spread = np.zeros((n, c, (height - 1) * stride + 1, (width - 1) * stride + 1))
    spread[:, :, ::stride, ::stride] = x
    flipped = w[:, :, ::-1, ::-1].swapaxes(0, 1)
    return conv(spread, flipped, padding=w.shape[-1] - 1 - padding)


def max_pool(x: Array, size: int, stride: int, padding: int) -> Array:
    return windows(pad(x, padding, -np.inf), size, stride).max((-2, -1))


def average_pool(x: Array, size: int, stride: int, padding: int) -> Array:
    """Average over what lies inside the image."""
    inside = windows(pad(np.ones_like(x), padding), size, stride).sum((-2, -1))
    return windows(pad(x, padding), size, stride).sum((-2, -1)) / inside


def softmax(x: Array, axis: int) -> Array:
    exponential = np.exp(x - x.max(axis, keepdims=True))
    return exponential / exponential.sum(axis, keepdims=True)


def normalise(x: Array, axes: tuple[int, ...], scale: Array, shift: Array) -> Array:
    variance = x.var(axes, keepdims=True)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(variance + 1e-5) * scale + shift


def gelu(x: Array) -> Array:
    erf: Callable[[Array], Array] = np.vectorize(math.erf)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def resize_linear(x: Array, height: int, width: int) -> Array:
    """Bilinear with half-pixel centres: x [N, C, H, W]."""

    def along(x: Array, axis: int, size: int) -> Array:
        old = x.shape[axis]
        position = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
        return np.apply_along_axis(lambda line: np.interp(position, np.arange(old), line), axis, x)

    return along(along(x, 2, height), 3, width)


def scatter_rows(data: Array, indices: Array, updates: Array) -> Array:
    """`out[indices[i, j], j] = updates[i, j]`."""
    out = data.copy()
    np.put_along_axis(out, indices.astype(int), updates, 0)
    return out
