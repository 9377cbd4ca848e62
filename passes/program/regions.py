"""Regions of interest: what of an image the cells of a region cover, and means or maxima of these cells.

A region is the number of its image, and x and y of two corners.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import relax, te, tirx

from hybridc.schedules.shapes import shape_of

Number = Callable[[int], tirx.Expr]
"""One of a region's five numbers."""
Term = tuple[tirx.Expr, tirx.Expr]
"""The place of an element, and its factor."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Of a cell along an axis, at the middles of equal parts of it."""

    begin: tirx.Expr
    """Where the cell begins, in elements of the image; `size` likewise."""
    size: tirx.Expr
    number: tirx.Expr
    """A whole number, as floating point: of a huge region it fits no integer. 0 of a cell without extent."""
    first: tirx.Expr
    """Of those that may lie in the image; floating point, too."""
    visited: tirx.Expr
    """How many from there on may: at most about two for each element, whatever the region's size."""

    def position(self, i: tirx.Expr) -> tirx.Expr:
        """Where the `i`-th that is visited lies."""
        dtype = str(self.size.ty.dtype)
        middle = self.first + i.astype(dtype) + tirx.const(0.5, dtype)
        return self.begin + middle * self.size / self.number


@dataclass(frozen=True, slots=True)
class Regions:
    """Attributes of `relax.vision.roi_align` and `roi_pool`."""

    cells: tuple[int, int]
    """Along y and x of a region."""
    scale: float
    """Elements of the data for a unit of the corners."""
    dtype: str
    samples_per_cell: int = 0
    """Along each axis of a cell of `roi_align`; 0: as many as the cell has elements."""
    is_aligned: bool = False
    """A region may be smaller than one element."""

    def _number(self, value: float) -> tirx.Expr:
        return tirx.const(value, self.dtype)

    def _scaled(self, corner: tirx.Expr) -> tirx.Expr:
        return corner if self.scale == 1 else corner * self._number(self.scale)

    def samples(self, region: Number, axis: int, cell: tirx.Expr, extent: int) -> Samples:
        """Those of one cell along an axis of `extent` elements, 0 for y and 1 for x."""
        start = self._scaled(region(2 - axis))
        size = self._scaled(region(4 - axis)) - start
        if not self.is_aligned:
            size = tirx.max(size, self._number(1))
        size = size / self._number(self.cells[axis])
        begin = start + cell.astype(self.dtype) * size
        if self.samples_per_cell > 0:
            count = self.samples_per_cell
            return Samples(begin, size, self._number(count), self._number(0), tirx.const(count, "int32"))
        zero = self._number(0)
        number = tirx.max(tirx.ceil(size), zero)
        outside = tirx.floor((self._number(-1) - begin) / size * number) - self._number(2)
        first = tirx.min(tirx.max(outside, zero), number)
        # they are more than half an element apart; some more on either side make up for rounding
        visited = tirx.min(number - first, self._number(2 * extent + 8)).astype("int32")
        return Samples(begin, size, number, first, visited)

    def neighbours(self, x: tirx.Expr, extent: int) -> tuple[tirx.Expr, list[Term]]:
        """Whether a sample at `x` counts, and its neighbouring elements with their factors."""
        counts = tirx.all(x >= self._number(-1), x <= self._number(extent))
        x = tirx.min(tirx.max(x, self._number(0)), self._number(extent - 1))
        first = tirx.min(tirx.floor(x).astype("int32"), max(extent - 2, 0))
        t = x - first.astype(self.dtype)
        terms = [(first, self._number(1) - t), (first + 1, t)]
        return counts, terms[: min(extent, 2)]

    def bounds(self, region: Number, cell: tirx.Expr, axis: int, extent: int) -> tuple[tirx.Expr, tirx.Expr]:
        """The elements of a cell of `roi_pool` along an axis: the first, and one past the last."""

        def corner(number: int) -> tirx.Expr:
            return tirx.floor(region(number) * self._number(self.scale) + self._number(0.5)).astype("int32")

        begin = corner(2 - axis)
        size = tirx.max(corner(4 - axis) - begin + 1, 1).astype(self.dtype) / self._number(self.cells[axis])
        first = tirx.floor(cell.astype(self.dtype) * size).astype("int32") + begin
        end = tirx.ceil((cell + 1).astype(self.dtype) * size).astype("int32") + begin
        return tirx.min(tirx.max(first, 0), extent), tirx.min(tirx.max(end, 0), extent)


def roi_align(data: te.Tensor, boxes: te.Tensor, regions: Regions, mode: str) -> te.Tensor:
    """Data [N, C, H, W] and regions [R, 5] to the means of their cells [R, C, Y, X], or to maxima (`max`).

    A cell's samples are interpolated between four elements (He et al., Mask R-CNN, 2017); those outside of
    the image are 0. The mean of no samples is 0, where TVM's own operator leaves the result as it was. ONNX's
    maxima are those of each element times its factor, not of the samples.
    """
    height, width = shape_of(data)[2:]

    def body(r: tirx.Var, c: tirx.Var, row: tirx.Var, column: tirx.Var) -> tirx.Expr:
        rows = regions.samples(lambda k: boxes[r, k], 0, row, height)
        columns = regions.samples(lambda k: boxes[r, k], 1, column, width)
        i, j = (
            te.reduce_axis((0, tirx.max(samples.visited, 1)), name=name)  # else nothing sets the result
            for samples, name in ((rows, "i"), (columns, "j"))
        )
        u, v = (te.reduce_axis((0, min(n, 2)), name=name) for n, name in ((height, "u"), (width, "v")))
        is_inside_y, y, y_factor = _neighbour(regions, rows.position(i), height, u)
        is_inside_x, x, x_factor = _neighbour(regions, columns.position(j), width, v)
        image, count = boxes[r, 0].astype("int32"), rows.number * columns.number
        factor = y_factor * x_factor if mode == "max" else y_factor * x_factor / count
        share = data[image, c, y, x] * factor.astype(data.dtype)
        counts = tirx.all(count > tirx.const(0, regions.dtype), is_inside_y, is_inside_x)
        combine = te.max if mode == "max" else te.sum
        return combine(tirx.if_then_else(counts, share, tirx.const(0, data.dtype)), axis=[i, j, u, v])

    return te.compute((boxes.shape[0], data.shape[1], *regions.cells), body, name="roi_align")


def _neighbour(
    regions: Regions, x: tirx.Expr, extent: int, which: tirx.Expr
) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
    """Whether a sample at `x` counts, and one of its two neighbours with its factor.

    As expressions are trees, to write out both would repeat `x`: code for it would take minutes to make.
    """
    counts, [(first, _), *second] = regions.neighbours(x, extent)
    one = tirx.const(1, regions.dtype)
    if not second:
        return counts, first + which, one
    return counts, first + which, one - tirx.abs(second[0][1] - which.astype(regions.dtype))


def legalize_roi_align(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """In layout NCHW, as the frontend makes it."""
    attrs, dtype = call.attrs, str(call.args[1].ty.dtype)
    assert str(attrs.layout) == "NCHW"
    height, width = (int(n) for n in attrs.pooled_size)
    scale, samples = float(attrs.spatial_scale), int(attrs.sample_ratio)
    regions = Regions((height, width), scale, dtype, samples, bool(attrs.aligned))
    cells = partial(roi_align, regions=regions, mode=str(attrs.mode))
    return bb.call_te(cells, *call.args, primfunc_name_hint="roi_align")
