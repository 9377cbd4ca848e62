"""The gradient of resizing: each element of the data gathers from the outputs it was interpolated into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import te, tirx

from hybridc.passes.training.gradients import extents


@dataclass(frozen=True, slots=True)
class Interpolation:
    """What resizing does along one axis, with the attributes of `relax.image.resize*`."""

    extent: int
    target: int
    method: str
    coordinates: str
    rounding: str
    cubic_alpha: float
    excludes_outside: bool

    def gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """What `gathered` gives of the outputs of one axis as sums of inputs."""
        terms = [
            (output, min(max(index, 0), self.extent - 1), weight)
            for output in range(self.target)
            for index, weight in self._terms(self._position(output))
        ]
        outputs, inputs, factors = (np.array(column) for column in zip(*terms, strict=True))
        return gathered(outputs, inputs, factors, self.extent, self.target)

    def _position(self, output: int) -> np.float32:
        """Where an output lies between the inputs, in float32 as the forward pass computes it."""
        scale = np.float32(self.extent) / np.float32(self.target)
        x = np.float32(output)
        if self.coordinates == "align_corners":
            return np.float32(self.extent - 1) / np.float32(max(self.target - 1, 1)) * x
        if self.coordinates == "asymmetric":
            return scale * x
        if self.coordinates == "tf_half_pixel_for_nn":
            return (x + np.float32(0.5)) * scale
        if self.coordinates == "pytorch_half_pixel" and self.target == 1:
            return np.float32(0)
        return (x + np.float32(0.5)) * scale - np.float32(0.5)

    def _terms(self, x: np.float32) -> list[tuple[int, float]]:
        if self.method == "nearest_neighbor":
            return [(self._nearest(x), 1.0)]
        first = math.floor(x)
        t = float(x - np.float32(first))
        if self.method == "linear":
            return [(first, 1 - t), (first + 1, t)]
        terms = list(zip(range(first - 1, first + 3), _cubic(t, self.cubic_alpha), strict=True))
        if not self.excludes_outside:
            return terms
        inside = [(i, weight) for i, weight in terms if 0 <= i < self.extent]
        total = sum(weight for _, weight in inside)
        return [(i, weight / total) for i, weight in inside]

    def _nearest(self, x: np.float32) -> int:
        half, epsilon = np.float32(0.5), np.float32(1e-5)
        rounding = self.rounding or ("round" if self.coordinates == "align_corners" else "floor")
        rounded = {
            "round": lambda: np.round(x),
            "round_prefer_floor": lambda: np.ceil(x - half),
            "round_prefer_ceil": lambda: np.floor(x + half),
            "floor": lambda: np.floor(x + epsilon),
            "ceil": lambda: np.ceil(x - epsilon),
        }
        return int(rounded[rounding]())


def _cubic(t: float, a: float) -> list[float]:
    """Weights of the four neighbours (Keys, 1981)."""
    return [
        a * (t**3 - 2 * t**2 + t),
        (a + 2) * t**3 - (3 + a) * t**2 + 1,
        -(a + 2) * t**3 + (3 + 2 * a) * t**2 - a * t,
        -a * t**3 + a * t**2,
    ]


def gathered(
    outputs: np.ndarray, inputs: np.ndarray, factors: np.ndarray, extent: int, targets: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each input the first output it is in [extent], and its weights in the R from there on [extent, R].

    `outputs` are sums of `inputs` times `factors`, of each one or several. No window ends after the last
    output.
    """
    used = factors != 0
    outputs, inputs, factors = outputs[used], inputs[used], factors[used]
    first, last = np.full(extent, targets - 1), np.zeros(extent, np.int64)
    np.minimum.at(first, inputs, outputs)
    np.maximum.at(last, inputs, outputs)
    width = max(int((last - first).max(initial=0)) + 1, 1)
    first = np.minimum(first, targets - width)
    weights = np.zeros((extent, width))
    np.add.at(weights, (inputs, outputs - first[inputs]), factors)
    return first, weights


def resize_gradient(
    shape: Sequence[int], targets: Sequence[int], widths: Sequence[int], dtype: str
) -> tirx.PrimFunc:
    """dy [..., targets...], and for each of the last axes what `gathered` gives, to dx of `shape`.

    The axes before these are those that `targets` and `widths`, which are as many, do not cover.
    """
    whole = len(shape) - len(targets)
    grad = te.placeholder(extents((*shape[:whole], *targets)), dtype, "dy")
    firsts, weights = [], []
    for axis, (extent, width) in enumerate(zip(shape[whole:], widths, strict=True)):
        firsts.append(te.placeholder(extents((extent,)), "int64", f"first{axis}"))
        weights.append(te.placeholder(extents((extent, width)), dtype, f"weights{axis}"))
    loops = [te.reduce_axis((0, tirx.IntImm("int64", w)), f"r{i}") for i, w in enumerate(widths)]

    def body(*at: tirx.Var) -> tirx.Expr:
        source = [first[i] + loop for first, i, loop in zip(firsts, at[whole:], loops, strict=True)]
        term = grad[(*at[:whole], *source)]
        for weight, i, loop in zip(weights, at[whole:], loops, strict=True):
            term = term * weight[i, loop]
        return te.sum(term, axis=loops)

    out = te.compute(extents(shape), body, name="resize_gradient")
    tables = [table for pair in zip(firsts, weights, strict=True) for table in pair]
    return te.create_prim_func([grad, *tables, out])
