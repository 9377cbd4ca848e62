"""Attention by plain cores, in float32 for all types in memory: Dao et al., "FlashAttention" (2022)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.few_queries import MOST_ROWS
from hybridc.schedules.cuda.attention.read import read_stored_attention
from hybridc.schedules.cuda.attention.seen_keys import tiles_of_seen_keys
from hybridc.schedules.cuda.attention.weights import LOWEST
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    sequence,
    unrolled,
    unrolled_nest,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES, cuda_target, finish_function
from hybridc.schedules.cuda.core.warps import combined_by_lanes
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_KEYS = (32, 16, 8)
"""Of a tile: a thread has four scores of each of its rows, or fewer where tiles of more keys do not fit
shared memory."""
ACROSS, DOWN = 8, 16
"""Threads of a block: those along x share query rows, of which each has one to four."""
VECTOR = 4
"""Floats of 128 bits."""
GROUP = ACROSS * VECTOR
"""Columns of the values that the threads of a row read at once."""
MOST_DEPTH = 256
"""Of queries, and most columns of values: tiles of more do not fit shared memory."""
MOST_FLOAT_DEPTH = 128
"""Above this, kernels of float32 products take less time, as their tiles are larger."""
ENOUGH_BLOCKS = 160
"""Two for each multiprocessor of a large GPU: with fewer, smaller tiles keep more of it busy."""
_PAD = 4
"""Floats between rows in shared memory, so that eight rows' vectors lie in different banks."""
_WEIGHTS_PAD = 8
"""The same for weights, of which a warp writes eight neighbours in each of four rows."""
_OF_ROW = (4, 2, 1)
"""Distances between the threads that share a row."""


def is_suitable(rows: int, depth: int, width: int, *, is_narrow: bool) -> bool:
    """Whether one kernel for attention of so many queries, of `depth`, over values of `width`, is better than
    kernels of its own for each product. `is_narrow` are operands that most likely have 16 bits in memory."""
    most = MOST_DEPTH if is_narrow or rows <= MOST_ROWS else MOST_FLOAT_DEPTH
    return max(depth, width) <= most


@schedule_rule(family="matmul")
def attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` over any batch axes.

    Tiling: a block has 16 to 64 queries in shared memory and goes through keys and values, 32 at a time. A
    thread has 4 scores of each of its rows, and some columns of the result, both in registers with the rows'
    running maximum and sum: where a tile raises the maximum, what has been summed up shrinks accordingly.
    Keys and values in rows of integers become floats on their way to shared memory: all attention to such
    caches that has more queries than `few_query_attention` takes is computed here, none on tensor cores.
    """
    stored = read_stored_attention(request.function)
    if stored is None or max(stored.blocks.depth, stored.blocks.width) > MOST_DEPTH:
        return None
    builder = KernelBuilder(stored.wide.function)
    kernel = _Kernel(builder, stored.blocks, *_tile_of(stored.blocks))
    blocks = math.prod(stored.blocks.batch) * kernel.row_tiles
    function = stored.stored(builder.function([launch(blocks, (ACROSS, DOWN), kernel.of_thread)]), {})
    return finish_function(function, attention.__name__, cuda_target(request.target))


def _tile_of(found: AttentionBlocks) -> tuple[int, int]:
    """Rows of a thread, as many as leave enough blocks, and keys: as many as shared memory has room for."""
    fitting = [
        (rows, keys)
        for keys in _KEYS
        for rows in (4, 2, 1)
        if 4 * sum(_shared_floats(found, rows, keys)) <= MAX_SHARED_BYTES
    ]
    for rows, keys in fitting:
        if math.prod(found.batch) * ceil_div(found.rows, rows * DOWN) >= ENOUGH_BLOCKS:
            return rows, keys
    return next((rows, keys) for rows, keys in fitting if rows == 1)


def _shared_floats(found: AttentionBlocks, rows: int, keys: int) -> tuple[int, int, int, int]:
    """Of queries, keys, values and weights."""
    pitch, width = _padded(found.depth, VECTOR) + _PAD, _padded(found.width, GROUP)
    return rows * DOWN * pitch, keys * pitch, keys * width, rows * DOWN * (keys + _WEIGHTS_PAD)


def _padded(extent: int, step: int) -> int:
    return ceil_div(extent, step) * step


@dataclass(frozen=True, slots=True)
class _Kernel:
    builder: KernelBuilder
    found: AttentionBlocks
    rows: int
    """Of a thread."""
    keys: int
    """Of a tile."""

    @property
    def pitch(self) -> int:
        """Floats from one query or key in shared memory to the next."""
        return _padded(self.found.depth, VECTOR) + _PAD

    @property
    def weights_pitch(self) -> int:
        return self.keys + _WEIGHTS_PAD

    @property
    def row_tiles(self) -> int:
        return ceil_div(self.found.rows, self.rows * DOWN)

    @property
    def groups(self) -> int:
        """Vectors of the result that a thread has of each of its rows."""
        return ceil_div(self.found.width, GROUP)

    def of_thread(self, thread: Threads) -> tirx.Stmt:
        """All of a block of queries."""
        found, builder = self.found, self.builder
        sizes = _shared_floats(found, self.rows, self.keys)
        names = ("queries", "keys", "values", "weights")
        queries, keys, values, weights = (
            builder.shared((size,), "float32", name) for size, name in zip(sizes, names, strict=True)
        )
        scores = builder.registers((self.rows * self.keys // ACROSS,), "float32", "scores")
        peak, total = (builder.registers((self.rows,), "float32", name) for name in ("peak", "total"))
        sums = builder.registers((self.rows * self.groups * VECTOR,), "float32", "sums")
        batch = found.batch_at(tirx.floordiv(thread.block, integer(self.row_tiles)))
        first = tirx.floormod(thread.block, integer(self.row_tiles)) * integer(self.rows * DOWN)
        pitch = self.pitch

        def query(row: ir.Expr, d: ir.Expr) -> ir.Expr:
            at = tirx.min(first + row, integer(found.rows - 1))
            return found.factor("scores", 0, (*batch, at, integer(0)), d)

        def tile(number: ir.Expr) -> tirx.Stmt:
            begin = number * integer(self.keys)

            def key(row: ir.Expr, d: ir.Expr) -> ir.Expr:
                at = tirx.min(begin + row, integer(found.columns - 1))
                return found.factor("scores", 1, (*batch, integer(0), at), d)

            def value(row: ir.Expr, column: ir.Expr) -> ir.Expr:
                at = tirx.min(begin + row, integer(found.columns - 1))
                element = found.factor("context", 1, (*batch, integer(0), column), at)
                # weights of keys that do not exist are zero, and so has to be what they are multiplied by
                zero = tirx.const(0, "float32")
                exists = begin + row < integer(found.columns)
                return element if found.columns % self.keys == 0 else tirx.if_then_else(exists, element, zero)

            return sequence(
                [
                    _staged(thread, keys, self.keys, found.depth, pitch, key),
                    _staged(thread, values, self.keys, found.width, self.groups * GROUP, value),
                    self._scores(thread, queries, keys, scores),
                    *self._weights(thread, (batch, first, begin), scores, weights, (peak, total, sums)),
                    self._products(thread, weights, values, sums),
                ]
            )

        def start(row: ir.Expr) -> tirx.Stmt:
            zero = tirx.const(0, "float32")
            return sequence([tirx.BufferStore(peak, LOWEST, [row]), tirx.BufferStore(total, zero, [row])])

        flat = Threads(thread.block, thread.y * integer(ACROSS) + thread.x, integer(0))
        block = batch, first, self.rows * DOWN
        looking, tiles = tiles_of_seen_keys(builder, found, block, self.keys, flat, ACROSS * DOWN)
        return sequence(
            [
                *looking,
                _staged(thread, queries, self.rows * DOWN, found.depth, pitch, query),
                unrolled(self.rows, start),
                unrolled(int(sums.shape[0]), lambda i: tirx.BufferStore(sums, tirx.const(0, "float32"), [i])),
                loop(tiles, tile),
                *self._results(thread, batch, first, total, sums),
            ]
        )

    def _row(self, thread: Threads, number: ir.Expr) -> ir.Expr:
        """Row of the tile that is a thread's `number`-th."""
        return thread.y + number * integer(DOWN)

    def _scores(self, thread: Threads, queries: ir.Var, keys: ir.Var, scores: ir.Var) -> tirx.Stmt:
        """Products of a thread's rows with four keys, a vector of the depth at a time."""
        pitch, columns = self.pitch, self.keys // ACROSS
        left = self.builder.registers((self.rows * VECTOR,), "float32", "left")
        right = self.builder.registers((columns * VECTOR,), "float32", "right")

        def step(d: ir.Expr) -> tirx.Stmt:
            def query(i: ir.Expr) -> tirx.Stmt:
                return _vector(
                    left, i * integer(VECTOR), queries, self._row(thread, i) * integer(pitch) + d * 4
                )

            def key(j: ir.Expr) -> tirx.Stmt:
                column = thread.x + j * integer(ACROSS)
                return _vector(right, j * integer(VECTOR), keys, column * integer(pitch) + d * 4)

            def add(i: ir.Expr, j: ir.Expr, e: ir.Expr) -> tirx.Stmt:
                place = [i * integer(columns) + j]
                a, b = left[i * integer(VECTOR) + e], right[j * integer(VECTOR) + e]
                return tirx.BufferStore(scores, tirx.BufferLoad(scores, place) + a * b, place)

            return sequence(
                [
                    unrolled(self.rows, query),
                    unrolled(columns, key),
                    unrolled_nest((self.rows, columns, VECTOR), add),
                ]
            )

        zero = tirx.const(0, "float32")
        clear = unrolled(self.rows * columns, lambda i: tirx.BufferStore(scores, zero, [i]))
        return sequence([clear, loop(ceil_div(self.found.depth, VECTOR), step)])

    def _weights(
        self,
        thread: Threads,
        at: tuple[list[ir.Expr], ir.Expr, ir.Expr],
        scores: ir.Var,
        weights: ir.Var,
        state: tuple[ir.Var, ir.Var, ir.Var],
    ) -> list[tirx.Stmt]:
        """Scores become weights in shared memory; maximum, sum and products so far follow a new maximum."""
        found, columns = self.found, self.keys // ACROSS
        (batch, first, begin), (peak, total, sums) = at, state
        top = self.builder.registers((self.rows,), "float32", "top")
        shrink = self.builder.registers((self.rows,), "float32", "shrink")
        is_whole = found.columns % self.keys == 0

        def column(j: ir.Expr) -> ir.Expr:
            return begin + thread.x + j * integer(ACROSS)

        def logit(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            place = [i * integer(columns) + j]
            row = tirx.min(first + self._row(thread, i), integer(found.rows - 1))
            key = column(j) if is_whole else tirx.min(column(j), integer(found.columns - 1))
            value = found.logit((*batch, row, key), tirx.BufferLoad(scores, place))
            # a key that does not exist repeats the last one, which leaves the maximum as it is
            largest = tirx.max(tirx.BufferLoad(top, [i]), tirx.BufferLoad(scores, place))
            return sequence([tirx.BufferStore(scores, value, place), tirx.BufferStore(top, largest, [i])])

        def shrinking(i: ir.Expr) -> tirx.Stmt:
            by = tirx.exp(tirx.BufferLoad(peak, [i]) - tirx.BufferLoad(top, [i]))
            return sequence(
                [
                    *combined_by_lanes(top, i, tirx.max, _OF_ROW),
                    tirx.BufferStore(shrink, by, [i]),
                    tirx.BufferStore(peak, tirx.BufferLoad(top, [i]), [i]),
                    tirx.BufferStore(total, total[i] * shrink[i], [i]),
                ]
            )

        def weight(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            place = [i * integer(columns) + j]
            value = tirx.exp(tirx.BufferLoad(scores, place) - tirx.BufferLoad(peak, [i]))
            if not is_whole:
                value = tirx.if_then_else(column(j) < integer(found.columns), value, tirx.const(0, "float32"))
            own = tirx.BufferLoad(scores, place)
            shared = self._row(thread, i) * integer(self.weights_pitch) + thread.x + j * integer(ACROSS)
            return sequence(
                [
                    tirx.BufferStore(scores, value, place),
                    tirx.BufferStore(total, total[i] + own, [i]),
                    tirx.BufferStore(weights, own, [shared]),
                ]
            )

        def shrunk(i: ir.Expr, c: ir.Expr) -> tirx.Stmt:
            place = i * integer(self.groups * VECTOR) + c
            return tirx.BufferStore(sums, sums[place] * shrink[i], [place])

        return [
            unrolled(self.rows, lambda i: tirx.BufferStore(top, tirx.BufferLoad(peak, [i]), [i])),
            unrolled_nest((self.rows, columns), logit),
            unrolled(self.rows, shrinking),
            unrolled_nest((self.rows, columns), weight),
            unrolled_nest((self.rows, self.groups * VECTOR), shrunk),
        ]

    def _products(self, thread: Threads, weights: ir.Var, values: ir.Var, sums: ir.Var) -> tirx.Stmt:
        """Weights times values, four keys at a time."""
        left = self.builder.registers((self.rows * VECTOR,), "float32", "left")
        right = self.builder.registers((self.groups * VECTOR,), "float32", "right")

        def step(four: ir.Expr) -> tirx.Stmt:
            def weight(i: ir.Expr) -> tirx.Stmt:
                begin = self._row(thread, i) * integer(self.weights_pitch) + four * integer(VECTOR)
                return _vector(left, i * integer(VECTOR), weights, begin)

            def key(e: ir.Expr) -> tirx.Stmt:
                row = (four * integer(VECTOR) + e) * integer(self.groups * GROUP)

                def value(g: ir.Expr) -> tirx.Stmt:
                    begin = row + g * integer(GROUP) + thread.x * integer(VECTOR)
                    return _vector(right, g * integer(VECTOR), values, begin)

                def add(i: ir.Expr, c: ir.Expr) -> tirx.Stmt:
                    place = i * integer(self.groups * VECTOR) + c
                    product = left[i * integer(VECTOR) + e] * right[c]
                    return tirx.BufferStore(sums, sums[place] + product, [place])

                return sequence(
                    [unrolled(self.groups, value), unrolled_nest((self.rows, self.groups * VECTOR), add)]
                )

            return sequence([unrolled(self.rows, weight), unrolled(VECTOR, key)])

        return loop(self.keys // VECTOR, step)

    def _results(
        self, thread: Threads, batch: list[ir.Expr], first: ir.Expr, total: ir.Var, sums: ir.Var
    ) -> list[tirx.Stmt]:
        found = self.found

        def vector(i: ir.Expr, g: ir.Expr) -> tirx.Stmt:
            row, column = first + self._row(thread, i), g * integer(GROUP) + thread.x * integer(VECTOR)

            def element(e: ir.Expr) -> tirx.Stmt:
                own = sums[(i * integer(self.groups) + g) * integer(VECTOR) + e]
                value = found.quotient(own, tirx.BufferLoad(total, [i]))
                return found.store((*batch, row, column + e), value)

            def one(e: ir.Expr) -> tirx.Stmt:
                return when(column + e < integer(found.width), element(e))

            exists = tirx.all(row < integer(found.rows), column < integer(found.width))
            whole = found.rows % (self.rows * DOWN) == 0 and found.width % GROUP == 0
            body = unrolled(VECTOR, one) if found.width % VECTOR else vectorized(VECTOR, element)
            return when(exists, body, always=whole)

        add = unrolled(
            self.rows, lambda i: sequence(combined_by_lanes(total, i, lambda a, b: a + b, _OF_ROW))
        )
        return [add, unrolled_nest((self.rows, self.groups), vector)]


def _staged(
    thread: Threads,
    shared: ir.Var,
    rows: int,
    columns: int,
    pitch: int,
    element: Callable[[ir.Expr, ir.Expr], ir.Expr],
) -> tirx.Stmt:
    """Copy a matrix to shared memory by vectors, neighbouring threads neighbouring ones of a row; zeros
    behind its last column."""
    vectors, threads = ceil_div(columns, VECTOR), ACROSS * DOWN

    def copy(turn: ir.Expr) -> tirx.Stmt:
        number = turn * integer(threads) + thread.y * integer(ACROSS) + thread.x
        row, column = (
            tirx.floordiv(number, integer(vectors)),
            tirx.floormod(number, integer(vectors)) * VECTOR,
        )

        def lane(e: ir.Expr) -> tirx.Stmt:
            value = element(row, column + e)
            if columns % VECTOR:
                zero = tirx.const(0, "float32")
                value = tirx.if_then_else(column + e < integer(columns), value, zero)
            return tirx.BufferStore(shared, value, [row * integer(pitch) + column + e])

        always = rows * vectors % threads == 0
        body = unrolled(VECTOR, lane) if columns % VECTOR else vectorized(VECTOR, lane)
        return when(number < integer(rows * vectors), body, always=always)

    return unrolled(ceil_div(rows * vectors, threads), copy)


def _vector(target: ir.Var, place: ir.Expr, source: ir.Var, begin: ir.Expr) -> tirx.Stmt:
    """Load a vector into registers."""
    return vectorized(
        VECTOR, lambda e: tirx.BufferStore(target, tirx.BufferLoad(source, [begin + e]), [place + e])
    )
