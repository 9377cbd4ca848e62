"""Attention of so few queries that reading keys and values takes all the time: decoding, pooling by queries.

Dao et al., "Flash-Decoding for long-context inference" (2023): threads share the keys, and add up what each
of them has at last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.read import StoredAttention, read_stored_attention
from hybridc.schedules.cuda.attention.weights import LOWEST, Weights
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    sequence,
    unrolled,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.warps import combined_by_lanes
from hybridc.schedules.cuda.tensor_core.read import Element, flattened
from hybridc.schedules.cuda.tensor_core.staging import widest_load
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MOST_ROWS = 7
"""Queries above which tiles of queries are faster."""
_VECTOR_BYTES = 16
_LEAST_LANES = 4
"""Of a group that shares a key: they read two sectors at a time."""
_QUERY_FLOATS = 64
"""Of queries and sums in the registers of a lane, where a group has enough lanes."""
_LOADED_VECTORS = 8
"""Of keys that a lane reads before it waits for the first."""
_MOST_WARPS = 16
_SHARED_FLOATS = 10 << 10
"""Of the sums that warps exchange."""


@schedule_rule(family="matmul")
def few_query_attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` of at most seven queries, of any types in memory.

    Tiling: some lanes of a warp share a key, of which each has vectors of 128 bits; groups of them share the
    keys of a head, each with a maximum and sums of its own, which a block adds up at last.
    """
    attention = read_stored_attention(request.function)
    if attention is None or attention.blocks.rows > MOST_ROWS:
        return None
    name = few_query_attention.__name__
    function = attempt(name, lambda: _Kernel.of(attention).function())
    return None if function is None else finish_function(function, name, cuda_target(request.target))


@dataclass(frozen=True, slots=True)
class _Side:
    """Keys or values, of which a lane of a group has every `lanes`-th vector."""

    name: str
    extent: int
    """Of the depth, or columns of the values."""
    width: int
    """Elements of a vector."""
    dtype: str
    """In memory."""
    lanes: int

    @property
    def pieces(self) -> int:
        """Vectors of a lane."""
        return ceil_div(self.extent, self.width * self.lanes)

    @property
    def elements(self) -> int:
        """Of a lane."""
        return self.pieces * self.width

    @property
    def is_whole(self) -> bool:
        """Whether all vectors of all lanes exist."""
        return self.pieces * self.width * self.lanes == self.extent

    def first(self, piece: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """Where a vector of a lane begins."""
        return (piece * integer(self.lanes) + lane) * integer(self.width)


@dataclass(frozen=True, slots=True)
class _Kernel:
    attention: StoredAttention
    builder: KernelBuilder
    keys: _Side
    values: _Side
    lanes: int
    """Of a group."""
    turn: int
    """Keys of a group before it looks for their maximum."""
    warps: int

    @staticmethod
    def of(attention: StoredAttention) -> _Kernel:
        found = attention.blocks
        _, key, value = attention.operand_dtypes
        widths = _vector(found, "scores", found.depth, key), _vector(found, "context", found.width, value)
        most = max(ceil_div(e, w) for e, w in zip((found.depth, found.width), widths, strict=True))
        lanes = _LEAST_LANES
        while lanes < min(WARP, most) and found.rows * (found.depth + found.width) > _QUERY_FLOATS * lanes:
            lanes *= 2
        keys = _Side("keys", found.depth, widths[0], key, lanes)
        values = _Side("values", found.width, widths[1], value, lanes)
        turn = max(1, _LOADED_VECTORS // max(keys.pieces, values.pieces))
        turn = min(turn, 4)
        warps = 1
        while (
            warps < _MOST_WARPS
            and warps * turn * WARP < found.columns * lanes
            and 2 * warps * found.rows * found.width <= _SHARED_FLOATS
        ):
            warps *= 2
        builder = KernelBuilder(attention.wide.function)
        return _Kernel(attention, builder, keys, values, lanes, turn, warps)

    @property
    def found(self) -> AttentionBlocks:
        return self.attention.blocks

    def function(self) -> tirx.PrimFunc:
        """One launch, a block for each head."""
        staged: dict[ir.Var, str] = {}

        def of_thread(thread: Threads) -> tirx.Stmt:
            block = _Block(self, thread)
            staged.update({block.loaded_keys: self.keys.dtype, block.loaded_values: self.values.dtype})
            return block.body()

        made = self.builder.function([launch(math.prod(self.found.batch), self.warps * WARP, of_thread)])
        return self.attention.stored(made, staged)


def _vector(found: AttentionBlocks, block: str, extent: int, dtype: str) -> int:
    """Elements of the right factor of a product that lie side by side in memory, as they are loaded."""
    position, key = tirx.Var("position", "int64"), tirx.Var("key", "int64")
    batch = [tirx.Var(f"batch_{i}", "int64") for i in range(len(found.batch))]
    known = sym.Analyzer()
    for variable, size in ((position, extent), (key, found.columns), *zip(batch, found.batch, strict=True)):
        known.bind(variable, ir.Range.from_min_extent(integer(0), integer(size)))
    if block == "scores":
        load = found.factor(block, 1, (*batch, integer(0), key), position)
    else:
        load = found.factor(block, 1, (*batch, integer(0), position), key)
    most = _VECTOR_BYTES * 8 // dtype_bits(dtype)
    return widest_load(Element((), flattened(load, known)), position, extent, most)


class _Block:
    """What a thread does for its head."""

    def __init__(self, kernel: _Kernel, thread: Threads) -> None:
        self.kernel, self.found, self.thread = kernel, kernel.found, thread.x
        self.exponents = Weights.of(kernel.found)
        self.batch = kernel.found.batch_at(thread.block)
        self.rows, self.turn = kernel.found.rows, kernel.turn
        self.warp = tirx.floordiv(thread.x, integer(WARP))
        in_warp = tirx.floormod(thread.x, integer(WARP))
        self.group = tirx.floordiv(in_warp, integer(kernel.lanes))
        self.lane = tirx.floormod(in_warp, integer(kernel.lanes))
        self.groups = WARP // kernel.lanes
        keys, values, registers = kernel.keys, kernel.values, kernel.builder.registers
        self.queries = registers((self.rows * keys.elements,), "float32", "queries")
        self.sums = registers((self.rows * values.elements,), "float32", "sums")
        self.loaded_keys = registers((self.turn * keys.elements,), "float32", "keys")
        self.loaded_values = registers((self.turn * values.elements,), "float32", "values")
        self.scores = registers((self.rows * self.turn,), "float32", "scores")
        self.peak, self.total, self.top = (
            registers((self.rows,), "float32", name) for name in ("peak", "total", "top")
        )
        self.shrink = registers((1,), "float32", "shrink")

    def body(self) -> tirx.Stmt:
        kernel, zero = self.kernel, tirx.FloatImm("float32", 0.0)
        stride = kernel.warps * self.groups * self.turn

        def start(row: ir.Expr) -> tirx.Stmt:
            return sequence(
                [tirx.BufferStore(self.peak, LOWEST, [row]), tirx.BufferStore(self.total, zero, [row])]
            )

        def turn(number: ir.Expr) -> tirx.Stmt:
            first = number * integer(stride) + self.warp * integer(self.groups * self.turn)
            return sequence(
                [
                    unrolled(self.turn, lambda u: self._load(kernel.keys, self.loaded_keys, first, u)),
                    unrolled(self.turn, lambda u: self._load(kernel.values, self.loaded_values, first, u)),
                    *self._scores(first),
                    unrolled(self.rows, self._added),
                ]
            )

        return sequence(
            [
                self._load_queries(),
                unrolled(self.rows, start),
                unrolled(int(self.sums.shape[0]), lambda i: tirx.BufferStore(self.sums, zero, [i])),
                loop(ceil_div(self.found.columns, stride), turn),
                *self._joined(),
                *self._results(),
            ]
        )

    def _key(self, first: ir.Expr, u: ir.Expr) -> ir.Expr:
        """The group's `u`-th key of a turn; neighbouring groups have neighbouring keys."""
        return first + u * integer(self.groups) + self.group

    def _existing(self, key: ir.Expr) -> ir.Expr:
        stride = self.kernel.warps * self.groups * self.turn
        columns = self.found.columns
        return key if columns % stride == 0 else tirx.min(key, integer(columns - 1))

    def _load_queries(self) -> tirx.Stmt:
        side = self.kernel.keys

        def element(row: ir.Expr, at: ir.Expr) -> ir.Expr:
            return self.found.factor("scores", 0, (*self.batch, row, integer(0)), at)

        return unrolled(
            self.rows,
            lambda row: self._vectors(side, self.queries, row, lambda at: element(row, at)),
        )

    def _load(self, side: _Side, target: ir.Var, first: ir.Expr, u: ir.Expr) -> tirx.Stmt:
        key = self._existing(self._key(first, u))

        def element(at: ir.Expr) -> ir.Expr:
            if side is self.kernel.keys:
                return self.found.factor("scores", 1, (*self.batch, integer(0), key), at)
            return self.found.factor("context", 1, (*self.batch, integer(0), at), key)

        return self._vectors(side, target, u, element)

    def _vectors(
        self, side: _Side, target: ir.Var, number: ir.Expr, element: Callable[[ir.Expr], ir.Expr]
    ) -> tirx.Stmt:
        """Load a lane's vectors to the `number`-th place of `target`; zeros behind the end."""

        def vector(piece: ir.Expr) -> tirx.Stmt:
            start = side.first(piece, self.lane)
            place = (number * integer(side.pieces) + piece) * integer(side.width)

            # vectors have at most four floats
            lanes = min(side.width, 4) if target is self.queries else side.width

            def stored(value: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
                def part(number: ir.Expr) -> tirx.Stmt:
                    begin = number * integer(lanes)
                    return vectorized(
                        lanes,
                        lambda e: tirx.BufferStore(target, value(start + begin + e), [place + begin + e]),
                    )

                return unrolled(side.width // lanes, part)

            if side.is_whole:
                return stored(element)
            zeros = stored(lambda _: tirx.FloatImm("float32", 0.0))
            return tirx.IfThenElse(start < integer(side.extent), stored(element), zeros)

        return unrolled(side.pieces, vector)

    def _scores(self, first: ir.Expr) -> list[tirx.Stmt]:
        """Scores become weights; what there is of a row shrinks with a greater maximum."""
        elements, lanes = self.kernel.keys.elements, self.kernel.lanes
        distances = [lanes >> level for level in range(1, lanes.bit_length())]

        def place(row: ir.Expr, u: ir.Expr) -> ir.Expr:
            return row * integer(self.turn) + u

        def product(row: ir.Expr, u: ir.Expr) -> tirx.Stmt:
            at = place(row, u)

            def add(e: ir.Expr) -> tirx.Stmt:
                factors = (
                    self.queries[row * integer(elements) + e],
                    self.loaded_keys[u * integer(elements) + e],
                )
                return tirx.BufferStore(self.scores, self.scores[at] + factors[0] * factors[1], [at])

            clear = tirx.BufferStore(self.scores, tirx.FloatImm("float32", 0.0), [at])
            combine = combined_by_lanes(self.scores, at, lambda a, b: a + b, distances)
            return sequence([clear, unrolled(elements, add), *combine, *logit(row, u)])

        def logit(row: ir.Expr, u: ir.Expr) -> list[tirx.Stmt]:
            at, key = [place(row, u)], self._key(first, u)
            existing, score = self._existing(key), tirx.BufferLoad(self.scores, at)
            value = score
            if not self.exponents.is_scaled_only:
                value = self.found.logit((*self.batch, row, existing), score)
            if existing is not key:
                none = tirx.FloatImm("float32", float("-inf"))
                value = tirx.Select(key < integer(self.found.columns), value, none)
            return [] if value is score else [tirx.BufferStore(self.scores, value, at)]

        return [unrolled(self.turn, lambda u: unrolled(self.rows, lambda row: product(row, u)))]

    def _added(self, row: ir.Expr) -> tirx.Stmt:
        """Add a turn's weights, and values times them, to the sums of a row."""
        zero = integer(0)

        def largest(u: ir.Expr) -> tirx.Stmt:
            score = self.scores[row * integer(self.turn) + u]
            return tirx.BufferStore(self.top, tirx.max(self.top[row], score), [row])

        def weight(u: ir.Expr) -> tirx.Stmt:
            at = row * integer(self.turn) + u
            stored = tirx.BufferStore(
                self.scores, self.exponents.weight(self.scores[at], self.top[row]), [at]
            )
            own = tirx.BufferLoad(self.scores, [at])
            return sequence([stored, tirx.BufferStore(self.total, self.total[row] + own, [row])])

        def add(e: ir.Expr) -> tirx.Stmt:
            at = row * integer(self.kernel.values.elements) + e

            def key(u: ir.Expr) -> tirx.Stmt:
                value = self.loaded_values[u * integer(self.kernel.values.elements) + e]
                product = self.scores[row * integer(self.turn) + u] * value
                return tirx.BufferStore(self.sums, self.sums[at] + product, [at])

            shrunk = tirx.BufferStore(self.sums, self.sums[at] * self.shrink[zero], [at])
            return sequence([shrunk, unrolled(self.turn, key)])

        return sequence(
            [
                tirx.BufferStore(self.top, tirx.BufferLoad(self.peak, [row]), [row]),
                unrolled(self.turn, largest),
                *self._shrinking(row),
                unrolled(self.turn, weight),
                unrolled(self.kernel.values.elements, add),
            ]
        )

    def _shrinking(self, row: ir.Expr) -> list[tirx.Stmt]:
        """Make the total of a row relative to `top`, and note by what its sums are to be multiplied."""
        by, zero = self.exponents.shrunk(self.peak[row], self.top[row]), integer(0)
        return [
            tirx.BufferStore(self.shrink, by, [zero]),
            tirx.BufferStore(self.peak, tirx.BufferLoad(self.top, [row]), [row]),
            tirx.BufferStore(self.total, self.total[row] * self.shrink[zero], [row]),
        ]

    def _joined(self) -> list[tirx.Stmt]:
        """Give the groups of a warp the sums of all of them."""
        lanes, elements = self.kernel.lanes, self.kernel.values.elements
        distances = [WARP >> level for level in range(1, (WARP // lanes).bit_length())]

        def plus(left: ir.Expr, right: ir.Expr) -> ir.Expr:
            return left + right

        def add(row: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            at = row * integer(elements) + e
            shrunk = tirx.BufferStore(self.sums, self.sums[at] * self.shrink[integer(0)], [at])
            return sequence([shrunk, *combined_by_lanes(self.sums, at, plus, distances)])

        def joined(row: ir.Expr) -> tirx.Stmt:
            return sequence(
                [
                    tirx.BufferStore(self.top, tirx.BufferLoad(self.peak, [row]), [row]),
                    *combined_by_lanes(self.top, row, tirx.max, distances),
                    *self._shrinking(row),
                    *combined_by_lanes(self.total, row, plus, distances),
                    unrolled(elements, lambda e: add(row, e)),
                ]
            )

        return [unrolled(self.rows, joined)] if distances else []

    def _results(self) -> list[tirx.Stmt]:
        """Add up what the warps have in shared memory, a thread for each result."""
        kernel, found, values = self.kernel, self.found, self.kernel.values
        warps, rows, width = kernel.warps, self.rows, found.width
        builder = kernel.builder
        peaks, totals = (builder.shared((warps * rows,), "float32", name) for name in ("peaks", "totals"))
        partial = builder.shared((warps * rows * width,), "float32", "partial")
        best, total, result = (builder.registers((1,), "float32", n) for n in ("best", "whole", "result"))
        zero = integer(0)

        def note(row: ir.Expr) -> tirx.Stmt:
            at = [self.warp * integer(rows) + row]

            def vector(piece: ir.Expr, e: ir.Expr) -> tirx.Stmt:
                column = values.first(piece, self.lane) + e
                own = self.sums[(row * integer(values.pieces) + piece) * integer(values.width) + e]
                return tirx.BufferStore(partial, own, [at[0] * integer(width) + column])

            def piece(number: ir.Expr) -> tirx.Stmt:
                body = unrolled(values.width, lambda e: vector(number, e))
                exists = values.first(number, self.lane) < integer(width)
                return when(exists, body, always=values.is_whole)

            return sequence(
                [
                    tirx.BufferStore(peaks, tirx.BufferLoad(self.peak, [row]), at),
                    tirx.BufferStore(totals, tirx.BufferLoad(self.total, [row]), at),
                    unrolled(values.pieces, piece),
                ]
            )

        def element(turn: ir.Expr) -> tirx.Stmt:
            number = turn * integer(warps * WARP) + self.thread
            row, column = tirx.floordiv(number, integer(width)), tirx.floormod(number, integer(width))

            def state(warp: ir.Expr) -> ir.Expr:
                return warp * integer(rows) + row

            def largest(warp: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(best, tirx.max(best[zero], peaks[state(warp)]), [zero])

            def add(warp: ir.Expr) -> tirx.Stmt:
                by = self.exponents.shrunk(peaks[state(warp)], best[zero])
                own = partial[state(warp) * integer(width) + column]
                return sequence(
                    [
                        tirx.BufferStore(self.shrink, by, [zero]),
                        tirx.BufferStore(
                            total, total[zero] + totals[state(warp)] * self.shrink[zero], [zero]
                        ),
                        tirx.BufferStore(result, result[zero] + own * self.shrink[zero], [zero]),
                    ]
                )

            body = sequence(
                [
                    tirx.BufferStore(best, LOWEST, [zero]),
                    tirx.BufferStore(total, tirx.FloatImm("float32", 0.0), [zero]),
                    tirx.BufferStore(result, tirx.FloatImm("float32", 0.0), [zero]),
                    loop(warps, largest),
                    loop(warps, add),
                    found.store((*self.batch, row, column), result[zero] / total[zero]),
                ]
            )
            return when(number < integer(rows * width), body, always=rows * width % (warps * WARP) == 0)

        is_first = self.group.equal(zero)
        return [
            when(is_first, unrolled(rows, note), always=self.groups == 1),
            loop(ceil_div(rows * width, warps * WARP), element),
        ]
