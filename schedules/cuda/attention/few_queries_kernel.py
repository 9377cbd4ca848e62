"""The loop nest of attention of few queries.

A block has a head of keys, or every so-manieth turn of it, and the queries of all heads that share it, or of
some of them; a group of lanes has some of the keys of each turn:

    the turn behind the last one of which a query sees a key, as a mask says
    for each turn up to that:
        load some keys and values, vectors of 128 bits a lane; of rows of integers 32 bits, and scales
        scores: a lane's share of each product, added up by the group
        weights, relative to the greatest score so far; sums += weights values
    groups of a warp, warps, and then blocks that share a head add up their sums

The scale of a key in a row of integers multiplies its score, and that of a value its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from tvm import ir, tirx

from hybridc.appended_rows import SCALE_BYTES
from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.partial_sums import Joined, PartialSums
from hybridc.schedules.cuda.attention.read import StoredAttention
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
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, WARP
from hybridc.schedules.cuda.core.warps import combined_by_block, combined_by_lanes
from hybridc.schedules.quantized_rows import ROWS


@dataclass(frozen=True, slots=True)
class Side:
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
    def is_rows(self) -> bool:
        """Whether it is rows of integers with a scale behind each."""
        return self.dtype == ROWS

    @property
    def row_bytes(self) -> int:
        """Of a key or value in memory, with its scale."""
        return self.extent * dtype_bits(self.dtype) // 8 + (SCALE_BYTES if self.is_rows else 0)

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
class Plan:
    """Who has which keys."""

    keys: Side
    values: Side
    turn: int
    """Keys of a group before it looks for their maximum."""
    warps: int
    """Of a block."""
    parts: int = 1
    """Blocks that share a head of keys."""
    shared: int = 1
    """Heads of queries that a block reads keys and values for."""

    @property
    def lanes(self) -> int:
        """Of a group."""
        return self.keys.lanes

    @property
    def stride(self) -> int:
        """Keys of a block in a turn."""
        return self.warps * WARP // self.lanes * self.turn


@dataclass(frozen=True, slots=True)
class JoinedHeads:
    """Heads of queries that share a head of keys, as one head of as many more rows."""

    found: AttentionBlocks
    shared: int

    @property
    def count(self) -> int:
        return math.prod(self.found.batch) // self.shared

    @property
    def rows(self) -> int:
        """Of each."""
        return self.found.rows * self.shared

    def batch(self, head: ir.Expr, number: ir.Expr) -> list[ir.Expr]:
        """Batch indices of the `number`-th head of queries of one."""
        return self.found.batch_at(head * integer(self.shared) + number)

    def line(self, head: ir.Expr, row: ir.Expr) -> list[ir.Expr]:
        """Batch and row of a query."""
        number, own = (op(row, integer(self.found.rows)) for op in (tirx.floordiv, tirx.floormod))
        return [*self.batch(head, number), own]


def few_queries_kernel(attention: StoredAttention, plan: Plan) -> tirx.PrimFunc:
    """The function as one launch, or as two, of which the second adds up what blocks of a head have."""
    builder, found = KernelBuilder(attention.wide.function), attention.blocks
    heads, staged = JoinedHeads(found, plan.shared), dict[ir.Var, str]()
    states = heads.count * plan.parts * heads.rows
    shared = PartialSums.of(builder.workspace, states, found.width) if plan.parts > 1 else None

    def of_thread(thread: Threads) -> tirx.Stmt:
        block = _Block(attention, plan, builder, thread, shared)
        sides = ((block.loaded_keys, plan.keys), (block.loaded_values, plan.values))
        staged.update({loaded: side.dtype for loaded, side in sides if not side.is_rows})
        return block.body()

    launches = [launch(heads.count * plan.parts, plan.warps * WARP, of_thread)]
    if shared is not None:
        launches.append(_second_launch(attention, plan, builder, shared))
    return attention.stored(builder.function(launches), staged)


def _second_launch(
    attention: StoredAttention, plan: Plan, builder: KernelBuilder, parts: PartialSums
) -> tirx.Stmt:
    """A thread for each result."""
    found, joined, exponents = attention.blocks, Joined.of(builder), Weights.of(attention.blocks)
    heads = JoinedHeads(found, plan.shared)
    count = heads.count * heads.rows * found.width

    def of_thread(thread: Threads) -> tirx.Stmt:
        number = thread.block * integer(BLOCK_THREADS) + thread.x
        line, column = (op(number, integer(found.width)) for op in (tirx.floordiv, tirx.floormod))
        head, row = (op(line, integer(heads.rows)) for op in (tirx.floordiv, tirx.floormod))

        def state(part: ir.Expr) -> ir.Expr:
            return (head * integer(plan.parts) + part) * integer(heads.rows) + row

        zero = integer(0)
        quotient = found.quotient(joined.result[zero], joined.total[zero])
        stored = found.store((*heads.line(head, row), column), quotient)
        body = sequence([*joined.added_up(parts, exponents, plan.parts, state, column), stored])
        return when(number < integer(count), body, always=count % BLOCK_THREADS == 0)

    return launch(ceil_div(count, BLOCK_THREADS), BLOCK_THREADS, of_thread)


class _Block:
    """What a thread does for its head."""

    def __init__(
        self,
        attention: StoredAttention,
        plan: Plan,
        builder: KernelBuilder,
        thread: Threads,
        shared: PartialSums | None,
    ) -> None:
        self.attention, self.found = attention, attention.blocks
        self.plan, self.builder, self.thread = plan, builder, thread.x
        self.threads, self.mask = thread, self.found.hiding_mask
        self.shared, self.block = shared, thread.block
        """Where it leaves its sums if blocks share a head."""
        self.exponents = Weights.of(self.found)
        self.head, self.part = (
            op(thread.block, integer(plan.parts)) for op in (tirx.floordiv, tirx.floormod)
        )
        self.heads = JoinedHeads(self.found, plan.shared)
        self.batch = self.heads.batch(self.head, integer(0))
        """Of its keys."""
        self.rows, self.turn = self.heads.rows, plan.turn
        self.turns = ceil_div(self.found.columns, plan.stride * plan.parts)
        """Of each block."""
        self.is_whole = self.found.columns == self.turns * plan.stride * plan.parts
        self.warp = tirx.floordiv(thread.x, integer(WARP))
        in_warp = tirx.floormod(thread.x, integer(WARP))
        self.group = tirx.floordiv(in_warp, integer(plan.lanes))
        self.lane = tirx.floormod(in_warp, integer(plan.lanes))
        self.groups = WARP // plan.lanes
        keys, values, registers = plan.keys, plan.values, builder.registers
        self.queries = registers((self.rows * keys.elements,), "float32", "queries")
        self.sums = registers((self.rows * values.elements,), "float32", "sums")
        self.loaded_keys, self.loaded_values = (
            registers((self.turn * side.elements,), ROWS if side.is_rows else "float32", side.name)
            for side in (keys, values)
        )
        self.scales = {
            side.name: registers((self.turn,), "float32", f"{side.name}_scales")
            for side in (keys, values)
            if side.is_rows
        }
        self.scores = registers((self.rows * self.turn,), "float32", "scores")
        self.peak, self.total, self.top = (
            registers((self.rows,), "float32", name) for name in ("peak", "total", "top")
        )
        self.shrink = registers((1,), "float32", "shrink")

    def body(self) -> tirx.Stmt:
        plan, zero = self.plan, tirx.FloatImm("float32", 0.0)
        end = self.builder.registers((1,), "int32", "end")

        def start(row: ir.Expr) -> tirx.Stmt:
            return sequence(
                [tirx.BufferStore(self.peak, LOWEST, [row]), tirx.BufferStore(self.total, zero, [row])]
            )

        def turn(number: ir.Expr) -> tirx.Stmt:
            first = self._first(number) + self.warp * integer(self.groups * self.turn)
            body = sequence(
                [
                    unrolled(self.turn, lambda u: self._load(plan.keys, self.loaded_keys, first, u)),
                    unrolled(self.turn, lambda u: self._load(plan.values, self.loaded_values, first, u)),
                    *self._scores(first),
                    unrolled(self.rows, self._added),
                ]
            )
            return when(number < end[integer(0)].astype("int64"), body, always=self.mask is None)

        return sequence(
            [
                self._load_queries(),
                unrolled(self.rows, start),
                unrolled(int(self.sums.shape[0]), lambda i: tirx.BufferStore(self.sums, zero, [i])),
                *([] if self.mask is None else self._find_end(self.mask, end)),
                loop(self.turns, turn),
                *self._joined(),
                *self._results(),
            ]
        )

    def _first(self, turn: ir.Expr) -> ir.Expr:
        """The first key of a turn of the block. Blocks that share a head take turns, so that each has as many
        of the keys that are seen, however few these are."""
        return (turn * integer(self.plan.parts) + self.part) * integer(self.plan.stride)

    def _find_end(self, mask: ir.TensorLoad, end: ir.Var) -> list[tirx.Stmt]:
        """Write the turn behind the last one of which some query sees a key; that behind all turns if a query
        sees no key at all, as then all keys may have the same weight. All threads look, at a key each."""
        stride, threads, at = self.plan.stride, self.plan.warps * WARP, [integer(0)]
        columns, keys = self.found.columns, self.turns * stride
        *_, heads, rows = (1, *self.found.lines(mask))
        numbers = range(self.plan.shared if heads > 1 else 1)
        lines = [(*self.heads.batch(self.head, integer(n)), integer(m)) for n in numbers for m in range(rows)]
        seen, now = (self.builder.registers((1,), "int32", name) for name in ("seen", "now"))
        """A bit for each line of the mask that sees some key."""
        of_lines, of_now, of_end = (tirx.BufferLoad(buffer, at) for buffer in (seen, now, end))
        all_seen, none = tirx.const((1 << len(lines)) - 1, "int32"), tirx.const(0, "int32")

        def bit(number: int, key: ir.Expr) -> ir.Expr:
            hides = self.found.hides(mask, (*lines[number], key))
            return tirx.Select(hides, none, tirx.const(1 << number, "int32"))

        def look(key: ir.Expr) -> list[tirx.Stmt]:
            noted = (bit(number, key) for number in range(len(lines)))
            return [
                tirx.BufferStore(now, reduce(lambda a, b: a | b, noted), at),
                tirx.BufferStore(seen, of_lines | of_now, at),
            ]

        def look_at_own(number: ir.Expr) -> tirx.Stmt:
            offset = number * integer(threads) + self.thread
            turn, inner = (op(offset, integer(stride)) for op in (tirx.floordiv, tirx.floormod))
            key = self._first(turn) + inner
            behind = tirx.Select(of_now > none, turn.astype("int32") + tirx.const(1, "int32"), none)
            found = [*look(self._existing(key)), tirx.BufferStore(end, tirx.max(of_end, behind), at)]
            exists = tirx.all(offset < integer(keys), key < integer(columns))
            return when(exists, sequence(found), always=self.is_whole and keys % threads == 0)

        def look_at_any(number: ir.Expr) -> tirx.Stmt:
            key = number * integer(threads) + self.thread
            body = sequence(look(tirx.min(key, integer(columns - 1))))
            return when(key < integer(columns), body, always=columns % threads == 0)

        def combined(place: ir.Var, combine: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
            return combined_by_block(self.builder, place, combine, self.threads, threads)

        looked = loop(ceil_div(keys, threads), look_at_own)
        with_seen = combined(seen, lambda a, b: a | b)
        if self.plan.parts > 1:
            # mostly each query sees one of the first keys, and nobody has to look at those of other blocks
            others = loop(ceil_div(columns, threads), look_at_any)
            rest = tirx.IfThenElse(of_lines < all_seen, others, None)
            with_seen = [look_at_any(integer(0)), *with_seen, rest, *combined(seen, lambda a, b: a | b)]
        turns = tirx.const(self.turns, "int32")
        return [
            *(tirx.BufferStore(buffer, none, at) for buffer in (end, seen)),
            looked,
            *combined(end, tirx.max),
            *with_seen,
            tirx.BufferStore(end, tirx.Select(of_lines < all_seen, turns, of_end), at),
        ]

    def _key(self, first: ir.Expr, u: ir.Expr) -> ir.Expr:
        """The group's `u`-th key of a turn; neighbouring groups have neighbouring keys."""
        return first + u * integer(self.groups) + self.group

    def _existing(self, key: ir.Expr) -> ir.Expr:
        return key if self.is_whole else tirx.min(key, integer(self.found.columns - 1))

    def _load_queries(self) -> tirx.Stmt:
        side = self.plan.keys

        def element(row: ir.Expr, at: ir.Expr) -> ir.Expr:
            return self.found.factor("scores", 0, (*self.heads.line(self.head, row), integer(0)), at)

        return unrolled(
            self.rows,
            lambda row: self._vectors(side, self.queries, row, lambda at: element(row, at)),
        )

    def _load(self, side: Side, target: ir.Var, first: ir.Expr, u: ir.Expr) -> tirx.Stmt:
        key = self._existing(self._key(first, u))

        def element(at: ir.Expr) -> ir.Expr:
            if side is self.plan.keys:
                return self.found.factor("scores", 1, (*self.batch, integer(0), key), at)
            return self.found.factor("context", 1, (*self.batch, integer(0), at), key)

        if not side.is_rows:
            return self._vectors(side, target, u, element)
        scale = tirx.BufferStore(self.scales[side.name], self.attention.scale(element(integer(0))), [u])
        return sequence([self._vectors(side, target, u, lambda at: self.attention.codes(element(at))), scale])

    def _scaled(self, side: Side, u: ir.Expr, value: ir.Expr) -> ir.Expr:
        """What a product with the `u`-th key or value of a turn is, as that of its codes."""
        return value * self.scales[side.name][u] if side.is_rows else value

    def _vectors(
        self, side: Side, target: ir.Var, number: ir.Expr, element: Callable[[ir.Expr], ir.Expr]
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
            zeros = stored(lambda _: tirx.const(0, str(target.dtype)))
            return tirx.IfThenElse(start < integer(side.extent), stored(element), zeros)

        return unrolled(side.pieces, vector)

    def _scores(self, first: ir.Expr) -> list[tirx.Stmt]:
        """Scores become weights; what there is of a row shrinks with a greater maximum."""
        elements, lanes = self.plan.keys.elements, self.plan.lanes
        distances = [lanes >> level for level in range(1, lanes.bit_length())]

        def place(row: ir.Expr, u: ir.Expr) -> ir.Expr:
            return row * integer(self.turn) + u

        def product(row: ir.Expr, u: ir.Expr) -> tirx.Stmt:
            at = place(row, u)

            def add(e: ir.Expr) -> tirx.Stmt:
                factors = (
                    self.queries[row * integer(elements) + e],
                    _number(self.loaded_keys[u * integer(elements) + e]),
                )
                return tirx.BufferStore(self.scores, self.scores[at] + factors[0] * factors[1], [at])

            clear = tirx.BufferStore(self.scores, tirx.FloatImm("float32", 0.0), [at])
            combine = combined_by_lanes(self.scores, at, lambda a, b: a + b, distances)
            whole = self._scaled(self.plan.keys, u, tirx.BufferLoad(self.scores, [at]))
            scaled = [tirx.BufferStore(self.scores, whole, [at])] if self.plan.keys.is_rows else []
            return sequence([clear, unrolled(elements, add), *combine, *scaled, *logit(row, u)])

        def logit(row: ir.Expr, u: ir.Expr) -> list[tirx.Stmt]:
            at, key = [place(row, u)], self._key(first, u)
            existing, score = self._existing(key), tirx.BufferLoad(self.scores, at)
            value = score
            if not self.exponents.is_scaled_only:
                value = self.found.logit((*self.heads.line(self.head, row), existing), score)
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
            added = tirx.BufferStore(self.total, self.total[row] + own, [row])
            scaled = tirx.BufferStore(self.scores, self._scaled(self.plan.values, u, own), [at])
            return sequence([stored, added, scaled] if self.plan.values.is_rows else [stored, added])

        def add(e: ir.Expr) -> tirx.Stmt:
            at = row * integer(self.plan.values.elements) + e

            def key(u: ir.Expr) -> tirx.Stmt:
                value = _number(self.loaded_values[u * integer(self.plan.values.elements) + e])
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
                unrolled(self.plan.values.elements, add),
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
        lanes, elements = self.plan.lanes, self.plan.values.elements
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
        plan, values, rows = self.plan, self.plan.values, self.rows
        width, threads = self.found.width, plan.warps * WARP
        parts, joined = PartialSums.of(self.builder.shared, plan.warps * rows, width), Joined.of(self.builder)

        def note(row: ir.Expr) -> tirx.Stmt:
            state = self.warp * integer(rows) + row

            def element(piece: ir.Expr, e: ir.Expr) -> tirx.Stmt:
                own = self.sums[(row * integer(values.pieces) + piece) * integer(values.width) + e]
                return parts.stored(state, values.first(piece, self.lane) + e, own)

            def piece(number: ir.Expr) -> tirx.Stmt:
                body = unrolled(values.width, lambda e: element(number, e))
                exists = values.first(number, self.lane) < integer(width)
                return when(exists, body, always=values.is_whole)

            noted = parts.noted(state, self.peak[row], self.total[row])
            return sequence([*noted, unrolled(values.pieces, piece)])

        def result(turn: ir.Expr) -> tirx.Stmt:
            number = turn * integer(threads) + self.thread
            row, column = tirx.floordiv(number, integer(width)), tirx.floormod(number, integer(width))

            def state(warp: ir.Expr) -> ir.Expr:
                return warp * integer(rows) + row

            added_up = joined.added_up(parts, self.exponents, plan.warps, state, column)
            body = sequence([*added_up, *self._stored(row, column, joined)])
            return when(number < integer(rows * width), body, always=rows * width % threads == 0)

        is_first = self.group.equal(integer(0))
        return [
            when(is_first, unrolled(rows, note), always=self.groups == 1),
            loop(ceil_div(rows * width, threads), result),
        ]

    def _stored(self, row: ir.Expr, column: ir.Expr, joined: Joined) -> list[tirx.Stmt]:
        """Write a result, or what the block has of it."""
        peak, total, result = (b[integer(0)] for b in (joined.peak, joined.total, joined.result))
        if self.shared is None:
            line = self.heads.line(self.head, row)
            return [self.found.store((*line, column), self.found.quotient(result, total))]
        state = self.block * integer(self.rows) + row
        return [*self.shared.noted(state, peak, total), self.shared.stored(state, column, result)]


def _number(loaded: ir.Expr) -> ir.Expr:
    """What was loaded as float32."""
    return tirx.Cast("float32", loaded) if str(loaded.ty.dtype) == ROWS else loaded
