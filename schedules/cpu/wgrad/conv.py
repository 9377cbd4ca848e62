"""Weight gradients of convolutions: outer products of pixels, in registers.

For a tap and one block of channels on each side, every pixel adds the outer product of its data and its
gradient. A micro-kernel keeps these sums in registers, input channels x vectors of output channels (AVX-512:
16 x 1, for few input channels 3 x 7), while it runs through the positions of a *piece*, which all taps read
from the first-level cache; positions whose data would be padding are left out. Between pieces sums wait in
memory.

Tasks are ranges of pieces x ranges of output channels: several of the former where the weights are small.
Their sums are added up at the end, where they are also put in the order of the weights. Operands in plain
layout are first brought into blocks of channels. Of convolutions in groups, a block of outputs meets only the
blocks of data that its groups reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import RegisterTile, register_tile
from hybridc.schedules.cpu.wgrad.operands import BlockedOperand, data_operand, gradient_operand
from hybridc.schedules.cpu.wgrad.plan import ConvWgradPlan, Reach, plan_of
from hybridc.schedules.cpu.wgrad.read import WeightGradient, read_weight_gradient
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="conv2d")
def conv_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients as `passes/training` writes them, of plain or blocked operands.

    Tiling: see the module's docstring.
    """
    wgrad = read_weight_gradient(request.function)
    if wgrad is None or wgrad.multiply_adds == 0:
        return None
    isa = request.target.isa
    data, gradient = data_operand(wgrad, isa), gradient_operand(wgrad, isa)
    plan = plan_of(wgrad, data, gradient, isa, request.threads)
    reach = Reach(wgrad, data, gradient)
    shape = (plan.splits, gradient.blocks, reach.blocks, wgrad.height.taps, wgrad.width.taps)
    partial = tirx.decl_buffer((*shape, data.lanes, gradient.lanes), "float32", "partial")
    emitter = _OuterProductLoops(wgrad, plan, data, gradient, reach, partial)
    stages = [*data.stages, *gradient.stages, emitter.tasks(), emitter.total()]
    converted = [o.buffer for o in (data, gradient) if o.stages]
    function = function_of(request.function, request.function.params, stages, [*converted, partial])
    return finish(function, conv_wgrad.__name__)


@dataclass(frozen=True, slots=True)
class _OuterProductLoops:
    """Puts the micro-kernels into the loops of a plan."""

    wgrad: WeightGradient
    plan: ConvWgradPlan
    data: BlockedOperand
    gradient: BlockedOperand
    reach: Reach
    partial: ir.Var

    @property
    def bands(self) -> int:
        return ceil_div(self.wgrad.height.positions, self.plan.rows)

    def tasks(self) -> tirx.Stmt:
        plan, wgrad = self.plan, self.wgrad
        pieces = wgrad.batches // plan.images * self.bands
        groups = self.gradient.blocks // plan.vectors // plan.parts

        def task(point: Point) -> tirx.Stmt:
            split, part = point
            start, end = (
                tirx.floordiv((split + integer(i)) * integer(pieces), integer(plan.splits)) for i in (0, 1)
            )

            def piece(p: ir.Expr) -> tirx.Stmt:
                def group(g: ir.Expr) -> tirx.Stmt:
                    number = part * integer(groups) + g
                    return self._each_tap(lambda *tap: self._tile(split, start + p, p, number, tap))

                return loop(groups, group)

            return loop(end - start, piece)

        return grid((plan.splits, plan.parts), task, parallel=wgrad.multiply_adds >= PARALLEL_WORK)

    def _each_tap(self, body: Callable[[ir.Expr, ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        height, width = self.wgrad.height, self.wgrad.width
        return loop(self.reach.blocks, lambda ib: loop(
            height.taps, lambda kh: loop(width.taps, lambda kw: body(ib, kh, kw))))  # fmt: skip

    def _tile(self, split: ir.Expr, piece: ir.Expr, number: ir.Expr, group: ir.Expr, tap: Point) -> tirx.Stmt:
        """What a piece, the `number`-th of its task, adds to the sums of a tap: input block, line, column."""
        plan = self.plan
        tile = register_tile(self.data.lanes, plan.vectors, self.gradient.lanes)

        def place(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
            return [split, group * integer(plan.vectors) + v, *tap, integer(m), lane]

        restore = tile.set(lambda m, v, lane: tirx.BufferLoad(self.partial, place(m, v, lane)))
        save = tile.each(
            lambda m, v, lane: tirx.BufferStore(self.partial, tile.sum_at(m, v, lane), place(m, v, lane))
        )
        begin = tirx.IfThenElse(number > integer(0), restore, tile.clear())
        return tile.within([begin, self._positions(tile, piece, group, tap), save])

    def _positions(self, tile: RegisterTile, piece: ir.Expr, group: ir.Expr, tap: Point) -> tirx.Stmt:
        ib, kh, kw = tap
        plan, height, width = self.plan, self.wgrad.height, self.wgrad.width
        image = tirx.floordiv(piece, integer(self.bands)) * integer(plan.images)
        band = tirx.floormod(piece, integer(self.bands)) * integer(plan.rows)
        (top, bottom), (left, right) = height.positions_of(kh), width.positions_of(kw)
        block = self.reach.first(group * integer(plan.vectors)) + ib
        if self.bands > 1:
            top, bottom = tirx.max(top, band), tirx.min(bottom, band + integer(plan.rows))

        def step(n: ir.Expr, y: ir.Expr, x: ir.Expr) -> tirx.Stmt:
            def value(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                data = self.data.at(n, block, height.source(y, kh), width.source(x, kw), integer(m))
                return tile.sum_at(m, v, lane) + data * self.gradient.at(
                    n, group * integer(plan.vectors) + v, y, x, lane
                )

            return tile.set(value)

        def row(n: ir.Expr, y: ir.Expr) -> tirx.Stmt:
            if width.positions == width.taps == width.inputs == 1:
                return step(n, y, integer(0))
            return loop(tirx.max(right - left, integer(0)), lambda x: step(n, y, left + x))

        lines = tirx.max(bottom - top, integer(0))
        return loop(plan.images, lambda i: loop(lines, lambda y: row(image + i, top + y)))

    def total(self) -> tirx.Stmt:
        """Add the splits up and write the weights in their own order."""
        wgrad, lanes, rows = self.wgrad, self.gradient.lanes, self.data.lanes

        def element(ob: ir.Expr, c: ir.Expr, kh: ir.Expr, kw: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            o = ob * integer(lanes) + lane
            channel = wgrad.first_channel(o) + c - self.reach.first(ob) * integer(rows)
            ib, m = (operator(channel, integer(rows)) for operator in (tirx.floordiv, tirx.floormod))
            parts = [
                tirx.BufferLoad(self.partial, [integer(s), ob, ib, kh, kw, m, lane])
                for s in range(self.plan.splits)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return wgrad.store(o, c, kh, kw, total)

        def task(point: Point) -> tirx.Stmt:
            ob, c = point

            def tap(kh: ir.Expr, kw: ir.Expr) -> tirx.Stmt:
                if wgrad.outputs % lanes == 0 and wgrad.outputs // wgrad.groups % lanes == 0:
                    return vectorized(lanes, lambda lane: element(ob, c, kh, kw, lane))
                left = tirx.min(integer(wgrad.outputs) - ob * integer(lanes), integer(lanes))
                return loop(left, lambda lane: element(ob, c, kh, kw, lane))

            return loop(wgrad.height.taps, lambda kh: loop(wgrad.width.taps, lambda kw: tap(kh, kw)))

        work = math.prod(int(e) for e in self.partial.shape)
        return grid((self.gradient.blocks, wgrad.inputs), task, parallel=work >= PARALLEL_WORK)
