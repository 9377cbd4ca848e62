"""Gradients of pooling regions of interest: each region adds to the elements that it was computed from.

A region is the number of its image, and x and y of two corners.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.passes.training.gradients import extents

Number = Callable[[int], tirx.Expr]
"""One of a region's five numbers."""


@dataclass(frozen=True, slots=True)
class Regions:
    """Attributes of `relax.vision.roi_align` and `roi_pool`."""

    cells: tuple[int, int]
    """Along y and x of a region."""
    scale: float
    """Elements of the data for a unit of the corners."""
    dtype: str
    samples: int = 0
    """Along each axis of a cell of `roi_align`; 0: as many as the cell has elements."""
    is_aligned: bool = False
    """A region may be smaller than one element."""

    def _number(self, value: float) -> tirx.Expr:
        return tirx.const(value, self.dtype)

    def span(self, region: Number, axis: int) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Where cells begin along an axis, 0 for y and 1 for x, their size, and the samples in each."""
        begin = region(2 - axis) * self._number(self.scale)
        size = region(4 - axis) * self._number(self.scale) - begin
        if not self.is_aligned:
            size = tirx.max(size, self._number(1))
        cell = size / self._number(self.cells[axis])
        samples = tirx.const(self.samples, "int32") if self.samples > 0 else tirx.ceil(cell).astype("int32")
        return begin, cell, samples

    def neighbours(self, x: tirx.Expr, extent: int) -> tuple[tirx.Expr, list[tuple[tirx.Expr, tirx.Expr]]]:
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


def roi_align_gradient(shape: Sequence[int], count: int, regions: Regions) -> tirx.PrimFunc:
    """Regions [R, 5] and dy [R, C, Y, X] to the gradient of data of `shape` [N, C, H, W].

    Cells are means of samples interpolated between four elements (He et al., Mask R-CNN, 2017).
    """

    def add(cell: _Cell) -> None:
        spans = [regions.span(cell.region, axis) for axis in (0, 1)]
        (_, _, rows), (_, _, columns) = spans
        count = (rows * columns).astype(regions.dtype)
        with T.serial(0, rows) as row, T.serial(0, columns) as column:
            points = [
                _sample(at, i, *span) for at, i, span in zip(cell.position, (row, column), spans, strict=True)
            ]
            around = [regions.neighbours(x, n) for x, n in zip(points, shape[2:], strict=True)]
            with T.If(tirx.all(*(counts for counts, _ in around))), T.Then():
                for (y, y_factor), (x, x_factor) in itertools.product(*(terms for _, terms in around)):
                    cell.add(y * shape[3] + x, cell.dy * y_factor * x_factor / count)

    return _scattered("roi_align_gradient", shape, count, regions, add)


def _sample(
    cell: tirx.Expr, number: tirx.Expr, begin: tirx.Expr, size: tirx.Expr, samples: tirx.Expr
) -> tirx.Expr:
    """Where a sample of a cell lies."""
    dtype = str(size.ty.dtype)
    share = (number.astype(dtype) + tirx.const(0.5, dtype)) * size / samples.astype(dtype)
    return begin + cell.astype(dtype) * size + share


def roi_pool_indices(shape: Sequence[int], count: int, regions: Regions) -> tirx.PrimFunc:
    """Data of `shape` [N, C, H, W] and regions [R, 5] to the place of each cell's first maximum.

    [R, C, Y, X] of int32, counted row by row; -1 where a cell has no elements.
    """
    data = te.placeholder(extents(shape), regions.dtype, "data")
    boxes = te.placeholder(extents((count, 5)), regions.dtype, "regions")
    axes = [te.reduce_axis((0, tirx.IntImm("int64", n)), f"r{i}") for i, n in enumerate(shape[2:])]
    lowest = tirx.min_value(regions.dtype)

    def later_wins(first: Sequence[tirx.Expr], later: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        wins = tirx.any(first[1] < 0, tirx.all(later[1] >= 0, later[0] > first[0]))
        return [tirx.Select(wins, new, old) for new, old in zip(later, first, strict=True)]

    first_maximum = te.comm_reducer(
        later_wins, lambda value, index: (lowest, tirx.const(-1, index)), name="first_maximum"
    )

    def body(r: tirx.Var, c: tirx.Var, *cell: tirx.Var) -> tirx.Expr:
        conditions = []
        for axis, (at, i) in enumerate(zip(cell, axes, strict=True)):
            first, end = regions.bounds(lambda k: boxes[r, k], at, axis, shape[2 + axis])
            conditions += [i >= first, i < end]
        is_inside = tirx.all(*conditions)
        value = data[(boxes[r, 0].astype("int64"), c, *axes)]
        place = (axes[0] * shape[3] + axes[1]).astype("int32")
        return first_maximum((value, tirx.if_then_else(is_inside, place, -1)), axis=axes)

    values, indices = te.compute(extents((count, shape[1], *regions.cells)), body, name="roi_pool_indices")
    return te.create_prim_func([data, boxes, values, indices])


def roi_pool_gradient(shape: Sequence[int], count: int, regions: Regions) -> tirx.PrimFunc:
    """Regions [R, 5], dy [R, C, Y, X] and places [R, C, Y, X] to the gradient of data of `shape`.

    A cell's maximum gets all of its gradient (Girshick, Fast R-CNN, 2015).
    """

    def add(cell: _Cell) -> None:
        place = cell.extra
        with T.If(place >= 0), T.Then():
            cell.add(place, cell.dy)

    return _scattered("roi_pool_gradient", shape, count, regions, add, extra="int32")


@dataclass(frozen=True, slots=True)
class _Cell:
    """One cell of one region and channel, and the image that it lies in."""

    region: Number
    position: tuple[tirx.Expr, tirx.Expr]
    dy: tirx.Expr
    extra: tirx.Expr
    add: Callable[[tirx.Expr, tirx.Expr], None]
    """Adds to an element of the channel, which are counted row by row."""


def _scattered(
    name: str,
    shape: Sequence[int],
    count: int,
    regions: Regions,
    add: Callable[[_Cell], None],
    extra: str | None = None,
) -> tirx.PrimFunc:
    """Regions, dy, and numbers of type `extra` for every dy, to the gradient of data of `shape`.

    A thread goes through all regions for one channel of an image: no two write one element, and the order
    is fixed.
    """
    batch, channels, height, width = shape
    rows, columns = regions.cells
    sizes = extents((count, channels, rows * columns))
    arguments = [
        te.placeholder(extents((count, 5)), regions.dtype, "regions"),
        te.placeholder(sizes, regions.dtype, "dy"),
        *([te.placeholder(sizes, extra, "extra")] if extra else []),
    ]

    def build(buffers: list[tirx.Buffer]) -> tirx.Stmt:
        boxes, dy, *numbers, out = (T.buffer_proxy(buffer) for buffer in buffers)
        with IRBuilder() as builder:
            with T.parallel(0, batch * channels) as task:
                with T.serial(0, height * width) as element:
                    out[task * height * width + element] = tirx.const(0, regions.dtype)

                def add_to(element: tirx.Expr, value: tirx.Expr) -> None:
                    place = task * height * width + element
                    out[place] = out[place] + value

                with T.serial(0, count) as region, T.serial(0, rows) as row, T.serial(0, columns) as column:
                    image, channel = tirx.floordiv(task, channels), tirx.floormod(task, channels)
                    at = ((region * channels + channel) * rows + row) * columns + column
                    with T.If(boxes[region * 5].astype("int64") == image), T.Then():
                        more = numbers[0][at] if numbers else tirx.const(0, "int32")
                        add(_Cell(lambda k: boxes[region * 5 + k], (row, column), dy[at], more, add_to))
            return builder.get()

    out = te.extern(
        [extents(shape)],
        arguments,
        lambda inputs, outputs: build([*inputs, *outputs]),
        dtype=regions.dtype,
        out_buffers=[tirx.decl_buffer(extents(shape), regions.dtype, "dx", layout=None)],
        name=name,
    )
    return te.create_prim_func([*arguments, out])
