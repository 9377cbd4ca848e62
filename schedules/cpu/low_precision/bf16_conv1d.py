"""Convolutions along one axis in bf16: a product of tiles for each tap, into the same sums.

Columns of tiles run along the output, so that results are stored as they lie: B is 16 rows of packed lanes,
which are pairs of channels, by 16 places side by side, A 16 output channels by the same packed lanes. A task
copies what a block of outputs reads as packed lanes, `[phases of the stride, channels / 32, 16 lanes,
places]`, in which a tap is a shift.

Few channels would leave rows of B empty. With stride one several taps share them: row `f * pairs + p` of the
copy is pair p shifted by f dilations, so that a step does all of these taps (two for 15 channels, 16 for
two). (Chaudhary et al., "Efficient and generic 1D dilated convolution layer for deep learning", 2021, do one
tap a step.)

Errors are those of `bf16_conv2d.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.options import BF16
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import TRANSFORMS, read_source
from hybridc.schedules.cpu.conv1d.plan import direct_cost, is_one_line
from hybridc.schedules.cpu.conv1d.winograd.plan import least_cost
from hybridc.schedules.cpu.conv2d.read import Convolution, read_convolution, unpadded
from hybridc.schedules.cpu.core.dot_products import Dot, bf16_pair, bf16_pairs_of, dot_of_bf16
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.core.register_tile import reduction, register_tile
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.low_precision.amx import (
    ROW_BYTES,
    SIDE,
    Address,
    TileUnit,
    tile_kernel,
    tile_unit,
    with_tiles,
)
from hybridc.schedules.cpu.low_precision.bf16_storage import without_widening
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa

MOST_BLOCKS = 16
"""Blocks that an output is cut into if it is long enough, unless there are more threads."""


_SUMS = 24
"""Vectors of sums that leave registers for what is multiplied."""
_MOST_ROWS, _MOST_VECTORS = 8, 4
_LEAST_PRODUCTS = 20
"""Multiply-adds for each packed lane of the copy that pay for making it on vectors, as measured on Zen 4."""


@dataclass(frozen=True, slots=True)
class Lines:
    """How channels and taps of a convolution fill tiles."""

    conv: Convolution
    isa: Isa
    threads: int

    @property
    def pairs(self) -> int:
        """Of channels in the rows of a tile that belong to one tap: a power of two, at most 16."""
        pairs = ceil_div(self.conv.group_inputs, 2)
        return SIDE if self.conv.width.stride > 1 else min(1 << (pairs - 1).bit_length(), SIDE)

    @property
    def folded(self) -> int:
        """Taps of a step."""
        return SIDE // self.pairs

    @property
    def steps(self) -> int:
        """Of the reduction over taps."""
        return ceil_div(self.conv.width.taps, self.folded)

    @property
    def depth(self) -> int:
        """Tiles of pairs of channels."""
        return ceil_div(self.conv.group_inputs, 2 * self.pairs)

    @property
    def with_tiles(self) -> bool:
        """Whether AMX multiplies, or `vdpbf16ps` on vectors."""
        return self.isa.has_tiles

    @property
    def parts(self) -> int:
        """Of a tile's output channels: vectors sum up `rows` of them at a time."""
        return ceil_div(min(self.conv.group_outputs, SIDE), _MOST_ROWS)

    @property
    def rows(self) -> int:
        """Output channels of a micro-kernel on vectors."""
        return ceil_div(min(self.conv.group_outputs, SIDE), self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles of output channels and of places of a micro-kernel."""
        if not self.with_tiles:
            return (1, min(_SUMS // self.rows, _MOST_VECTORS))
        return (2, 2) if ceil_div(self.conv.group_outputs, SIDE) % 2 == 0 else (1, 3)

    @property
    def row_groups(self) -> int:
        """Micro-kernels, or all parts of one, that cover the output channels."""
        return ceil_div(self.conv.group_outputs, SIDE * self.shape[0])

    @property
    def reach(self) -> int:
        """Places behind an output's own that its steps read, those of taps that do not exist too."""
        width = self.conv.width
        return (self.steps * self.folded - 1) * width.dilation // width.stride

    @property
    def columns(self) -> int:
        """Of a block: as many as keep its copy in the second-level cache."""
        tile, outputs = self.shape[1] * SIDE, self.conv.width.outputs
        # the other half of the second-level cache is for weights and what is prefetched
        places = self.isa.l2_bytes // 2 // (ROW_BYTES * self.depth * self.conv.width.phases)
        blocks = at_least_one_each(MOST_BLOCKS, self.threads)
        most = min(places - self.reach, ceil_div(outputs, blocks))
        return max(ceil_div(most, tile), 1) * tile

    @property
    def blocks(self) -> int:
        """Of an image's output."""
        return ceil_div(self.conv.width.outputs, self.columns)

    @property
    def copy_shape(self) -> tuple[int, int, int, int]:
        """Of what a block reads: phases of the stride, tiles of channels, their rows, places."""
        pitch = ceil_div(self.columns + self.reach, SIDE) * SIDE
        return self.conv.width.phases, self.depth, SIDE, pitch


@schedule_rule(family="conv2d")
def bf16_conv1d(request: Request) -> Scheduled | None:
    """Accepts convolutions along one axis of any stride, dilation and padding, without groups, if bf16
    is asked for.

    Tiling: 2 x 2 tiles of output channels x places, or 1 x 3; 8 channels x 3 vectors, or fewer channels x
    4. Tasks are blocks of the output.
    """
    conv, dot = read_bf16_line(request), dot_of_bf16(request.target.isa)
    if conv is None or dot is None:
        return None
    lines = Lines(conv, request.target.isa, request.threads)
    position = conv.contraction.nest.parameter(conv.weight.source)
    assert position is not None
    weight = packed_weight(request, position, line_packing(lines), "packed_weight")
    tasks = _tasks(lines, dot, weight.buffer)
    body = with_tiles(dot, tasks) if lines.with_tiles else dot.within(tasks)
    function = function_of(request.function, weight.params, [*weight.stages, body], weight.buffers)
    return finish(function, bf16_conv1d.__name__, weight.packings)


def read_bf16_line(request: Request) -> Convolution | None:
    """None if there is no such kernel, or none is asked for."""
    if request.precision != BF16 or not request.target.isa.has_bf16:
        return None
    conv = read_convolution(request.function)
    if conv is None or not is_one_line(conv) or conv.groups > 1 or conv.multiply_adds == 0:
        return None
    given = conv.contraction.nest.parameter(conv.weight.source) is not None
    return conv if given and line_data(conv) is not None else None


def line_data(conv: Convolution) -> tuple[ir.Var, int] | None:
    """The parameter that is convolved, of floats or bf16, and how many zeros stand before each line."""
    widened = without_widening(conv.contraction.nest.function)
    of_floats = read_convolution(widened.function)
    found = None if of_floats is None else unpadded(of_floats)
    return None if found is None else (widened.kept(found[0]), found[1])


def floats_are_faster(conv: Convolution, isa: Isa, threads: int) -> bool:
    """Whether direct sums in fp32 are predicted to need less time than packed lanes on vectors."""
    lines = Lines(conv, isa, threads)
    if lines.with_tiles:
        return False
    words = conv.batches * lines.blocks * math.prod(lines.copy_shape)
    return conv.group_inputs == 1 or conv.multiply_adds < _LEAST_PRODUCTS * words


def filtering_is_faster(request: Request, conv: Convolution) -> bool:
    """Whether Winograd's algorithm in fp32 is predicted to need less time than packed lanes on vectors."""
    isa, threads = request.target.isa, request.threads
    if not request.winograd or request.many_sizes or Lines(conv, isa, threads).with_tiles:
        return False
    cost = least_cost(conv, isa, threads)
    return cost is not None and cost < direct_cost(conv, isa, threads) / request.bf16_speedup


def fourier_is_faster(request: Request, conv: Convolution) -> bool:
    """Whether Fourier transforms in fp32 are predicted to need less time than packed lanes on vectors."""
    isa, threads, source = request.target.isa, request.threads, read_source(request)
    if source is None or Lines(conv, isa, threads).with_tiles:
        return False
    plans = [source.plan(t) for t in TRANSFORMS if t.points >= conv.width.taps]
    return any(plan.cost < direct_cost(conv, isa, threads) / request.bf16_speedup for plan in plans)


def line_packing(lines: Lines) -> Packing:
    """`[O / 16 / rows, steps, depth, rows, 16, folded, pairs]` packed lanes of weights `[O, C, S]`."""
    rows, conv = lines.shape[0], lines.conv
    channels, taps = lines.depth * lines.pairs * 2, lines.steps * lines.folded
    line = () if conv.height.output is None else (1,)
    padded = (lines.row_groups * rows * SIDE, channels, *line, taps)
    split = (lines.row_groups, rows, SIDE, lines.depth, lines.pairs, 2, lines.steps, lines.folded)
    return Packing(padded, split, (0, 6, 3, 1, 2, 7, 4, 5), vnni_dtype="bfloat16")


def _tasks(lines: Lines, dot: Dot, weight: ir.Var) -> tirx.Stmt:
    conv = lines.conv

    def task(point: Point) -> tirx.Stmt:
        n, number = point
        copy = tirx.decl_buffer(lines.copy_shape, "int32", "places")
        block = _PackedBlock(lines, weight, copy, dot, n, number)
        return tirx.SeqStmt([tirx.AllocBuffer(copy), block.fill(), block.products()])

    body = grid((conv.batches, lines.blocks), task, parallel=conv.multiply_adds >= PARALLEL_WORK)
    if isinstance(body, tirx.For):
        return body
    return tirx.For(tirx.Var("i", "int64"), integer(0), integer(1), tirx.ForKind.SERIAL, body)


@dataclass(frozen=True, slots=True)
class _PackedBlock:
    """A task: a block of an image's output, in all channels."""

    lines: Lines
    weight: ir.Var
    copy: ir.Var
    dot: Dot
    n: ir.Expr
    number: ir.Expr

    def fill(self) -> tirx.Stmt:
        """Write the packed lanes; most blocks read no padding, and take 16 places at a time."""
        lines, conv = self.lines, self.lines.conv
        stride, (phases, depth, _, pitch) = conv.width.stride, lines.copy_shape
        start = self.number * integer(lines.columns * stride)

        def each_row(line: Callable[[ir.Expr, ir.Expr, int], tirx.Stmt]) -> tirx.Stmt:
            def rows(point: Sequence[ir.Expr]) -> tirx.Stmt:
                phase, block = point
                return tirx.SeqStmt([line(phase, block, row) for row in range(SIDE)])

            return grid((phases, depth), rows)

        def place(row: int, x: ir.Expr, phase: ir.Expr) -> ir.Expr:
            """In the padded input."""
            return start + (x + integer(row // lines.pairs * conv.width.dilation)) * integer(stride) + phase

        def channels(block: ir.Expr, row: int) -> list[tuple[ir.Expr, bool]]:
            """Both of a row, and whether they exist; of several tiles of pairs a clamped one stands for
            others."""
            first = block * integer(2 * lines.pairs) + integer(row % lines.pairs * 2)
            both, inputs = [first + integer(i) for i in (0, 1)], conv.group_inputs
            if depth == 1:
                return [(c, row % lines.pairs * 2 + i < inputs) for i, c in enumerate(both)]
            return [(tirx.min(c, integer(inputs - 1)), True) for c in both]

        def padded(phase: ir.Expr, block: ir.Expr, row: int) -> tirx.Stmt:
            def word(x: ir.Expr) -> tirx.Stmt:
                at = place(row, x, phase)
                values = [
                    conv.padded(self.n, c, integer(0), at) if exists else tirx.FloatImm("float32", 0.0)
                    for c, exists in channels(block, row)
                ]
                return tirx.BufferStore(self.copy, bf16_pair(*values), [phase, block, integer(row), x])

            return loop(pitch, word)

        found = line_data(conv)
        assert found is not None
        data, before = found
        if stride > 1:
            return each_row(padded)

        def whole(phase: ir.Expr, block: ir.Expr, row: int) -> tirx.Stmt:
            def words(i: ir.Expr) -> tirx.Stmt:
                x = i * integer(SIDE)
                at = tirx.Ramp(place(row, x, phase) - integer(before), integer(1), SIDE)
                none = tirx.Broadcast(tirx.FloatImm("float32", 0.0), SIDE)
                line = [integer(0)] * (len(data.shape) - 3)
                values = [
                    tirx.BufferLoad(data, [self.n, c, *line, at]) if exists else none
                    for c, exists in channels(block, row)
                ]
                ramp = tirx.Ramp(x, integer(1), SIDE)
                return tirx.BufferStore(self.copy, bf16_pairs_of(*values), [phase, block, integer(row), ramp])

            return loop(pitch // SIDE, words)

        last = before + int(data.shape[-1]) - pitch - (lines.folded - 1) * conv.width.dilation
        inside = tirx.all(start >= integer(before), start <= integer(last))
        return tirx.IfThenElse(inside, each_row(whole), each_row(padded))

    def products(self) -> tirx.Stmt:
        """For each group of output channels all places of the block."""
        lines, conv = self.lines, self.lines.conv
        width, outputs = lines.shape[1] * SIDE, conv.width.outputs
        count: ir.Expr | int = lines.columns // width
        if outputs % lines.columns:
            left = integer(outputs) - self.number * integer(lines.columns)
            count = tirx.min(
                integer(lines.columns // width), tirx.floordiv(left + integer(width - 1), integer(width))
            )
        if not lines.with_tiles:
            parts = lines.parts
            return self._each(count, lambda group, i: loop(parts, lambda p: self._vectors(group, i, p)))
        unit = tile_unit(self.dot)
        body = self._each(count, lambda group, i: self._tiles(unit, group, i))
        return unit.within(tirx.SeqStmt([unit.whole(self.copy), body]))

    def _each(self, count: ir.Expr | int, kernel: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        return loop(self.lines.row_groups, lambda group: loop(count, lambda i: kernel(group, i)))

    def _place(self, i: ir.Expr, column: ir.Expr) -> ir.Expr:
        return i * integer(self.lines.shape[1] * SIDE) + column * integer(SIDE)

    def _tiles(self, unit: TileUnit, group: ir.Expr, i: ir.Expr) -> tirx.Stmt:
        lines, width = self.lines, self.lines.conv.width

        def left(k: Point, row: int) -> Address:
            at = [group, k[0], k[1], integer(row), *[integer(0)] * 3]
            return tirx.BufferLoad(self.weight, at), integer(ROW_BYTES)

        def right(k: Point, column: int) -> Address:
            tap = k[0] * integer(lines.folded)
            x = self._place(i, integer(column)) + width.shift(tap)
            at = [width.phase(tap), k[1], integer(0), x]
            return tirx.BufferLoad(self.copy, at), integer(4 * int(self.copy.shape[-1]))

        def write(row: int, column: int, m: ir.Expr, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
            return self._write(group, i, integer(row * SIDE) + m, integer(column), sum_at)

        return tile_kernel(unit, lines.shape, (lines.steps, lines.depth), left, right, write)

    def _vectors(self, group: ir.Expr, i: ir.Expr, part: ir.Expr) -> tirx.Stmt:
        lines, width, first = self.lines, self.lines.conv.width, part * integer(self.lines.rows)
        tile = register_tile(lines.rows, lines.shape[1], SIDE)

        def step(k: Point) -> tirx.Stmt:
            number, depth, fold, pair = k
            tap = number * integer(lines.folded)

            def value(m: int, v: ir.Expr, sums: ir.Expr) -> ir.Expr:
                weight = [group, number, depth, integer(0), first + integer(m), fold, pair]
                x = tirx.Ramp(self._place(i, v) + width.shift(tap), integer(1), SIDE)
                row = fold * integer(lines.pairs) + pair
                words = tirx.BufferLoad(self.copy, [width.phase(tap), depth, row, x])
                return self.dot.multiply_add(sums, tirx.BufferLoad(self.weight, weight), words)

            return tile.set_vectors(value)

        def write(m: int) -> tirx.Stmt:
            def column(v: ir.Expr) -> tirx.Stmt:
                return self._write(group, i, first + integer(m), v, lambda lane: tile.sum_at(m, v, lane))

            return unrolled(lines.shape[1], column)

        steps = reduction((lines.steps, lines.depth, lines.folded, lines.pairs), tile, step)
        return tile.within([tile.clear(), steps, *map(write, range(lines.rows))])

    def _write(
        self,
        group: ir.Expr,
        i: ir.Expr,
        row: ir.Expr,
        column: ir.Expr,
        sum_at: Callable[[ir.Expr], ir.Expr],
    ) -> tirx.Stmt:
        """Store sums of 16 places in an output channel, as far as they exist."""
        lines, conv = self.lines, self.lines.conv
        rows, tiles = lines.shape
        channel = group * integer(rows * SIDE) + row
        start = self.number * integer(lines.columns) + i * integer(tiles * SIDE)

        def element(x: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return conv.contraction.store(conv.point(self.n, channel, integer(0), x), sum_at(lane))

        stored = write_columns(start, conv.width.outputs, Tile(SIDE, 1, tiles, SIDE), column, element)
        exists = channel < integer(conv.group_outputs)
        return when(exists, stored, always=conv.group_outputs % (rows * SIDE) == 0)
