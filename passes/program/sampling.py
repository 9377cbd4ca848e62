"""Sampling data at a grid's points (Jaderberg et al., Spatial Transformer Networks, 2015).

A sample is a sum of the elements around a point, each times one factor for each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax, te, tirx

from hybridc.schedules.shapes import shape_of

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


def taps_of(
    sampling: Sampling, coordinate: Callable[[int], tirx.Expr], axes: Sequence[int]
) -> list[list[Tap]]:
    """Of each axis of the data; `coordinate` gives a point's coordinates, which are in reverse order."""
    last = len(axes) - 1
    return [sampling.taps(coordinate(last - axis), extent) for axis, extent in enumerate(axes)]


def grid_sample(data: te.Tensor, grid: te.Tensor, sampling: Sampling) -> te.Tensor:
    """Samples [N, C, points...] of data [N, C, axes...] at a grid [N, axes, points...]."""
    axes = shape_of(data)[2:]
    zero = tirx.const(0, sampling.dtype)

    def body(n: tirx.Var, channel: tirx.Var, *point: tirx.Var) -> tirx.Expr:
        taps = taps_of(sampling, lambda i: grid[(n, i, *point)], axes)

        def along(chosen: tuple[Tap, ...]) -> tirx.Expr:
            """The sum over the axes behind those of which an element is chosen."""
            if len(chosen) == len(axes):
                element = data[(n, channel, *(tap.index for tap in chosen))]
                return tirx.if_then_else(tirx.all(*(tap.is_inside for tap in chosen)), element, zero)
            first, *others = (along((*chosen, tap)) * tap.factor for tap in taps[len(chosen)])
            return sum(others, start=first)

        return along(())

    return te.compute((*data.shape[:2], *grid.shape[2:]), body, name="grid_sample")


def legalize_grid_sample(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """With reflection by remainders; TVM's own lowering of anything else.

    TVM's reflects by a branch that names the position eight times, and names what comes of it three times for
    each element: a bicubic sample is an expression of 10^5 nodes, which takes a minute to compile.
    """
    attrs = call.attrs
    dtypes = {str(operand.ty.dtype) for operand in call.args}
    if str(attrs.padding_mode) != "reflection" or len(dtypes) > 1:
        return tvm.ir.Op.get("relax.image.grid_sample").get_attr("FLegalize")(bb, call)
    sampling = Sampling(str(attrs.method), "reflection", bool(attrs.align_corners), *dtypes)
    return bb.call_te(partial(grid_sample, sampling=sampling), *call.args, primfunc_name_hint="grid_sample")
