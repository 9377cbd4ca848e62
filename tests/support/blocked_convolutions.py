"""Blocked convolutions of many kinds, and what they give in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.relax import op

from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d
from tests.support.fusion import fused_behind


@dataclass(frozen=True)
class Case:
    """A convolution; `plain` data is `[N, C, H, W]`, else blocks of `i` channels."""

    inputs: int
    outputs: int
    image: tuple[int, int]
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    batches: int = 1
    i: int = 16
    o: int = 16
    plain: bool = False

    @property
    def window(self) -> ConvWindow:
        return ConvWindow(self.strides, self.padding, self.dilation)

    @property
    def data(self) -> tuple[int, ...]:
        if self.plain:
            return (self.batches, self.inputs, *self.image)
        return (self.batches, -(-self.inputs // self.i), *self.image, self.i)

    @property
    def weight(self) -> tuple[int, ...]:
        blocks = -(-self.outputs // self.o)
        if self.plain:
            return (blocks, *self.kernel, self.inputs, self.o)
        return (blocks, -(-self.inputs // self.i), *self.kernel, self.i, self.o)


THREE: dict[str, Any] = {"kernel": (3, 3), "padding": (1, 1, 1, 1)}
CASES = [
    Case(64, 64, (14, 14)),
    Case(32, 48, (5, 11), batches=2, i=8),
    Case(32, 64, (9, 13), strides=(2, 2)),
    Case(16, 16, (9, 9), padding=(1, 1, 1, 1), strides=(2, 1), o=8),
    Case(32, 64, (14, 14), **THREE),
    Case(256, 32, (7, 7), **THREE),
    Case(24, 24, (9, 17), **THREE, strides=(2, 2), i=8, o=8, batches=2),
    Case(16, 48, (10, 9), kernel=(5, 2), padding=(1, 2, 0, 3), dilation=(1, 2), i=8),
    Case(16, 32, (12, 12), kernel=(4, 4), strides=(3, 2)),
    Case(16, 16, (1, 31), kernel=(1, 5)),
    Case(16, 32, (1, 1)),
    Case(3, 32, (22, 22), kernel=(7, 7), strides=(2, 2), padding=(3, 3, 3, 3), plain=True),
    Case(3, 32, (32, 32), kernel=(8, 8), strides=(8, 8), plain=True),
    Case(1, 8, (13, 13), kernel=(5, 5), padding=(2, 2, 2, 2), plain=True, o=8),
    Case(5, 16, (6, 6), plain=True, batches=2),
]


def fused(case: Case, *, epilogue: bool = True) -> tirx.PrimFunc:
    """The convolution with bias, residual and ReLU fused behind it, as the pipeline hands it to a rule."""
    function = blocked_conv2d(case.data, case.weight, case.window)
    return fused_behind(function, op.nn.relu) if epilogue else function


def inputs_of(function: tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal([int(e) for e in p.shape]).astype("f4") for p in function.params[:-1]]


def convolved(case: Case, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The blocked result in float64, a tap at a time."""
    if case.plain:
        x, w = x.transpose(0, 2, 3, 1)[:, None], w[:, None]
    top, left, bottom, right = case.padding
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0)))
    (sh, sw), (dh, dw) = case.strides, case.dilation
    rows, columns = (case.window.outputs(a, case.image[a], case.kernel[a]) for a in (0, 1))
    total: Any = 0
    for kh in range(case.kernel[0]):
        for kw in range(case.kernel[1]):
            tap = x[:, :, kh * dh :: sh, kw * dw :: sw][:, :, :rows, :columns]
            total = total + np.einsum("ncyxi,ocip->noyxp", tap, w[:, :, kh, kw].astype("f8"), optimize=True)
    return total
