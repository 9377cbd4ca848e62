"""What a task of a blocked convolution reads and writes: input (in place or padded), weights, results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.plan import (
    BlockedConvPlan,
    InputSource,
    group_count,
    source_of,
    tiles_of_task,
)
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution
from hybridc.schedules.cpu.core.micro_kernel import Point, ceil_div, integer, loop, sequence, vectorized

Place = tuple[ir.Expr, ir.Expr]
"""Line and column of a pixel in a task."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the nest reads and writes besides the function's own parameters."""

    conv: BlockedConvolution
    plan: BlockedConvPlan
    source: InputSource
    weight: ir.Var
    """Packed as `[OB / joined, parts, IB, KH, KW, i, joined, o / parts]`, or as it is."""
    copy: ir.Var | None
    """Input rows of a task, padded: `[chunk, rows, columns, i]`, for plain data `[I, rows, columns]`."""
    partial: ir.Var | None
    """Sums of a task between chunks of input channels: `[groups, tiles, pixels, vectors, lanes]`."""

    @property
    def of_task(self) -> list[ir.Var]:
        """Allocated by statements: TVM would move a block's allocation into the loop over chunks."""
        return [buffer for buffer in (self.copy, self.partial) if buffer is not None]

    @property
    def chunks(self) -> int:
        """Passes of a task over chunks of input blocks."""
        return self.conv.input_blocks // self.plan.chunk


def declare_buffers(conv: BlockedConvolution, plan: BlockedConvPlan, weight: ir.Var) -> Buffers:
    """What the nest of a plan needs, which reads this `weight`."""
    factor, total = ("float32", "float32") if conv.dot is None else ("int32", conv.dot.sum_dtype)
    source, copy, partial = source_of(conv), None, None
    if source.copied:
        copy = tirx.decl_buffer(_copy_shape(conv, plan, source), factor, "rows")
    if plan.chunk < conv.input_blocks:
        shape = (plan.groups, tiles_of_task(conv, plan), plan.pixels, plan.vectors, plan.lanes)
        partial = tirx.decl_buffer(shape, total, "partial")
    return Buffers(conv, plan, source, weight, copy, partial)


def _copy_shape(conv: BlockedConvolution, plan: BlockedConvPlan, source: InputSource) -> tuple[int, ...]:
    if source.flat:
        rows, columns = plan.columns // conv.width.outputs, conv.width.outputs
    else:
        rows, columns = (
            (extent - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1
            for extent, axis in ((plan.lines, conv.height), (plan.columns, conv.width))
        )
    return (conv.input_lanes, rows, columns) if conv.plain else (plan.chunk, rows, columns, conv.input_lanes)


@dataclass(frozen=True, slots=True)
class Pass:
    """One chunk of input channels of one task: part `part` of image `n`, groups from `first_group` on."""

    buffers: Buffers
    n: ir.Expr
    part: ir.Expr
    chunk: ir.Expr
    first_group: ir.Expr

    def block(self, number: ir.Expr) -> ir.Expr:
        """Where a block of the chunk is among all: vectors of a channel group read blocks of its own."""
        conv, plan = self.buffers.conv, self.buffers.plan
        number = self.chunk * integer(plan.chunk) + number
        if conv.groups == 1:
            return number
        each = group_count(conv, plan) // conv.groups
        return tirx.floordiv(self.first_group, integer(each)) * integer(conv.input_blocks) + number

    def pixel(self, place: Place) -> Place:
        """Line and column in the output."""
        conv, plan, source = self.buffers.conv, self.buffers.plan, self.buffers.source
        y, x = place
        if not source.flat:
            return self.part * integer(plan.lines) + y, x
        return _unflatten(x if source.whole else self.part * integer(plan.columns) + x, conv.width.outputs)

    def input_at(self, place: Place, k: Point) -> tirx.BufferLoad:
        """The input that a pixel meets at `k`: block of the chunk, taps, lane."""
        conv, source, copy = self.buffers.conv, self.buffers.source, self.buffers.copy
        cb, kh, kw, lane = k
        if copy is None:
            place = self.pixel(place)
        elif source.flat:
            place = _unflatten(place[1], conv.width.outputs)
        row, column = (
            at * integer(1 if source.flat else axis.stride) + tap * integer(axis.dilation)
            for at, tap, axis in zip(place, (kh, kw), (conv.height, conv.width), strict=True)
        )
        if copy is None:
            return conv.input_at(self.n, self.block(cb), row, column, lane)[0]
        return tirx.BufferLoad(copy, [lane, row, column] if conv.plain else [cb, row, column, lane])

    def weight_at(self, group: ir.Expr, k: Point, vector: ir.Expr, lane: ir.Expr) -> tirx.BufferLoad:
        """The weight that a lane of a group's vector meets at `k`: block of the chunk, taps, input lane."""
        weight, plan, conv = self.buffers.weight, self.buffers.plan, self.buffers.conv
        block = self.chunk * integer(plan.chunk) + k[0]
        if not conv.is_constant:
            which = (self.first_group + group) * integer(plan.vectors) + vector
            row, first = _unflatten(which * integer(plan.lanes), conv.output_lanes)
            inner = k[1:] if conv.plain else (block, *k[1:])
            return tirx.BufferLoad(weight, [row, *inner, first + lane])
        number, within = self.first_group + group, vector * integer(plan.lanes) + lane
        if plan.vectors > 1 and math.prod(int(n) for n in weight.shape[-2:]) == plan.lanes:
            # packed vector by vector, which lie in streams of their own
            number, within = number * integer(plan.vectors) + vector, lane
        which = _unflatten(number, int(weight.shape[1]))
        inner = _unflatten(within, int(weight.shape[-1]))
        return tirx.BufferLoad(weight, [*which, block, *k[1:], *inner])

    def store(
        self,
        group: ir.Expr,
        place: Place,
        vector: ir.Expr,
        lane: ir.Expr,
        value: ir.Expr,
        first: int = 0,
    ) -> tirx.BufferStore:
        """Write a finished sum, of so many lanes behind the `first` one, through the epilogue."""
        conv = self.buffers.conv
        block, at = _unflatten(self._channel(group, vector, first), conv.output_lanes)
        return conv.store(self.n, block, *self.pixel(place), at + lane, value)

    def is_output(self, group: ir.Expr, vector: ir.Expr, first: int) -> ir.Expr:
        """Whether a vector has outputs from lane `first` on, where groups do not fill their last one."""
        grouping = self.buffers.conv.grouping
        assert grouping is not None
        _, number = _unflatten(self._number(group, vector), grouping.vectors)
        return number * integer(grouping.lanes) + integer(first) < integer(grouping.outputs)

    def _number(self, group: ir.Expr, vector: ir.Expr) -> ir.Expr:
        """Of a group's vector among all."""
        return (self.first_group + group) * integer(self.buffers.plan.vectors) + vector

    def _channel(self, group: ir.Expr, vector: ir.Expr, first: int) -> ir.Expr:
        grouping, lanes = self.buffers.conv.grouping, integer(self.buffers.plan.lanes)
        which = self._number(group, vector)
        if grouping is None or not grouping.is_filled:
            return which * lanes + integer(first)
        channels, number = _unflatten(which, grouping.vectors)
        return channels * integer(grouping.outputs) + number * lanes + integer(first)


def _unflatten(flat: ir.Expr, width: int) -> Place:
    return tirx.floordiv(flat, integer(width)), tirx.floormod(flat, integer(width))


Pixel = Callable[[ir.Expr, ir.Expr, ir.Expr, Place | None], tirx.Stmt]
"""Writes a pixel of a block (of plain data: a channel) at a row and column of the copy, given where it is in
the input; None is padding."""


def copy_rows(task: Pass, copy: ir.Var, pixel: Pixel | None = None, blocks: int | None = None) -> tirx.Stmt:
    """Fill the copy: rows that exist with zeros left and right of them, and zeros for those that do not.

    Of a strided 1x1 kernel's input only the pixels that it reads are copied. By default they are copied as
    they are, and all blocks that the copy has.
    """
    pixel = pixel or _copied_pixel(task, copy)
    conv, plan, flat = task.buffers.conv, task.buffers.plan, task.buffers.source.flat
    existing, rows, columns = (int(e) for e in copy.shape[:3])
    steps = (conv.height.stride, conv.width.stride) if flat else (1, 1)
    lines = rows if flat else plan.lines
    top = task.part * integer(lines * conv.height.stride) - integer(conv.height.before)
    left, right = (
        min(ceil_div(column + conv.width.before, steps[1]), columns) for column in (0, conv.width.inputs)
    )

    def piece(block: ir.Expr, row: ir.Expr, start: int, end: int, exists: bool) -> list[tirx.Stmt]:
        def at(i: ir.Expr) -> tirx.Stmt:
            column = i + integer(start)
            y = top + row * integer(steps[0])
            x = column * integer(steps[1]) - integer(conv.width.before)
            return pixel(block, row, column, (y, x) if exists else None)

        return [loop(end - start, at)] if end > start else []

    def line(block: ir.Expr, row: ir.Expr) -> tirx.Stmt:
        pieces = ((0, left, False), (left, right, True), (right, columns, False))
        whole = sequence([s for start, end, exists in pieces for s in piece(block, row, start, end, exists)])
        if not conv.height.is_padded:
            return whole
        y = top + row * integer(steps[0])
        inside = tirx.all(y >= integer(0), y < integer(conv.height.inputs))
        return tirx.IfThenElse(inside, whole, sequence(piece(block, row, 0, columns, exists=False)))

    return loop(blocks or existing, lambda block: loop(rows, lambda row: line(block, row)))


def _copied_pixel(task: Pass, copy: ir.Var) -> Pixel:
    conv = task.buffers.conv

    def pixel(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        def element(lane: ir.Expr) -> tirx.Stmt:
            value: ir.Expr = tirx.FloatImm("float32", 0.0)
            if place is not None:
                value = conv.input_at(task.n, task.block(block), *place, block if conv.plain else lane)[0]
            indices = [block, row, column] if conv.plain else [block, row, column, lane]
            return tirx.BufferStore(copy, value, indices)

        return element(integer(0)) if conv.plain else vectorized(conv.input_lanes, element)

    return pixel
