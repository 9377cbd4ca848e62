"""Convolutions along one axis as direct sums: one small matrix product for each tap, all into the same sums.

Vectors run along the output, so that channels never leave lanes empty, and results are stored as they lie;
weights are the scalars. A micro-kernel holds output channels x vectors in registers while it runs through all
input channels and taps (Georganas et al., "Harnessing deep learning via a single building block", 2020;
Chaudhary et al., "Efficient and generic 1D dilated convolution layer for deep learning", 2021):

    for c:  for k:  for m in rows:  for v in vectors:  sums[m, v, :] += weight[c, k, m] * block[c, x + k * d]

Stride, padding and dilation are dealt with by a copy of what a block of outputs reads, one phase of the
stride after the other, in which every tap is a run of contiguous vectors. It stays in the second-level cache
for all output channels. Meanwhile the input of the next block and the lines of the output are prefetched.

Errors are those of sums of C * S products one after the other in fp32: below 6e-8 of the output's scale times
the square root of their number for random data, and for any data below 6e-8 times their number, of the sum
of the products' magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.blocks import OutputBlock, block_tasks
from hybridc.schedules.cpu.conv1d.plan import Conv1dPlan, is_one_line, plans_of
from hybridc.schedules.cpu.conv2d.conv2d import FactorSource, weight_source
from hybridc.schedules.cpu.conv2d.read import read_convolution, unpadded
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    Point,
    Tile,
    ceil_div,
    function_of,
    integer,
    loop,
    sequence,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish, loads
from hybridc.schedules.cpu.core.register_tile import (
    RegisterTile,
    Stream,
    reduction,
    register_tile,
)
from hybridc.schedules.cpu.core.strided_copy import take_apart
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

_STEPS_TO_PREFETCH = 8
"""Shorter reductions end before a line could arrive."""
_MOST_CHOICES = 8


@schedule_rule(family="conv2d")
def conv1d(request: Request) -> Scheduled | None:
    """Accepts convolutions along one axis of any stride, padding, dilation and groups.

    Tiling (AVX-512): see the module's docstring; 24 sums, as 8 x 3 or 5 x 4, of output channels x vectors.
    Tasks are blocks of the output, and ranges of output channels where blocks are few.
    """
    conv = read_convolution(request.function)
    if conv is None or not is_one_line(conv) or conv.multiply_adds == 0:
        return None
    found = plans_of(conv, request.target.isa, request.threads)
    plans = sorted(found, key=lambda plan: plan.cost)[:_MOST_CHOICES]
    ranked = {plan.label: plan for plan in plans}
    return schedule_plan(request, pick(request, ranked), tuple(ranked))


def schedule_plan(request: Request, plan: Conv1dPlan, choices: tuple[str, ...] = ()) -> Scheduled:
    """Emit: a task copies what its block reads, then runs through tiles, output channels outside."""
    weight = weight_source(request, plan.conv, plan.rows)
    copy = tirx.decl_buffer(plan.copy_shape, "float32", "block")
    body = _DirectLoops(plan, weight, copy, unpadded(plan.conv)).nest()
    params, packings = list(request.function.params), []
    if weight.parameter is not None:
        position, packed, packing = weight.parameter
        params[position] = packed
        packings.append((position, packing))
    function = function_of(request.function, params, [*weight.stages, body], [*weight.buffers, copy])
    return finish(function, conv1d.__name__, packings, choices)


@dataclass(frozen=True, slots=True)
class _DirectLoops:
    """The loops of a plan."""

    plan: Conv1dPlan
    weight: FactorSource
    copy: ir.Var
    data: tuple[ir.Var, int] | None
    """The parameter that is read, and how many zeros stand before it; None if it is computed on the way."""

    def nest(self) -> tirx.Stmt:
        return block_tasks(self.plan, self._fill, self._tile)

    def _fill(self, block: OutputBlock) -> tirx.Stmt:
        """Copy what a block reads; most blocks read no padding."""
        conv, axis = self.plan.conv, self.plan.conv.width
        channels, phases, pitch = self.plan.copy_shape
        start = block.number * integer(self.plan.columns * axis.stride)

        def copied(line: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            return loop(channels, lambda c: line(c, block.g * integer(channels) + c))

        def store(c: ir.Expr, phase: ir.Expr, x: ir.Expr, value: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.copy, value, [c, phase, x])

        def padded(c: ir.Expr, channel: ir.Expr) -> tirx.Stmt:
            def element(phase: ir.Expr, x: ir.Expr) -> tirx.Stmt:
                at = start + x * integer(axis.stride) + phase
                return store(c, phase, x, conv.padded(block.n, channel, integer(0), at))

            return loop(phases, lambda phase: loop(pitch, lambda x: element(phase, x)))

        def inside(c: ir.Expr, channel: ir.Expr) -> tirx.Stmt:
            def read(x: ir.Expr) -> ir.Expr:
                return self._input(block.n, channel, start + x)

            lanes = self.plan.isa.lanes()
            return take_apart(axis.stride, phases, pitch, lanes, read, partial(store, c))

        if self.data is None:
            return copied(padded)
        data, before = self.data
        last = before + int(data.shape[-1]) - pitch * axis.stride
        is_inside = tirx.all(start >= integer(before), start <= integer(last))
        return tirx.IfThenElse(is_inside, copied(inside), copied(padded))

    def _input(self, n: ir.Expr, channel: ir.Expr, x: ir.Expr) -> tirx.BufferLoad:
        assert self.data is not None
        data, before = self.data
        line = [integer(0)] * (len(data.shape) - 3)
        return tirx.BufferLoad(data, [n, channel, *line, x - integer(before)])

    def _tile(self, block: OutputBlock, row_block: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """The micro-kernel: sums stay in registers from the first tap to the epilogue."""
        plan, axis = self.plan, self.plan.conv.width
        tile = register_tile(plan.rows, plan.vectors, plan.lanes)
        own = block.part * integer(plan.part_blocks) + row_block
        weights = block.g * integer(plan.row_blocks) + own

        def step(k: Point) -> tirx.Stmt:
            c, tap = k
            first = number * integer(plan.tile_columns) + axis.shift(tap)

            def product(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                x = first + v * integer(plan.lanes) + lane
                data = tirx.BufferLoad(self.copy, [c, axis.phase(tap), x])
                weight = self.weight.read(weights, integer(m), c, integer(0), tap)
                return tile.sum_at(m, v, lane) + weight * data

            return tile.set(product)

        steps = (plan.conv.group_inputs, axis.taps)
        streams = [*self._next_inputs(block, row_block, number), *self._outputs(block, own, number)]
        accumulated = reduction(steps, tile, step, streams)
        return tile.within([tile.clear(), accumulated, self._write(tile, block, own, number)])

    def _column(self, block: OutputBlock, number: ir.Expr) -> ir.Expr:
        return (block.number * integer(self.plan.tiles) + number) * integer(self.plan.tile_columns)

    def _output(self, block: OutputBlock, row: ir.Expr, column: ir.Expr, value: ir.Expr) -> tirx.BufferStore:
        conv = self.plan.conv
        o = block.g * integer(conv.group_outputs) + row
        return conv.contraction.store(conv.point(block.n, o, integer(0), column), value)

    def _write(self, tile: RegisterTile, block: OutputBlock, own: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        plan, outputs = self.plan, self.plan.conv.group_outputs
        shape = Tile(plan.rows, 1, plan.vectors, plan.lanes)

        def row(m: int) -> tirx.Stmt:
            channel = own * integer(plan.rows) + integer(m)

            def vector(v: ir.Expr) -> tirx.Stmt:
                return write_columns(
                    self._column(block, number), plan.conv.width.outputs, shape, v,
                    lambda column, lane: self._output(block, channel, column, tile.sum_at(m, v, lane)),
                )  # fmt: skip

            vectors = unrolled(plan.vectors, vector)
            return when(channel < integer(outputs), vectors, always=outputs % plan.rows == 0)

        return sequence([row(m) for m in range(plan.rows)])

    def _next_inputs(self, block: OutputBlock, row_block: ir.Expr, number: ir.Expr) -> list[Stream]:
        """This tile's share of what the next block reads and this one does not."""
        plan, conv = self.plan, self.plan.conv
        if self.data is None:
            return []
        ahead = plan.columns * conv.width.stride
        lines = ceil_div(ahead, CACHE_LINE_FLOATS)
        share = ceil_div(conv.group_inputs * lines, plan.part_blocks * plan.tiles)
        start = (block.number + integer(1)) * integer(ahead) + integer(conv.width.reach * conv.width.stride)

        def line(outer: Point, n: ir.Expr) -> tirx.BufferLoad:
            place = (row_block * integer(plan.tiles) + number) * integer(share) + n
            channel = block.g * integer(conv.group_inputs) + tirx.floordiv(place, integer(lines))
            column = tirx.floormod(place, integer(lines)) * integer(CACHE_LINE_FLOATS)
            return self._input(block.n, channel, start + column)

        return [Stream(0, share, line)]

    def _outputs(self, block: OutputBlock, own: ir.Expr, number: ir.Expr) -> list[Stream]:
        """The lines that this tile will write, and those of residuals that it will add."""
        plan, conv = self.plan, self.plan.conv
        if conv.group_inputs * conv.width.taps < _STEPS_TO_PREFETCH:
            return []
        lines = ceil_div(plan.tile_columns, CACHE_LINE_FLOATS)

        def touched(n: ir.Expr) -> list[tirx.BufferLoad]:
            row = own * integer(plan.rows) + tirx.floordiv(n, integer(lines))
            column = self._column(block, number) + tirx.floormod(n, integer(lines)) * integer(
                CACHE_LINE_FLOATS
            )
            store = self._output(block, row, column, tirx.FloatImm("float32", 0.0))
            shape = [int(e) for e in store.buffer.shape]
            same = [load for load in loads(store.value) if [int(e) for e in load.source.shape] == shape]
            return [tirx.BufferLoad(store.buffer, store.indices), *same]

        def stream(which: int) -> Stream:
            return Stream(0, plan.rows * lines, lambda outer, n: touched(n)[which], write=which == 0)

        return [stream(which) for which in range(len(touched(integer(0))))]
