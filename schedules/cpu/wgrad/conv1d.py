"""Weight gradients of convolutions along one axis as direct sums, with vectors along the axis.

Each tap of a pair of channels is a sum over all positions, which a vector of partial sums gathers:

    for y:  for m in rows:  for j in taps:  sums[m, j, :] += gradient[m, y:] * data[c, y * s + (k + j) * d :]

so that channels never leave lanes empty, and rows + taps loads serve rows * taps multiply-adds. At the end of
a block of positions, whose data and gradient stay in near caches for all channels and taps, the lanes of
sixteen sums at a time are added up by a tree of shuffles. Without a stride the roles may be exchanged, taps
reversed:

    dw[o, c, k] = sum over y of data[c, y] * gradient[o, y - k * d + before]

so that the operand of more channels gives the rows. Copies of a block deal with stride and padding. Each lane
sums a part of a block, and blocks are summed apart: for random data errors are below 5e-7 of the result's
scale, however long the signal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    PARALLEL_WORK,
    Point,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
    when,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import RegisterTile, Stream, reduction, register_tile
from hybridc.schedules.cpu.core.shuffles import sums_of_lanes
from hybridc.schedules.cpu.core.strided_copy import take_apart
from hybridc.schedules.cpu.wgrad.conv1d_plan import Conv1dWgradPlan, CorrelationOperand, plans_of
from hybridc.schedules.cpu.wgrad.read import read_weight_gradient
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

_MOST_CHOICES = 8


@schedule_rule(family="conv2d")
def conv1d_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients of convolutions along one axis of plain operands: any stride, padding,
    dilation and groups.

    Tiling (AVX-512): see the module's docstring; 20 to 24 sums, as 5 x 4 or 4 x 6, of channels x taps. Tasks
    are ranges of blocks, whose sums are added up at the end, x ranges of rows where blocks are few.
    """
    wgrad = read_weight_gradient(request.function)
    if wgrad is None or len(wgrad.data.shape) != 3 or wgrad.multiply_adds == 0:
        return None
    found = plans_of(wgrad, request.target.isa, request.threads)
    plans = sorted(found, key=lambda plan: plan.cost)[:_MOST_CHOICES]
    ranked = {plan.label: plan for plan in plans}
    return schedule_plan(request, pick(request, ranked), tuple(ranked))


def schedule_plan(request: Request, plan: Conv1dWgradPlan, choices: tuple[str, ...] = ()) -> Scheduled:
    """Emit: a task copies what a block reads, then runs through tiles, rows outside."""
    part_rows = plan.row_blocks // plan.parts * plan.rows
    rows = tirx.decl_buffer((part_rows, plan.columns), "float32", "rows")
    shape = (plan.of.shifted.channels, plan.phases, plan.columns + plan.reach)
    shifted = tirx.decl_buffer(shape, "float32", "shifted")
    sums = tirx.decl_buffer((plan.splits, *plan.sums_shape), "float32", "sums_of_splits")
    emitter = _CorrelationLoops(plan, rows, shifted, sums)
    stages = [emitter.tasks(), emitter.total()]
    function = function_of(request.function, request.function.params, stages, [rows, shifted, sums])
    return finish(function, conv1d_wgrad.__name__, (), choices)


@dataclass(frozen=True, slots=True)
class _PositionBlock:
    """Positions from `start` on of an image, and rows of a part of a group."""

    n: ir.Expr
    group: ir.Expr
    part: ir.Expr
    start: ir.Expr


@dataclass(frozen=True, slots=True)
class _CorrelationLoops:
    """The loops of a plan, around copies of what a block reads."""

    plan: Conv1dWgradPlan
    rows: ir.Var
    shifted: ir.Var
    sums: ir.Var

    def tasks(self) -> tirx.Stmt:
        plan, wgrad = self.plan, self.plan.of.wgrad
        per_image = plan.blocks // wgrad.batches

        def task(point: Point) -> tirx.Stmt:
            split, group, part = point
            first, last = (
                tirx.floordiv((split + integer(i)) * integer(plan.blocks), integer(plan.splits))
                for i in (0, 1)
            )

            def block(i: ir.Expr) -> tirx.Stmt:
                n, number = (op(first + i, integer(per_image)) for op in (tirx.floordiv, tirx.floormod))
                own = _PositionBlock(n, group, part, number * integer(plan.columns))
                return sequence([*self._fill(own), self._tiles(own, split, i)])

            return loop(last - first, block)

        tasks = (plan.splits, wgrad.groups, plan.parts)
        return grid(tasks, task, parallel=wgrad.multiply_adds >= PARALLEL_WORK)

    def _fill(self, block: _PositionBlock) -> list[tirx.Stmt]:
        """Copy both operands; outside of them are zeros. Rows that no channel has are copies of the last."""
        plan, of = self.plan, self.plan.of
        inside = of.rows.channels % plan.rows == 0

        def row(m: ir.Expr) -> ir.Expr:
            own = block.part * integer(plan.row_blocks // plan.parts * plan.rows) + m
            return block.group * integer(of.rows.channels) + clamp(own, of.rows.channels, inside=inside)

        def channel(c: ir.Expr) -> ir.Expr:
            return block.group * integer(of.shifted.channels) + c

        slide = of.slide
        start = block.start * integer(slide.stride) - integer(slide.before)
        rows = _copied(self.rows, of.rows, block.n, row, block.start, 1, plan.isa.lanes())
        shifted = _copied(self.shifted, of.shifted, block.n, channel, start, slide.stride, plan.isa.lanes())
        return [rows, shifted]

    def _tiles(self, block: _PositionBlock, split: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """All tiles of the `number`-th block of a task."""
        plan, of = self.plan, self.plan.of
        extents = (plan.row_blocks // plan.parts, of.shifted.channels, plan.tap_blocks)

        def tiles(point: Point) -> tirx.Stmt:
            return self._tile(block, split, number, point)

        return loop(extents[0], lambda r: loop(
            extents[1], lambda c: loop(extents[2], lambda t: tiles((r, c, t)))))  # fmt: skip

    def _tile(self, block: _PositionBlock, split: ir.Expr, number: ir.Expr, at: Point) -> tirx.Stmt:
        """The micro-kernel: partial sums stay in registers for all positions of the block."""
        plan, slide, (row_block, c, tap_block) = self.plan, self.plan.of.slide, at
        tile = register_tile(plan.rows, plan.taps, plan.lanes)

        def step(k: Point) -> tirx.Stmt:
            def product(m: int, j: ir.Expr, lane: ir.Expr) -> ir.Expr:
                y = k[0] * integer(plan.lanes) + lane
                tap = (tap_block * integer(plan.taps) + j) * integer(slide.dilation)
                phase, shift = (op(tap, integer(slide.stride)) for op in (tirx.floormod, tirx.floordiv))
                row = tirx.BufferLoad(self.rows, [row_block * integer(plan.rows) + integer(m), y])
                return tile.sum_at(m, j, lane) + row * tirx.BufferLoad(self.shifted, [c, phase, y + shift])

            return tile.set(product)

        accumulated = reduction((plan.vectors,), tile, step, self._next(block, at))
        own = block.part * integer(plan.row_blocks // plan.parts) + row_block
        place = [split, block.group, own, c, tap_block]
        return tile.within([tile.clear(), accumulated, self._add(tile, place, number)])

    def _add(self, tile: RegisterTile, place: Sequence[ir.Expr], number: ir.Expr) -> tirx.Stmt:
        """Add the lanes of each sum up, and the results to those of the blocks before."""
        plan, lanes = self.plan, self.plan.lanes
        run = tirx.Ramp(integer(0), integer(1), lanes)
        found = [
            tirx.BufferLoad(tile.sums[m], [integer(j), run])
            for m, j in itertools.product(range(plan.rows), range(plan.taps))
        ]
        statements: list[tirx.Stmt] = []
        for first in range(0, len(found), lanes):
            at = [*place, tirx.Ramp(integer(first), integer(1), lanes)]
            bound, total = sums_of_lanes(found[first : first + lanes], lanes)
            before = tirx.BufferLoad(self.sums, at)
            more = tirx.BufferStore(self.sums, before + total, at)
            begin = tirx.BufferStore(self.sums, total, at)
            statements += [*bound, tirx.IfThenElse(number > integer(0), more, begin)]
        return sequence(statements)

    def _next(self, block: _PositionBlock, at: Point) -> list[Stream]:
        """This tile's share of what the next block reads."""
        plan, of, (row_block, c, tap_block) = self.plan, self.plan.of, at
        lines = ceil_div(plan.columns, CACHE_LINE_FLOATS)
        number = (row_block * integer(of.shifted.channels) + c) * integer(plan.tap_blocks) + tap_block

        def stream(operand: CorrelationOperand, start: ir.Expr, length: int) -> Stream:
            share = ceil_div(operand.channels * length, plan.tiles)

            def line(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
                place = number * integer(share) + n
                channel = block.group * integer(operand.channels) + tirx.floordiv(place, integer(length))
                x = start + tirx.floormod(place, integer(length)) * integer(CACHE_LINE_FLOATS)
                return tirx.BufferLoad(operand.buffer, [block.n, channel, x])

            return Stream(0, share, line)

        following = block.start + integer(plan.columns)
        ahead = integer(plan.reach * of.slide.stride - of.slide.before)
        return [
            stream(of.rows, following, lines),
            stream(of.shifted, following * integer(of.slide.stride) + ahead, lines * of.slide.stride),
        ]

    def total(self) -> tirx.Stmt:
        """Add the splits up and write the taps that exist."""
        plan, of = self.plan, self.plan.of
        *_, tap_blocks, size = plan.sums_shape
        added = tirx.decl_buffer((size,), "float32", "added")

        def task(point: Point) -> tirx.Stmt:
            group, row_block, c = point

            def tile(t: ir.Expr) -> tirx.Stmt:
                at = [group, row_block, c, t]

                def vector(i: ir.Expr) -> tirx.Stmt:
                    def lane(j: ir.Expr) -> tirx.Stmt:
                        x = i * integer(plan.lanes) + j
                        parts = [tirx.BufferLoad(self.sums, [integer(s), *at, x]) for s in range(plan.splits)]
                        return tirx.BufferStore(added, _sum(parts), [x])

                    return vectorized(plan.lanes, lane)

                def write(m: ir.Expr, j: ir.Expr) -> tirx.Stmt:
                    row, k = row_block * integer(plan.rows) + m, t * integer(plan.taps) + j
                    value = tirx.BufferLoad(added, [m * integer(plan.taps) + j])
                    exists = tirx.all(row < integer(of.rows.channels), k < integer(of.slide.taps))
                    whole = of.rows.channels % plan.rows == 0 and of.slide.taps % plan.taps == 0
                    return when(exists, of.store(row, c, k, group, value), always=whole)

                writes = loop(plan.rows, lambda m: loop(plan.taps, lambda j: write(m, j)))
                return sequence([loop(size // plan.lanes, vector), writes])

            return tirx.SeqStmt([tirx.AllocBuffer(added), loop(tap_blocks, tile)])

        work = of.wgrad.outputs * of.wgrad.inputs * of.slide.taps * plan.splits
        return grid(plan.sums_shape[:3], task, parallel=work >= PARALLEL_WORK)


def _copied(
    copy: ir.Var,
    operand: CorrelationOperand,
    n: ir.Expr,
    channel: Callable[[ir.Expr], ir.Expr],
    start: ir.Expr,
    stride: int,
    lanes: int,
) -> tirx.Stmt:
    """Fill `[channels, phases, columns]`, or without phases, from a position on; most copies are inside."""
    columns, length = int(copy.shape[-1]), operand.length
    phases = int(copy.shape[1]) if len(copy.shape) == 3 else 1

    def store(c: ir.Expr, phase: ir.Expr, x: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(copy, value, [c, phase, x] if len(copy.shape) == 3 else [c, x])

    def read(c: ir.Expr, x: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(operand.buffer, [n, channel(c), start + x])

    def inside(c: ir.Expr) -> tirx.Stmt:
        return take_apart(stride, phases, columns, lanes, partial(read, c), partial(store, c))

    def padded(point: Point) -> tirx.Stmt:
        c, phase = point

        def element(x: ir.Expr) -> tirx.Stmt:
            at = x * integer(stride) + phase
            exists = tirx.all(start + at >= integer(0), start + at < integer(length))
            value = tirx.if_then_else(exists, read(c, at), tirx.FloatImm("float32", 0.0))
            return store(c, phase, x, value)

        return loop(columns, element)

    channels, last = int(copy.shape[0]), length - columns * stride
    return tirx.IfThenElse(
        tirx.all(start >= integer(0), start <= integer(last)),
        loop(channels, inside),
        grid((channels, phases), padded),
    )


def _sum(terms: Sequence[ir.Expr]) -> ir.Expr:
    """In pairs: fewer roundings, and shorter chains."""
    half = len(terms) // 2
    return terms[0] if half == 0 else _sum(terms[:half]) + _sum(terms[half:])
