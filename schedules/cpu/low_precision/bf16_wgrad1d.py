"""Weight gradients of convolutions along one axis in bf16: products of gradient x data for each tap.

    dw[o, c, k] += sum over pairs of positions of gradient[o, y:y+2] * data[c, (y:y+2) + k * d - before]

A task copies what a block of positions reads as packed lanes, which are pairs of neighbouring positions:
the gradient `[outputs, pairs]`, whose rows are the left factor's as they lie, and the data
`[parities, 16 channels each, pairs, 16 channels]`, which are the right factor's. A tap is a shift of the
latter; taps at an odd distance read pairs that begin at odd positions, a second copy. Tiles of 16 outputs x
16 channels are summed up for three taps, or for two of two rows of tiles, at a time; vectors hold 16 channels
of some outputs and taps, where the gradient's pairs are broadcast.

Blocks are summed up in float32 in memory. Errors are those of `bf16_conv2d.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.core.dot_products import (
    Dot,
    bf16_pair,
    bf16_pairs_of,
    bf16_pairs_of_neighbours,
    dot_of_bf16,
)
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    unrolled,
    when,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import reduction, register_tile
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.low_precision.amx import (
    ROW_BYTES,
    SIDE,
    Address,
    TileUnit,
    tile_kernel,
    tile_unit,
    with_tiles,
)
from hybridc.schedules.cpu.wgrad.conv1d_plan import direct_cost
from hybridc.schedules.cpu.wgrad.fourier_plan import read_plans
from hybridc.schedules.cpu.wgrad.read import Slide, WeightGradient, read_weight_gradient
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa

_COLUMNS = 768
"""Positions of a block at most: its copies stay in the second-level cache, and partly in the first."""
LEAST_FILLED = 1 / 8
"""Of the sums of a tile, where it does twice as many multiply-adds as vectors of floats in its time."""
_LEAST_PRODUCTS = 20
"""Multiply-adds for each packed lane of the copies that pay for making them, as in `bf16_conv1d.py`."""
_SPLITS = 16
"""Into which the blocks are cut if there are enough, unless there are more threads."""
_SUM_BYTES = 512 << 10
"""Sums of a split, on average: a part of what a core's second-level cache has."""
_VECTOR_SUMS = 24
_MOST_ROWS, _MOST_TAPS = 8, 4
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Bf16Wgrad1d:
    """How a weight gradient fills tiles or vectors, and how it is cut into blocks and tasks."""

    wgrad: WeightGradient
    isa: Isa
    threads: int

    @property
    def slide(self) -> Slide:
        return self.wgrad.height

    @property
    def taps(self) -> int:
        """Of a pair of channels."""
        return self.slide.taps

    @property
    def reach(self) -> int:
        """Positions of the data behind a block's own that taps read."""
        return (self.slide.taps - 1) * self.slide.dilation

    def shift(self, tap: ir.Expr) -> ir.Expr:
        """From a position of the gradient to that of the data which a tap meets."""
        return tap * integer(self.slide.dilation)

    def tap_indices(self, tap: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """Its places along both axes."""
        return tap, integer(0)

    @property
    def with_tiles(self) -> bool:
        """Whether AMX multiplies, or `vdpbf16ps` on vectors."""
        return self.isa.has_tiles

    @property
    def output_blocks(self) -> int:
        """Blocks of 16 outputs."""
        return ceil_div(self.wgrad.outputs, SIDE)

    @property
    def input_blocks(self) -> int:
        """Blocks of 16 channels of the data."""
        return ceil_div(self.wgrad.inputs, SIDE)

    @property
    def parts(self) -> int:
        """Of a block of outputs, which vectors take one after the other."""
        return 1 if self.with_tiles else ceil_div(min(self.wgrad.outputs, SIDE), _MOST_ROWS)

    @property
    def rows(self) -> int:
        """Outputs of a micro-kernel on vectors."""
        return ceil_div(min(self.wgrad.outputs, SIDE), self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks of outputs and taps of a micro-kernel."""
        if not self.with_tiles:
            return 1, min(_VECTOR_SUMS // self.rows, _MOST_TAPS, self.taps)
        return (2, 2) if self.output_blocks % 2 == 0 and self.taps > 1 else (1, min(3, self.taps))

    @property
    def tap_groups(self) -> int:
        """Micro-kernels that cover the taps."""
        return ceil_div(self.taps, self.shape[1])

    @property
    def parities(self) -> int:
        """Of the distances of taps: odd ones read pairs that begin at odd positions."""
        return 1 + (self.slide.dilation % _PAIR and self.slide.taps > 1)

    @property
    def columns(self) -> int:
        """Positions of a block, in whole tiles."""
        tile = SIDE * _PAIR
        return min(_COLUMNS, ceil_div(self.slide.positions, tile) * tile)

    @property
    def blocks(self) -> int:
        """Of all images."""
        return self.wgrad.batches * ceil_div(self.slide.positions, self.columns)

    @property
    def pairs(self) -> int:
        """Of positions of the data that a block reads, in groups of `COLUMNS` positions."""
        return ceil_div(self.columns + self.reach, COLUMNS) * COLUMNS // _PAIR

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of a split: blocks of outputs and channels, taps, outputs, channels."""
        taps = self.tap_groups * self.shape[1]
        return self.output_blocks, self.input_blocks, taps, SIDE, SIDE

    @property
    def splits(self) -> int:
        """Ranges of blocks, each a task with sums of its own."""
        size = 4
        for extent in self.sums_shape:
            size *= extent
        most = at_least_one_each(_SPLITS, self.threads)
        return max(min(most, self.blocks, most * _SUM_BYTES // size), 1)


@schedule_rule(family="conv2d")
def bf16_conv1d_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients of convolutions along one axis with stride one, without groups, of plain
    operands, if bf16 is asked for.

    Tiling: see the module's docstring; on vectors 8 outputs x 3 taps of 16 channels. Tasks are ranges of
    blocks, whose sums are added up at the end.
    """
    wgrad, dot = read_wgrad(request), dot_of_bf16(request.target.isa)
    if wgrad is None or dot is None:
        return None
    plan = Bf16Wgrad1d(wgrad, request.target.isa, request.threads)
    return schedule_correlation(
        request, CorrelationLoops(plan, dot, sums_of(plan)), bf16_conv1d_wgrad.__name__
    )


def sums_of(plan: Bf16Wgrad1d) -> ir.Var:
    """The buffer of the sums of all splits."""
    return tirx.decl_buffer((plan.splits, *plan.sums_shape), "float32", "sums_of_splits")


def schedule_correlation(request: Request, loops: CorrelationLoops, rule: str) -> Scheduled:
    """Emit the tasks, and behind them what adds their sums up."""
    tasks, dot = loops.tasks(), loops.dot
    stages = [with_tiles(dot, tasks) if loops.plan.with_tiles else dot.within(tasks), loops.total()]
    function = function_of(request.function, request.function.params, stages, [loops.sums])
    return finish(function, rule)


def read_wgrad(request: Request) -> WeightGradient | None:
    """None if there is no such kernel, or none is asked for."""
    if request.precision != BF16 or not request.target.isa.has_bf16:
        return None
    wgrad = read_weight_gradient(request.function)
    if wgrad is None or len(wgrad.data.shape) != 3 or wgrad.multiply_adds == 0:
        return None
    return wgrad if wgrad.groups == 1 and wgrad.height.stride == 1 else None


def floats_are_faster(request: Request, wgrad: WeightGradient) -> bool:
    """Whether fp32, by direct sums or Fourier transforms, is predicted to need less time."""
    isa, threads = request.target.isa, request.threads
    plan = Bf16Wgrad1d(wgrad, isa, threads)
    filled = wgrad.outputs * wgrad.inputs / (plan.output_blocks * plan.input_blocks * SIDE * SIDE)
    copied = plan.parities * plan.input_blocks * plan.pairs + plan.output_blocks * plan.columns // _PAIR
    if wgrad.multiply_adds < _LEAST_PRODUCTS * plan.blocks * copied * SIDE:
        return True
    if plan.with_tiles:
        return filled < LEAST_FILLED
    cost = direct_cost(wgrad, isa, threads)
    lanes = wgrad.inputs / (plan.input_blocks * SIDE)
    transformed = [p.cost for p in read_plans(request)] if request.winograd else []
    return min([cost, *transformed]) < cost / (request.bf16_speedup * lanes)


@dataclass(frozen=True, slots=True)
class PositionBlock:
    """A block of an image, which of its blocks it is, and the copies of what it reads."""

    n: ir.Expr
    number: ir.Expr
    gradient: ir.Var
    data: ir.Var


@dataclass(frozen=True, slots=True)
class CorrelationLoops:
    """The loops of a plan around copies of what a block reads."""

    plan: Bf16Wgrad1d
    dot: Dot
    sums: ir.Var

    def tasks(self) -> tirx.Stmt:
        plan, wgrad = self.plan, self.plan.wgrad
        per_image = plan.blocks // wgrad.batches
        gradient = tirx.decl_buffer((plan.output_blocks * SIDE, plan.columns // _PAIR), "int32", "gradient")
        shape = (plan.parities, plan.input_blocks, plan.pairs, SIDE)
        data = tirx.decl_buffer(shape, "int32", "data")
        unit = tile_unit(self.dot) if plan.with_tiles else None

        def task(point: Point) -> tirx.Stmt:
            (split,) = point
            first, last = (
                tirx.floordiv((split + integer(i)) * integer(plan.blocks), integer(plan.splits))
                for i in (0, 1)
            )

            def block(i: ir.Expr) -> tirx.Stmt:
                n, number = (op(first + i, integer(per_image)) for op in (tirx.floordiv, tirx.floormod))
                own = PositionBlock(n, number, gradient, data)
                return sequence(
                    [self.fill_gradient(own), self.fill_data(own), self._tiles(own, unit, split, i)]
                )

            body = loop(last - first, block)
            if unit is not None:
                whole = [unit.whole(gradient), unit.whole(data)]
                body = unit.within(sequence([*whole, body]))
            return sequence([tirx.AllocBuffer(gradient), tirx.AllocBuffer(data), body])

        body = grid((plan.splits,), task, parallel=wgrad.multiply_adds >= PARALLEL_WORK)
        if isinstance(body, tirx.For):
            return body
        return tirx.For(tirx.Var("i", "int64"), integer(0), integer(1), tirx.ForKind.SERIAL, body)

    def fill_gradient(self, block: PositionBlock) -> tirx.Stmt:
        """Zeros behind the last position; rows that no output has are copies of the last."""
        plan, source = self.plan, self.plan.wgrad.gradient
        positions, outputs = plan.slide.positions, plan.wgrad.outputs

        def row(o: ir.Expr) -> tirx.Stmt:
            channel = clamp(o, outputs, inside=outputs % SIDE == 0)

            def vector(i: ir.Expr) -> tirx.Stmt:
                x = block.number * integer(plan.columns) + i * integer(SIDE)
                floats = tirx.BufferLoad(source, [block.n, channel, tirx.Ramp(x, integer(1), SIDE)])
                words = tirx.Ramp(i * integer(SIDE // _PAIR), integer(1), SIDE // _PAIR)
                whole = tirx.BufferStore(block.gradient, bf16_pairs_of_neighbours(floats), [o, words])

                def word(k: ir.Expr) -> tirx.Stmt:
                    values = [
                        _where(
                            x + k * integer(_PAIR) + integer(j) < integer(positions),
                            source,
                            [block.n, channel, x + k * integer(_PAIR) + integer(j)],
                        )
                        for j in (0, 1)
                    ]
                    at = i * integer(SIDE // _PAIR) + k
                    return tirx.BufferStore(block.gradient, bf16_pair(*values), [o, at])

                inside = x + integer(SIDE) <= integer(positions)
                return tirx.IfThenElse(inside, whole, loop(SIDE // _PAIR, word))

            return loop(plan.columns // SIDE, vector)

        return loop(plan.output_blocks * SIDE, row)

    def fill_data(self, block: PositionBlock) -> tirx.Stmt:
        """Zeros outside of the data; channels that do not exist are copies of the last."""
        plan, source = self.plan, self.plan.wgrad.data
        inputs, length = plan.wgrad.inputs, plan.slide.inputs
        each = COLUMNS // _PAIR

        def group(point: Point) -> tirx.Stmt:
            parity, c, i = point
            start = block.number * integer(plan.columns) - integer(plan.slide.before)
            x = start + i * integer(COLUMNS) + parity

            def channel(lane: ir.Expr) -> ir.Expr:
                return clamp(c * integer(SIDE) + lane, inputs, inside=inputs % SIDE == 0)

            def piece(lane: int) -> ir.Expr:
                return tirx.BufferLoad(
                    source, [block.n, channel(integer(lane)), tirx.Ramp(x, integer(1), COLUMNS)]
                )

            def place(pair: int, lane: ir.Expr) -> list[ir.Expr]:
                return [parity, c, i * integer(each) + integer(pair), lane]

            statements, columns = transposed(piece, SIDE, "float32")
            lanes = tirx.Ramp(integer(0), integer(1), SIDE)
            for pair in range(each):
                words = bf16_pairs_of(columns[_PAIR * pair], columns[_PAIR * pair + 1])
                statements.append(tirx.BufferStore(block.data, words, place(pair, lanes)))

            def gathered(lane: ir.Expr) -> tirx.Stmt:
                stores = []
                for pair in range(each):
                    at = [x + integer(_PAIR * pair + j) for j in (0, 1)]
                    values = [
                        _where(
                            tirx.all(p >= integer(0), p < integer(length)),
                            source,
                            [block.n, channel(lane), p],
                        )
                        for p in at
                    ]
                    stores.append(tirx.BufferStore(block.data, bf16_pair(*values), place(pair, lane)))
                return sequence(stores)

            inside = tirx.all(x >= integer(0), x + integer(COLUMNS) <= integer(length))
            return tirx.IfThenElse(inside, sequence(statements), loop(SIDE, gathered))

        return grid((plan.parities, plan.input_blocks, plan.pairs // each), group)

    def _tiles(
        self, block: PositionBlock, unit: TileUnit | None, split: ir.Expr, number: ir.Expr
    ) -> tirx.Stmt:
        """All sums of the `number`-th block of a task."""
        plan = self.plan
        rows = plan.output_blocks // plan.shape[0]

        def kernel(point: Point) -> tirx.Stmt:
            row, c, group = point
            own = _Sums(self, block, split, number, row, c, group)
            return own.by_vectors() if unit is None else own.by_tiles(unit)

        return grid((rows, plan.input_blocks, plan.tap_groups), kernel)

    def total(self) -> tirx.Stmt:
        """Add the splits up and write the weights that exist."""
        plan, wgrad = self.plan, self.plan.wgrad

        def element(point: Point) -> tirx.Stmt:
            o, c, k = point
            places = [op(i, integer(SIDE)) for op in (tirx.floordiv, tirx.floormod) for i in (o, c)]
            at = [*places[:2], k, *places[2:]]
            total = tirx.BufferLoad(self.sums, [integer(0), *at])
            for s in range(1, plan.splits):
                total = total + tirx.BufferLoad(self.sums, [integer(s), *at])
            return wgrad.store(o, c, *plan.tap_indices(k), total)

        extents = (wgrad.outputs, wgrad.inputs, plan.taps)
        work = extents[0] * extents[1] * extents[2] * plan.splits
        return grid(extents, element, parallel=work >= PARALLEL_WORK)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What a block adds to the sums of some rows of 16 outputs, 16 channels, and a group of taps."""

    loops: CorrelationLoops
    block: PositionBlock
    split: ir.Expr
    number: ir.Expr
    row: ir.Expr
    c: ir.Expr
    group: ir.Expr

    def _tap(self, j: ir.Expr | int) -> ir.Expr:
        return self.group * integer(self.loops.plan.shape[1]) + (integer(j) if isinstance(j, int) else j)

    def _data(self, j: ir.Expr | int, pair: ir.Expr, lane: ir.Expr) -> tirx.BufferLoad:
        """Packed lanes of the data that a tap meets at a pair of positions; behind the last tap, its own."""
        plan = self.loops.plan
        tap = clamp(self._tap(j), plan.taps, inside=plan.taps % plan.shape[1] == 0)
        shift = plan.shift(tap)
        parity = tirx.floormod(shift, integer(_PAIR)) if plan.parities > 1 else integer(0)
        return tirx.BufferLoad(
            self.block.data, [parity, self.c, pair + tirx.floordiv(shift, integer(_PAIR)), lane]
        )

    def by_tiles(self, unit: TileUnit) -> tirx.Stmt:
        plan = self.loops.plan
        pitch = integer(4 * plan.columns // _PAIR)

        def left(k: Point, i: int) -> Address:
            o = (self.row * integer(plan.shape[0]) + integer(i)) * integer(SIDE)
            return tirx.BufferLoad(self.block.gradient, [o, k[0] * integer(SIDE)]), pitch

        def right(k: Point, j: int) -> Address:
            return self._data(j, k[0] * integer(SIDE), integer(0)), integer(ROW_BYTES)

        def write(i: int, j: int, m: ir.Expr, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
            row = self.row * integer(plan.shape[0]) + integer(i)
            return self._add(row, j, m, sum_at(tirx.Ramp(integer(0), integer(1), SIDE)))

        return tile_kernel(unit, plan.shape, (plan.columns // _PAIR // SIDE,), left, right, write)

    def by_vectors(self) -> tirx.Stmt:
        plan = self.loops.plan
        rows, taps = plan.rows, plan.shape[1]

        def part(number: ir.Expr) -> tirx.Stmt:
            tile = register_tile(rows, taps, SIDE)
            first = number * integer(rows)
            last = integer(SIDE - 1)

            def step(k: Point) -> tirx.Stmt:
                def value(m: int, j: ir.Expr, sums: ir.Expr) -> ir.Expr:
                    o = self.row * integer(SIDE) + tirx.min(first + integer(m), last)
                    left = tirx.BufferLoad(self.block.gradient, [o, k[0]])
                    right = self._data(j, k[0], tirx.Ramp(integer(0), integer(1), SIDE))
                    return self.loops.dot.multiply_add(sums, left, right)

                return tile.set_vectors(value)

            def write(m: int) -> tirx.Stmt:
                def tap(j: ir.Expr) -> tirx.Stmt:
                    whole = tile.sum_at(m, j, tirx.Ramp(integer(0), integer(1), SIDE))
                    return self._add(self.row, j, first + integer(m), whole)

                stored = unrolled(taps, tap)
                return when(first + integer(m) <= last, stored, always=plan.parts * rows <= SIDE)

            steps = reduction((plan.columns // _PAIR,), tile, step)
            return tile.within([tile.clear(), steps, *map(write, range(rows))])

        return loop(plan.parts, part)

    def _add(self, row: ir.Expr, j: ir.Expr | int, m: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """Add the sums of an output and a tap to those of the blocks before."""
        lanes = tirx.Ramp(integer(0), integer(1), SIDE)
        at = [self.split, row, self.c, self._tap(j), m, lanes]
        sums = self.loops.sums
        more = tirx.BufferStore(sums, tirx.BufferLoad(sums, at) + value, at)
        return tirx.IfThenElse(self.number > integer(0), more, tirx.BufferStore(sums, value, at))


def _where(exists: ir.Expr, source: ir.Var, at: list[ir.Expr]) -> ir.Expr:
    return tirx.if_then_else(exists, tirx.BufferLoad(source, at), tirx.FloatImm("float32", 0.0))
