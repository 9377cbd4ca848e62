"""Gradients of sampling data at a grid's points (Jaderberg et al., Spatial Transformer Networks, 2015).

A sample is a sum of the elements around a point, each times one factor for each axis: with respect to the
data its gradient is added to these elements; with respect to the point the factors are differentiated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.passes.training.gradients import extents

CUBIC = -0.75
"""Keys' parameter, as in ONNX Runtime and PyTorch."""


@dataclass(frozen=True, slots=True)
class Tap:
    """An element along one axis, which is inside of the data, and its factor in a sample.

    `slope` is the factor's derivative with respect to the grid's coordinate.
    """

    index: tirx.Expr
    factor: tirx.Expr
    slope: tirx.Expr
    is_inside: tirx.Expr


@dataclass(frozen=True, slots=True)
class Sampling:
    """What `relax.image.grid_sample` does along each axis."""

    method: str
    padding: str
    aligns_corners: bool
    dtype: str

    def taps(self, coordinate: tirx.Expr, extent: int) -> list[Tap]:
        """Of a grid's coordinate, which is -1 and 1 at the ends of an axis of the data."""
        x, slope = self._position(coordinate, extent)
        if self.method == "nearest":
            return [self._tap(tirx.nearbyint(x).astype("int32"), self._number(1), self._number(0), extent)]
        first = tirx.floor(x).astype("int32")
        t = x - first.astype(self.dtype)
        if self.method == "bilinear":
            factors = [(self._number(1) - t, -slope), (t, slope)]
        else:
            first = first - 1
            factors = [(factor, derivative * slope) for factor, derivative in _cubic(t, self.dtype)]
        return [self._tap(first + i, *factor, extent) for i, factor in enumerate(factors)]

    def _position(self, coordinate: tirx.Expr, extent: int) -> tuple[tirx.Expr, tirx.Expr]:
        """Where a coordinate lies between the elements, and the derivative of that."""
        size = extent - 1 if self.aligns_corners else extent
        start = self._number(0.0 if self.aligns_corners else -0.5)
        x = start + (coordinate + self._number(1)) * self._number(size) / self._number(2)
        slope = self._number(size / 2)
        if self.padding == "zeros" or self.method == "bicubic":
            return x, slope
        if self.padding == "reflection" and size:
            period = self._number(2 * size)
            distance = x - start
            distance = distance - period * tirx.floor(distance / period)
            goes_back = distance > self._number(size)
            x = start + tirx.Select(goes_back, period - distance, distance)
            slope = tirx.Select(goes_back, -slope, slope)
        low, high = self._number(0), self._number(extent - 1)
        is_inside = tirx.all(x > low, x < high)
        return tirx.min(tirx.max(x, low), high), tirx.Select(is_inside, slope, self._number(0))

    def _tap(self, index: tirx.Expr, factor: tirx.Expr, slope: tirx.Expr, extent: int) -> Tap:
        is_inside = tirx.all(index >= 0, index < extent)
        if self.padding == "reflection" and self.method == "bicubic":
            index = self._reflected(index, extent)
        index = tirx.min(tirx.max(index, 0), extent - 1)
        inside = is_inside if self.padding == "zeros" else tirx.const(1, "bool")
        return Tap(index.astype("int64"), factor, slope, inside)

    def _reflected(self, index: tirx.Expr, extent: int) -> tirx.Expr:
        """About the ends of the axis: the last elements, or their outer borders, which repeats them."""
        repeats = 0 if self.aligns_corners else 1
        period = max(2 * (extent - 1 + repeats), 1)
        place = tirx.floormod(index, period)
        return tirx.min(place, period - repeats - place)

    def _number(self, value: float) -> tirx.Expr:
        return tirx.const(value, self.dtype)


def _cubic(t: tirx.Expr, dtype: str) -> list[tuple[tirx.Expr, tirx.Expr]]:
    """Factors of four neighbours of a point at `t` between the middle ones (Keys, 1981), and derivatives."""

    def number(value: float) -> tirx.Expr:
        return tirx.const(value, dtype)

    def near(d: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        factor = (number(CUBIC + 2) * d - number(CUBIC + 3)) * d * d + number(1)
        return factor, (number(3 * (CUBIC + 2)) * d - number(2 * (CUBIC + 3))) * d

    def far(d: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        factor = ((number(CUBIC) * d - number(5 * CUBIC)) * d + number(8 * CUBIC)) * d - number(4 * CUBIC)
        return factor, (number(3 * CUBIC) * d - number(10 * CUBIC)) * d + number(8 * CUBIC)

    before, after = [far(t + number(1)), near(t)], [near(number(1) - t), far(number(2) - t)]
    return [*before, *((factor, -derivative) for factor, derivative in after)]


def grid_sample_gradient(shape: Sequence[int], points: Sequence[int], sampling: Sampling) -> tirx.PrimFunc:
    """dy [N, C, points...] and grid [N, axes, points...], to the gradient of data of `shape` [N, C, axes...].

    A thread adds up all of a channel's samples: no two write one element, and the order is fixed.
    """
    batch, channels, *axes = shape
    dtype, zero = sampling.dtype, tirx.const(0, sampling.dtype)
    count, elements = math.prod(points), math.prod(axes)
    grad = te.placeholder(extents((batch, channels, count)), dtype, "dy")
    grid = te.placeholder(extents((batch, len(axes), count)), dtype, "grid")

    def build(buffers: list[tirx.Buffer]) -> tirx.Stmt:
        dy, at, out = (T.buffer_proxy(buffer) for buffer in buffers)
        with IRBuilder() as builder:
            with T.parallel(0, batch * channels) as task:
                with T.serial(0, elements) as element:
                    out[task * elements + element] = zero
                with T.serial(0, count) as point:
                    image = tirx.floordiv(task, channels)

                    def coordinate(axis: int) -> tirx.Expr:
                        return at[(image * len(axes) + axis) * count + point]

                    for taps in itertools.product(*_taps(sampling, coordinate, axes)):
                        with T.If(tirx.all(*(tap.is_inside for tap in taps))), T.Then():
                            place = task * elements + _flat([tap.index for tap in taps], axes)
                            factor = _product([tap.factor for tap in taps])
                            out[place] = out[place] + dy[task * count + point] * factor
            return builder.get()

    buffer = tirx.decl_buffer(extents(shape), dtype, "dx", layout=None)
    out = te.extern(
        [extents(shape)],
        [grad, grid],
        lambda inputs, outputs: build([*inputs, *outputs]),
        dtype=dtype,
        out_buffers=[buffer],
        name="grid_sample_gradient",
    )
    return te.create_prim_func([grad, grid, out])


def grid_gradient(shape: Sequence[int], points: Sequence[int], sampling: Sampling) -> tirx.PrimFunc:
    """Data of `shape` [N, C, axes...], grid [N, axes, points...] and dy [N, C, points...], to the grid's.

    Coordinates are listed from the last axis of the data to the first.
    """
    batch, channels, *axes = shape
    dtype, zero = sampling.dtype, tirx.const(0, sampling.dtype)
    data = te.placeholder(extents(shape), dtype, "data")
    grid = te.placeholder(extents((batch, len(axes), *points)), dtype, "grid")
    grad = te.placeholder(extents((batch, channels, *points)), dtype, "dy")
    channel = te.reduce_axis((0, tirx.IntImm("int64", channels)), "c")

    def body(n: tirx.Var, number: tirx.Var, *point: tirx.Var) -> tirx.Expr:
        taps = _taps(sampling, lambda i: grid[(n, i, *point)], axes)

        def along(axis: int) -> tirx.Expr:
            """The sample's derivative with respect to the coordinate of one axis of the data."""
            total = zero
            for chosen in itertools.product(*taps):
                factors = [tap.slope if i == axis else tap.factor for i, tap in enumerate(chosen)]
                element = data[(n, channel, *(tap.index for tap in chosen))]
                is_inside = tirx.all(*(tap.is_inside for tap in chosen))
                total = total + tirx.if_then_else(is_inside, element, zero) * _product(factors)
            return total

        value = along(len(axes) - 1)
        for i in range(1, len(axes)):
            value = tirx.if_then_else(number == i, along(len(axes) - 1 - i), value)
        return te.sum(grad[(n, channel, *point)] * value, axis=[channel])

    out = te.compute(extents((batch, len(axes), *points)), body, name="grid_gradient")
    return te.create_prim_func([data, grid, grad, out])


def _taps(sampling: Sampling, coordinate: Callable[[int], tirx.Expr], axes: Sequence[int]) -> list[list[Tap]]:
    """Of each axis of the data; `coordinate` gives a point's coordinates, which are in reverse order."""
    last = len(axes) - 1
    return [sampling.taps(coordinate(last - axis), extent) for axis, extent in enumerate(axes)]


def _flat(indices: Sequence[tirx.Expr], axes: Sequence[int]) -> tirx.Expr:
    place = indices[0]
    for index, extent in zip(indices[1:], axes[1:], strict=True):
        place = place * extent + index
    return place


def _product(factors: Sequence[tirx.Expr]) -> tirx.Expr:
    return math.prod(factors[1:], start=factors[0])
