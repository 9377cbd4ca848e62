"""The loop nest of attention of few queries.

A block has a head, or a part of its keys; a group of lanes some of the keys of each turn:

    the turn behind the last one of which a query sees a key, as a mask says
    for each turn up to that:
        load some keys and values, vectors of 128 bits a lane
        scores: a lane's share of each product, added up by the group
        weights, relative to the greatest score so far; sums += weights values
    groups of a warp, warps, and then blocks that share a head add up their sums
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

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
    """Blocks that share a head."""

    @property
    def lanes(self) -> int:
        """Of a group."""
        return self.keys.lanes

    @property
    def stride(self) -> int:
        """Keys of a block in a turn."""
        return self.warps * WARP // self.lanes * self.turn


def few_queries_kernel(attention: StoredAttention, plan: Plan) -> tirx.PrimFunc:
    """The function as one launch, or as two, of which the second adds up what blocks of a head have."""
    builder, found = KernelBuilder(attention.wide.function), attention.blocks
    heads, staged = math.prod(found.batch), dict[ir.Var, str]()
    states = heads * plan.parts * found.rows
    shared = PartialSums.of(builder.workspace, states, found.width) if plan.parts > 1 else None

    def of_thread(thread: Threads) -> tirx.Stmt:
        block = _Block(attention, plan, builder, thread, shared)
        staged.update({block.loaded_keys: plan.keys.dtype, block.loaded_values: plan.values.dtype})
        return block.body()

    launches = [launch(heads * plan.parts, plan.warps * WARP, of_thread)]
    if shared is not None:
        launches.append(_second_launch(attention, plan, builder, shared))
    return attention.stored(builder.function(launches), staged)


def _second_launch(
    attention: StoredAttention, plan: Plan, builder: KernelBuilder, parts: PartialSums
) -> tirx.Stmt:
    """A thread for each result."""
    found, joined, exponents = attention.blocks, Joined.of(builder), Weights.of(attention.blocks)
    count = math.prod(found.batch) * found.rows * found.width

    def of_thread(thread: Threads) -> tirx.Stmt:
        number = thread.block * integer(BLOCK_THREADS) + thread.x
        line, column = (op(number, integer(found.width)) for op in (tirx.floordiv, tirx.floormod))
        head, row = (op(line, integer(found.rows)) for op in (tirx.floordiv, tirx.floormod))

        def state(part: ir.Expr) -> ir.Expr:
            return (head * integer(plan.parts) + part) * integer(found.rows) + row

        zero = integer(0)
        quotient = found.quotient(joined.result[zero], joined.total[zero])
        stored = found.store((*found.batch_at(head), row, column), quotient)
        added_up = joined.added_up(parts, exponents, plan.parts, state, column)
        unseen = joined.weighed_unseen(found, exponents, (*found.batch_at(head), row), column)
        body = sequence([*added_up, *unseen, stored])
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
        self.found, self.plan, self.builder, self.thread = attention.blocks, plan, builder, thread.x
        self.threads, self.mask = thread, self.found.hiding_mask
        self.shared, self.block = shared, thread.block
        """Where it leaves its sums if blocks share a head."""
        self.exponents = Weights.of(self.found)
        self.batch = self.found.batch_at(tirx.floordiv(thread.block, integer(plan.parts)))
        self.rows, self.turn = self.found.rows, plan.turn
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
        self.loaded_keys = registers((self.turn * keys.elements,), "float32", "keys")
        self.loaded_values = registers((self.turn * values.elements,), "float32", "values")
        self.scores = registers((self.rows * self.turn,), "float32", "scores")
        self.peak, self.total, self.top = (
            registers((self.rows,), "float32", name) for name in ("peak", "total", "top")
        )
        self.shrink = registers((1,), "float32", "shrink")

    def body(self) -> tirx.Stmt:
        plan, zero = self.plan, tirx.FloatImm("float32", 0.0)
        start_turn = tirx.floormod(self.block, integer(plan.parts)) * integer(self.turns)
        end = self.builder.registers((1,), "int32", "end")

        def start(row: ir.Expr) -> tirx.Stmt:
            return sequence(
                [tirx.BufferStore(self.peak, LOWEST, [row]), tirx.BufferStore(self.total, zero, [row])]
            )

        def turn(number: ir.Expr) -> tirx.Stmt:
            first = (start_turn + number) * integer(plan.stride) + self.warp * integer(
                self.groups * self.turn
            )
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
                *([] if self.mask is None else self._find_end(self.mask, start_turn, end)),
                loop(self.turns, turn),
                *self._joined(),
                *self._results(),
            ]
        )

    def _find_end(self, mask: ir.TensorLoad, start_turn: ir.Expr, end: ir.Var) -> list[tirx.Stmt]:
        """Write the turn behind the last one of which some query sees a key: as many threads look as there
        are, at a key each."""
        stride, threads, at = self.plan.stride, self.plan.warps * WARP, [integer(0)]
        *_, rows = self.found.lines(mask)
        keys = self.turns * stride

        def look(number: ir.Expr) -> tirx.Stmt:
            offset = number * integer(threads) + self.thread
            key = start_turn * integer(stride) + offset
            turn = tirx.floordiv(offset, integer(stride)).astype("int32") + tirx.const(1, "int32")

            def row(m: ir.Expr) -> tirx.Stmt:
                is_hidden = self.found.hides(mask, (*self.batch, m, self._existing(key)))
                latest = tirx.max(tirx.BufferLoad(end, at), turn)
                return tirx.BufferStore(end, tirx.Select(is_hidden, tirx.BufferLoad(end, at), latest), at)

            exists = tirx.all(offset < integer(keys), key < integer(self.found.columns))
            return when(exists, unrolled(rows, row), always=self.is_whole and keys % threads == 0)

        looked = loop(ceil_div(keys, threads), look)
        found = combined_by_block(self.builder, end, tirx.max, self.threads, threads)
        return [tirx.BufferStore(end, tirx.const(0, "int32"), at), looked, *found]

    def _key(self, first: ir.Expr, u: ir.Expr) -> ir.Expr:
        """The group's `u`-th key of a turn; neighbouring groups have neighbouring keys."""
        return first + u * integer(self.groups) + self.group

    def _existing(self, key: ir.Expr) -> ir.Expr:
        return key if self.is_whole else tirx.min(key, integer(self.found.columns - 1))

    def _load_queries(self) -> tirx.Stmt:
        side = self.plan.keys

        def element(row: ir.Expr, at: ir.Expr) -> ir.Expr:
            return self.found.factor("scores", 0, (*self.batch, row, integer(0)), at)

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

        return self._vectors(side, target, u, element)

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
            zeros = stored(lambda _: tirx.FloatImm("float32", 0.0))
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
            at = row * integer(self.plan.values.elements) + e

            def key(u: ir.Expr) -> tirx.Stmt:
                value = self.loaded_values[u * integer(self.plan.values.elements) + e]
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
        plan, found, values, rows = self.plan, self.found, self.plan.values, self.rows
        width, threads = found.width, plan.warps * WARP
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
            if self.shared is None:
                added_up += joined.weighed_unseen(found, self.exponents, (*self.batch, row), column)
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
            return [self.found.store((*self.batch, row, column), self.found.quotient(result, total))]
        state = self.block * integer(self.rows) + row
        return [*self.shared.noted(state, peak, total), self.shared.stored(state, column, result)]
