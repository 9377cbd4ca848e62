"""Transforms of signals, as products with constant matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from hybridc.frontend.expand.builder import (
    Builder,
    Expansion,
    Unsupported,
    constant_of,
    dtype_of,
    given,
    operand,
    shape_of,
)

MAX_LENGTH = 4096
"""Of a transform: its matrices have the square of as many elements."""


def _dft(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """[..., n, ..., 1 or 2] to [..., m, ..., 2], or to 1 where an inverse is onesided."""
    x = operand(node, 0)
    shape = shape_of(x)
    rank = len(shape)
    if build.opset < 20:
        axis = node.attributes.get_int("axis", 1)
    else:
        axis = -2 if given(node, 2) is None else int(constant_of(operand(node, 2), "an axis").reshape(()))
    axis %= rank
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    length = 2 * (shape[axis] - 1) if inverse and onesided else shape[axis]
    if given(node, 1) is not None:
        length = int(constant_of(operand(node, 1), "a length").reshape(()))
    if length > MAX_LENGTH:
        raise Unsupported(f"of more than {MAX_LENGTH} elements is not supported")
    parts = [build.squeeze(part, [rank - 1]) for part in build.split(x, rank - 1, [1] * shape[-1])]
    # the rest is cut off, or counts as zeros
    used = min(length // 2 + 1 if inverse and onesided else length, shape[axis])
    parts = [_last(build.slice(part, axis, 0, used), axis, rank - 1, build) for part in parts]
    to = _Transform(dtype_of(x), used, length, inverse)
    results = _real(parts, to, build) if inverse and onesided else _complex(parts, to, onesided, build)
    moved = [build.unsqueeze(_last(part, axis, rank - 1, build, back=True), [rank - 1]) for part in results]
    return [build.op("Concat", *moved, axis=rank - 1)]


@dataclass(frozen=True, slots=True)
class _Transform:
    """Of `used` elements, taken as `length` of them."""

    dtype: ir.DataType
    used: int
    length: int
    inverse: bool

    def matrices(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Real and imaginary part [used, count] of exp(-2 pi i k n / length), or of the inverse."""
        turns = np.outer(np.arange(self.used), np.arange(count)) % self.length * (2 * math.pi / self.length)
        if self.inverse:
            return np.cos(turns) / self.length, np.sin(turns) / self.length
        return np.cos(turns), -np.sin(turns)


def _complex(
    parts: Sequence[ir.Value], to: _Transform, onesided: bool, build: Builder
) -> tuple[ir.Value, ...]:
    """Real and imaginary part along the last axis, from the real part and possibly an imaginary one."""
    matrices = to.matrices(to.length // 2 + 1 if onesided else to.length)
    cosine, sine = (build.constant(matrix, to.dtype) for matrix in matrices)
    real, imaginary = build.op("MatMul", parts[0], cosine), build.op("MatMul", parts[0], sine)
    if len(parts) == 1:
        return real, imaginary
    real = build.op("Sub", real, build.op("MatMul", parts[1], sine))
    return real, build.op("Add", imaginary, build.op("MatMul", parts[1], cosine))


def _real(parts: Sequence[ir.Value], to: _Transform, build: Builder) -> tuple[ir.Value, ...]:
    """The real signal of the first half of its transform: what is left out is the conjugate of the rest."""
    twice = np.full((to.used, 1), 2.0)
    twice[0] = 1.0
    if to.length % 2 == 0 and to.used == to.length // 2 + 1:
        twice[-1] = 1.0
    cosine, sine = (build.constant(twice * matrix, to.dtype) for matrix in to.matrices(to.length))
    real = build.op("MatMul", parts[0], cosine)
    return (build.op("Sub", real, build.op("MatMul", parts[1], sine)) if len(parts) > 1 else real,)


def _last(value: ir.Value, axis: int, rank: int, build: Builder, *, back: bool = False) -> ir.Value:
    """The axis made the last one, or the last one put back."""
    order = [i for i in range(rank) if i != axis] + [axis]
    if order == list(range(rank)):
        return value
    return build.transpose(value, np.argsort(order).tolist() if back else order)


def _stft(node: ir.Node, build: Builder) -> Sequence[ir.Value]:
    """Frames [batch, frames, bins, 2] of a real signal [batch, n, 1]: a convolution by the transform."""
    signal = operand(node, 0)
    shape = shape_of(signal)
    step = int(constant_of(operand(node, 1), "a frame step").reshape(()))
    if len(shape) == 3 and shape[2] != 1:
        raise Unsupported("of a complex signal is not supported")
    window = given(node, 2)
    if given(node, 3) is not None:
        length = int(constant_of(operand(node, 3), "a frame length").reshape(()))
    elif window is not None:
        length = shape_of(window)[0]
    else:
        raise Unsupported("needs a window or a frame length")
    if length > MAX_LENGTH:
        raise Unsupported(f"of frames of more than {MAX_LENGTH} elements is not supported")
    weights = np.ones(length) if window is None else constant_of(window, "a window").astype(np.float64)
    count = length // 2 + 1 if node.attributes.get_int("onesided", 1) else length
    turns = np.outer(np.arange(count), np.arange(length)) % length * (2 * math.pi / length)
    rows = np.stack([np.cos(turns), -np.sin(turns)], axis=1) * weights  # [bins, 2, length]
    kernel = build.constant(rows.reshape(2 * count, 1, length), dtype_of(signal))
    samples = build.reshape(signal, [shape[0], 1, shape[1]])
    bins = build.op("Conv", samples, kernel, strides=[step])
    result = [shape[0], (shape[1] - length) // step + 1, count, 2]
    node.outputs[0].shape = ir.Shape(result)  # ONNX infers both sides, where one is the default
    return [build.reshape(build.transpose(bins, [0, 2, 1]), result)]


STANDARD: dict[str, Expansion] = {"DFT": _dft, "STFT": _stft}
