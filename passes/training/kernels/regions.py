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

from hybridc.passes.program.regions import Number, Regions
from hybridc.passes.training.gradients import extents


def roi_align_gradient(shape: Sequence[int], count: int, regions: Regions) -> tirx.PrimFunc:
    """Regions [R, 5] and dy [R, C, Y, X] to the gradient of data of `shape` [N, C, H, W].

    Cells are means of samples interpolated between four elements (He et al., Mask R-CNN, 2017).
    """

    def add(cell: _Cell) -> None:
        axes = (0, 1)
        samples = [regions.samples(cell.region, axis, cell.position[axis], shape[2 + axis]) for axis in axes]
        count = samples[0].number * samples[1].number
        with T.serial(0, samples[0].visited) as row, T.serial(0, samples[1].visited) as column:
            points = [s.position(i) for s, i in zip(samples, (row, column), strict=True)]
            around = [regions.neighbours(x, n) for x, n in zip(points, shape[2:], strict=True)]
            with T.If(tirx.all(*(counts for counts, _ in around))), T.Then():
                for (y, y_factor), (x, x_factor) in itertools.product(*(terms for _, terms in around)):
                    cell.add(y * shape[3] + x, cell.dy * y_factor * x_factor / count)

    return _scattered("roi_align_gradient", shape, count, regions, add)


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
