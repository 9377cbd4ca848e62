"""A convolution with 3x3 taps as launches, four outputs for 16 multiplications instead of 36.

    out = A^T [(G g G^T) * (B^T d B)] A          d: 4x4 elements of the images, g: 3x3 taps, out: 2x2

    for each slice of the channels:
        transform what the registers hold of it, and store it to shared memory     barriers around it
        load patches and taps of the next slice into registers                     which arrive while
        at each of the 16 points: sums += taps x patches                           this is computed
    for each part of the sums:
        exchange them, so that a thread has all points of a tile; transform them back, store results

Transformed factors never reach global memory, and weights stay as large as they are: they are transformed by
each block again, which costs one twentieth of its products. Lavin and Gray, "Fast algorithms for
convolutional neural networks" (2016), for the algorithm; Yan, Wang and Chu, "Optimizing batched Winograd
convolution on GPUs" (2020), for one launch with two points in a thread's registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cuda.core.loops import launched
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.results import Results, results_of
from hybridc.schedules.cuda.tile.share import added_up
from hybridc.schedules.cuda.winograd.plan import (
    CHANNELS,
    OUTPUTS,
    PITCH,
    POINTS,
    POINTS_OF_THREAD,
    SIDE,
    Plan,
)
from hybridc.schedules.cuda.winograd.read import TAPS
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.shapes import index_shape

Element = Callable[[ir.Expr], ir.Expr]
"""One of a line's elements, by its number."""


def scheduled_convolution(function: tirx.PrimFunc, plan: Plan) -> tirx.PrimFunc:
    """The launches of a plan, in place of what `function` computes; its weights are packed."""
    weights, results = plan.conv.packed_weights(), results_of(plan.conv.product)
    parameters = [weights if i == plan.conv.position else p for i, p in enumerate(function.params)]
    shared = _buffer("shared", plan.shared_floats, "shared")
    registers = _Registers.of(plan)
    buffers = [shared, *registers.all, *results.inputs]
    partial = results.partial(plan.parts) if plan.parts > 1 else None

    def body(block: ir.Var, thread: ir.Var) -> tirx.Stmt:
        return _Block(plan, weights, results, partial, shared, registers, block, thread).body()

    launches = [launched(plan.blocks, plan.threads, body)]
    if partial is not None:
        sums = _buffer("sums", WIDTH, "local")
        launches.append(added_up(plan.conv.product, plan.parts, partial, sums, results))
        buffers += [partial, sums]
    return function_of(function, parameters, launches, buffers)


@dataclass(frozen=True, slots=True)
class _Registers:
    """Of a thread."""

    sums: ir.Var
    patches: ir.Var
    """As they are loaded: patch by patch, row by row."""
    taps: ir.Var
    """Tap by tap, of neighbouring output channels."""
    half: ir.Var
    """What is transformed along one axis."""
    rows: ir.Var
    columns: ir.Var

    @staticmethod
    def of(plan: Plan) -> _Registers:
        sizes = {
            "sums": POINTS_OF_THREAD * plan.plane.accumulators,
            "patches": POINTS * plan.patches,
            "taps": TAPS * TAPS * plan.filters,
            "half": POINTS * max(plan.filters, 1),
            "rows": plan.plane.down,
            "columns": plan.plane.across,
        }
        return _Registers(*(_buffer(name, size, "local") for name, size in sizes.items()))

    @property
    def all(self) -> list[ir.Var]:
        return [self.sums, self.patches, self.taps, self.half, self.rows, self.columns]


def _buffer(name: str, size: int, scope: str) -> ir.Var:
    return tirx.decl_buffer(index_shape((size,)), "float32", name, scope=scope, layout=None)


class _Block:
    """What a thread of a block does."""

    def __init__(
        self, plan: Plan, weights: ir.Var, results: Results, partial: ir.Var | None, shared: ir.Var,
        registers: _Registers, block: ir.Var, thread: ir.Var,
    ) -> None:  # fmt: skip
        self.plan, self.conv, self.plane = plan, plan.conv, plan.plane
        self.weights, self.results, self.partial = weights, results, partial
        self.shared, self.registers, self.thread = shared, registers, thread
        rows, columns = plan.grid
        # blocks that run at the same time share patches
        self.first_output = tirx.floormod(block, integer(rows)) * integer(plan.plane.rows)
        rest = tirx.floordiv(block, integer(rows))
        self.first_tile = tirx.floormod(rest, integer(columns)) * integer(plan.plane.columns)
        self.part = tirx.floordiv(rest, integer(columns))
        self.group = tirx.floordiv(thread, integer(plan.plane.threads))
        self.place = plan.plane.place(tirx.floormod(thread, integer(plan.plane.threads)))

    def body(self) -> tirx.Stmt:
        count = self.plan.turns

        def turn(number: ir.Expr) -> tirx.Stmt:
            steps = [self._store_patches(), self._store_taps()]
            if count > 1:
                more = number + integer(1) < integer(count)
                steps.append(tirx.IfThenElse(more, self._load(number + integer(1)), None))
            return tirx.SeqStmt([*steps, self._multiply()])

        zero = tirx.FloatImm("float32", 0.0)
        size = int(self.registers.sums.shape[0])
        clear = unrolled(size, lambda i: tirx.BufferStore(self.registers.sums, zero, [i]))
        return tirx.SeqStmt([clear, self._load(integer(0)), loop(count, turn), self._results()])

    def _tile_at(self, number: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
        """Image, and the first row and column of the output, of a tile."""
        across, down = integer(self.plan.across), integer(self.plan.down)
        rest = tirx.floordiv(number, across)
        image = tirx.floordiv(rest, down) if self.conv.images > 1 else integer(0)
        line = tirx.floormod(rest, down) if self.conv.images > 1 else rest
        return image, line * integer(OUTPUTS), tirx.floormod(number, across) * integer(OUTPUTS)

    def _channel(self, slice_number: ir.Expr, own: ir.Expr) -> ir.Expr:
        return (self.part * integer(self.plan.turns) + slice_number) * integer(CHANNELS) + own

    def _channel_exists(self, channel: ir.Expr) -> list[ir.Expr]:
        whole = self.plan.parts * self.plan.turns * CHANNELS == self.conv.channels
        return [] if whole else [channel < integer(self.conv.channels)]

    def _patch_place(self, number: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """Tile of the block, and channel of the slice, of one of a thread's patches."""
        columns = integer(self.plane.columns)
        at_once = integer(self.plan.threads // self.plane.columns)
        return (
            tirx.floormod(self.thread, columns),
            number * at_once + tirx.floordiv(self.thread, columns),
        )

    def _taps_place(self) -> tuple[ir.Expr, ir.Expr]:
        """First output of the block, and channel of the slice, of a thread's taps."""
        length = integer(self.plane.rows // self.plan.filters)
        first = tirx.floormod(self.thread, length) * integer(self.plan.filters)
        return first, tirx.floordiv(self.thread, length)

    def _load(self, number: ir.Expr) -> tirx.Stmt:
        """A thread's part of a slice into registers; zero where there is none."""
        conv, filters = self.conv, self.plan.filters

        def patch(turn: ir.Expr) -> tirx.Stmt:
            own, c = self._patch_place(turn)
            tile, channel = self.first_tile + own, self._channel(number, c)
            image, top, left = self._tile_at(tile)
            guards = self._channel_exists(channel)
            if self.plan.tiles % self.plane.columns:
                guards.append(tile < integer(self.plan.tiles))

            def element(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
                # the last tile of an odd side reaches one element beyond the padded images
                ends = [
                    at < integer(extent + TAPS - 1)
                    for at, extent in ((top + i, conv.height), (left + j, conv.width))
                    if extent % OUTPUTS
                ]
                value = guarded(conv.read(channel, image, top + i, left + j), [*guards, *ends])
                at = (turn * integer(SIDE) + i) * integer(SIDE) + j
                return tirx.BufferStore(self.registers.patches, value, [at])

            return unrolled(SIDE, lambda i: unrolled(SIDE, lambda j: element(i, j)))

        own, c = self._taps_place()
        output, channel = self.first_output + own, self._channel(number, c)
        guards = self._channel_exists(channel)
        if conv.outputs % self.plane.rows:
            guards.append(output < integer(conv.outputs))
        is_vector = conv.outputs % filters == 0

        def tap(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            def lane(number: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(self.weights, [channel, i, j, output + number])
                ends = [] if is_vector else [output + number < integer(conv.outputs)]
                at = (i * integer(TAPS) + j) * integer(filters) + number
                return tirx.BufferStore(self.registers.taps, guarded(value, [*guards, *ends]), [at])

            return (vectorized if is_vector else unrolled)(filters, lane)

        taps = unrolled(TAPS, lambda i: unrolled(TAPS, lambda j: tap(i, j)))
        return tirx.SeqStmt([unrolled(self.plan.patches, patch), taps])

    def _store_patches(self) -> tirx.Stmt:
        """`B^T d B` of a thread's patches, to shared memory."""
        half = self.registers.half

        def patch(turn: ir.Expr) -> tirx.Stmt:
            own, c = self._patch_place(turn)

            def column(j: ir.Expr) -> tirx.Stmt:
                def element(i: int) -> ir.Expr:
                    at = (turn * integer(SIDE) + integer(i)) * integer(SIDE) + j
                    return tirx.BufferLoad(self.registers.patches, [at])

                values = data_transformed([element(i) for i in range(SIDE)])
                return stores(half, [([integer(i * SIDE) + j], v) for i, v in enumerate(values)])

            def row(i: ir.Expr) -> tirx.Stmt:
                first = i * integer(SIDE)
                values = data_transformed([tirx.BufferLoad(half, [first + integer(j)]) for j in range(SIDE)])
                places = [self._data_at(first + integer(j), c) + own for j in range(SIDE)]
                return stores(self.shared, [([at], v) for at, v in zip(places, values, strict=True)])

            return tirx.SeqStmt([unrolled(SIDE, column), unrolled(SIDE, row)])

        return unrolled(self.plan.patches, patch)

    def _store_taps(self) -> tirx.Stmt:
        """`G g G^T` of a thread's taps, to shared memory."""
        half, filters = self.registers.half, self.plan.filters
        own, c = self._taps_place()

        def lanes(body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            return unrolled(filters, body)

        def column(j: ir.Expr) -> tirx.Stmt:
            def lane(number: ir.Expr) -> tirx.Stmt:
                def element(i: int) -> ir.Expr:
                    at = (integer(i * TAPS) + j) * integer(filters) + number
                    return tirx.BufferLoad(self.registers.taps, [at])

                values = _taps_transformed([element(i) for i in range(TAPS)])
                places = [(integer(i * TAPS) + j) * integer(filters) + number for i in range(SIDE)]
                return stores(half, [([at], v) for at, v in zip(places, values, strict=True)])

            return lanes(lane)

        def row(i: ir.Expr) -> tirx.Stmt:
            def point(j: int) -> tirx.Stmt:
                def lane(number: ir.Expr) -> tirx.Stmt:
                    line = [
                        tirx.BufferLoad(half, [(i * integer(TAPS) + integer(t)) * integer(filters) + number])
                        for t in range(TAPS)
                    ]
                    at = self._taps_at(i * integer(SIDE) + integer(j), c) + own + number
                    return tirx.BufferStore(self.shared, _taps_transformed(line)[j], [at])

                return vectorized(filters, lane)

            return sequence([point(j) for j in range(SIDE)])

        return tirx.SeqStmt([unrolled(TAPS, column), unrolled(SIDE, row)])

    def _data_at(self, point: ir.Expr, channel: ir.Expr) -> ir.Expr:
        """Where in shared memory the tiles of a channel begin, at a point."""
        return (point * integer(CHANNELS) + channel) * integer(self.plane.columns)

    def _taps_at(self, point: ir.Expr, channel: ir.Expr) -> ir.Expr:
        start = integer(POINTS * CHANNELS * self.plane.columns)
        return start + (point * integer(CHANNELS) + channel) * integer(self.plane.rows)

    def _multiply(self) -> tirx.Stmt:
        """A thread's share of the products of a slice."""
        plane, registers = self.plane, self.registers

        def step(channel: ir.Expr) -> tirx.Stmt:
            def of_point(number: ir.Expr) -> tirx.Stmt:
                point = self.group * integer(POINTS_OF_THREAD) + number

                def rows(quad: ir.Expr) -> tirx.Stmt:
                    begin = self._taps_at(point, channel) + plane.row(self.place[0], quad)
                    return self._quad(registers.rows, quad, begin)

                def columns(quad: ir.Expr) -> tirx.Stmt:
                    begin = self._data_at(point, channel) + plane.column(self.place[1], quad)
                    return self._quad(registers.columns, quad, begin)

                def add(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
                    at = [(number * integer(plane.down) + i) * integer(plane.across) + j]
                    product = tirx.BufferLoad(registers.rows, [i]) * tirx.BufferLoad(registers.columns, [j])
                    return tirx.BufferStore(registers.sums, tirx.BufferLoad(registers.sums, at) + product, at)

                return tirx.SeqStmt([
                    unrolled(plane.down // WIDTH, rows),
                    unrolled(plane.across // WIDTH, columns),
                    unrolled(plane.down, lambda i: unrolled(plane.across, lambda j: add(i, j))),
                ])  # fmt: skip

            return unrolled(POINTS_OF_THREAD, of_point)

        return unrolled(CHANNELS, step)

    def _quad(self, into: ir.Var, number: ir.Expr, begin: ir.Expr) -> tirx.Stmt:
        def one(lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(self.shared, [begin + lane])
            return tirx.BufferStore(into, value, [number * integer(WIDTH) + lane])

        return vectorized(WIDTH, one)

    def _results(self) -> tirx.Stmt:
        """Round by round a quad of each thread's rows by a quad of its columns."""
        plane, plan = self.plane, self.plan
        quads = plane.across // WIDTH

        def part(number: ir.Expr) -> tirx.Stmt:
            down, across = tirx.floordiv(number, integer(quads)), tirx.floormod(number, integer(quads))
            output = self.first_output + down * integer(plan.round_rows)
            tile = self.first_tile + across * integer(plan.round_columns)
            return tirx.SeqStmt([self._give(down, across), self._take(output, tile)])

        return unrolled(plane.down // WIDTH * quads, part)

    def _exchanged_at(self, point: ir.Expr, row: ir.Expr, column: ir.Expr) -> ir.Expr:
        pitch = integer(self.plan.round_columns + PITCH)
        return (point * integer(self.plan.round_rows) + row) * pitch + column

    def _give(self, down: ir.Expr, across: ir.Expr) -> tirx.Stmt:
        """A thread's sums of a round to shared memory."""
        plane = self.plane

        def row(number: ir.Expr, i: ir.Expr) -> tirx.Stmt:
            point = self.group * integer(POINTS_OF_THREAD) + number
            first = (number * integer(plane.down) + down * integer(WIDTH) + i) * integer(plane.across)
            place = self._exchanged_at(
                point, self.place[0] * integer(WIDTH) + i, self.place[1] * integer(WIDTH)
            )

            def lane(lane: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(self.registers.sums, [first + across * integer(WIDTH) + lane])
                return tirx.BufferStore(self.shared, value, [place + lane])

            return vectorized(WIDTH, lane)

        return unrolled(POINTS_OF_THREAD, lambda number: unrolled(WIDTH, lambda i: row(number, i)))

    def _take(self, first_output: ir.Expr, first_tile: ir.Expr) -> tirx.Stmt:
        """`A^T m A` of tiles whose products are in shared memory, and what becomes of them."""
        plan, half, columns = self.plan, self.registers.half, integer(self.plan.round_columns)

        def tile(number: ir.Expr) -> tirx.Stmt:
            flat = number * integer(plan.threads) + self.thread
            row, own = tirx.floordiv(flat, columns), tirx.floormod(flat, columns)

            def column(j: ir.Expr) -> tirx.Stmt:
                points = [self._exchanged_at(integer(i * SIDE) + j, row, own) for i in range(SIDE)]
                values = result_transformed([tirx.BufferLoad(self.shared, [at]) for at in points])
                return stores(half, [([integer(i * SIDE) + j], v) for i, v in enumerate(values)])

            def line(i: ir.Expr) -> tirx.Stmt:
                loaded = [tirx.BufferLoad(half, [i * integer(SIDE) + integer(j)]) for j in range(SIDE)]
                values = result_transformed(loaded)
                # the sums of a line take the place of what they are made of
                at = i * integer(OUTPUTS) + integer(OUTPUTS * SIDE)
                return stores(half, [([at + integer(j)], v) for j, v in enumerate(values)])

            output, at = first_output + row, first_tile + own
            image, top, left = self._tile_at(at)
            stored = unrolled(OUTPUTS, lambda i: self._store_line(output, image, top + i, left, i))
            guards = []
            if plan.tiles % self.plane.columns:
                guards.append(at < integer(plan.tiles))
            if self.conv.outputs % self.plane.rows:
                guards.append(output < integer(self.conv.outputs))
            if guards:
                stored = tirx.IfThenElse(tirx.all(*guards), stored, None)
            return tirx.SeqStmt([unrolled(SIDE, column), unrolled(OUTPUTS, line), stored])

        return loop(plan.round_rows * plan.round_columns // plan.threads, tile)

    def _store_line(
        self, output: ir.Expr, image: ir.Expr, y: ir.Expr, left: ir.Expr, i: ir.Expr
    ) -> tirx.Stmt:
        """A line of a tile's results, as one access where lines are made of pairs."""
        conv, half = self.conv, self.registers.half
        first = i * integer(OUTPUTS) + integer(OUTPUTS * SIDE)

        def lane(j: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(half, [first + j])
            if self.partial is not None:
                flat = (image * integer(conv.height) + y) * integer(conv.width) + left + j
                return tirx.BufferStore(self.partial, total, [self.part, output, flat])
            point = {conv.product.rows.axes[0]: output, **conv.columns_at(image, y, left + j)}
            return self.results.stored(point, total)

        if conv.width % OUTPUTS == 0 and (self.partial is not None or self.results.wide):
            line = vectorized(OUTPUTS, lane)
        elif conv.width % OUTPUTS == 0:
            line = unrolled(OUTPUTS, lane)
        else:
            exists = [left + integer(j) < integer(conv.width) for j in range(OUTPUTS)]
            line = sequence([tirx.IfThenElse(exists[j], lane(integer(j)), None) for j in range(OUTPUTS)])
        return tirx.IfThenElse(y < integer(conv.height), line, None) if conv.height % OUTPUTS else line


def guarded(value: ir.Expr, guards: list[ir.Expr]) -> ir.Expr:
    zero = tirx.FloatImm("float32", 0.0)
    return tirx.if_then_else(tirx.all(*guards), value, zero) if guards else value


def stores(buffer: ir.Var, values: list[tuple[list[ir.Expr], ir.Expr]]) -> tirx.Stmt:
    return sequence([tirx.BufferStore(buffer, value, at) for at, value in values])


def data_transformed(d: list[ir.Expr]) -> list[ir.Expr]:
    """`B^T d` of a line."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _taps_transformed(g: list[ir.Expr]) -> list[ir.Expr]:
    """`G g` of a line."""
    both = (g[0] + g[2]) * tirx.FloatImm("float32", 0.5)
    middle = g[1] * tirx.FloatImm("float32", 0.5)
    return [g[0], both + middle, both - middle, g[2]]


def result_transformed(m: list[ir.Expr]) -> list[ir.Expr]:
    """`A^T m` of a line."""
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]
