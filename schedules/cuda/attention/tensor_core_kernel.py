"""The loop nest of attention on tensor cores: Dao, "FlashAttention-2" (2023).

A warp has 16 queries, and a share of the keys of each tile:

    fragments of the queries to registers
    for each tile of keys:
        copy keys and values to shared memory; barrier
        scores: 16 x 8 a matrix instruction, in registers
        weights, relative to the greatest score so far; what has been summed up shrinks accordingly
        sums += weights values: a lane's scores lie where it needs the weights as a left factor
    sums of warps that share queries are added up; results

With asynchronous copies a tile comes while the one before is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.operands import keys_operand, values_operand
from hybridc.schedules.cuda.attention.read import StoredAttention
from hybridc.schedules.cuda.attention.seen_keys import tiles_of_seen_keys
from hybridc.schedules.cuda.attention.weights import LOWEST, Weights
from hybridc.schedules.cuda.core.copies import awaited, committed
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
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.core.warps import combined_by_lanes
from hybridc.schedules.cuda.tensor_core.instructions import barrier, multiply_add, packed
from hybridc.schedules.cuda.tensor_core.staging import Operand, in_order

ROWS = 16
"""Queries of a warp: rows of a matrix instruction."""
STEP = 16
"""Of the depth of a matrix instruction, and columns of the fragments that a lane loads at a time."""
COLUMNS = 8
"""Of the results of a matrix instruction."""
_FLOAT = "float32"
PAD = 4
"""Floats behind a row of sums that warps exchange: eight rows begin in different banks."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a block of threads divides its work among its warps."""

    down: int
    """Groups of warps with queries of their own."""
    across: int
    """Warps that share queries, and have keys of their own."""
    keys: int
    """Of a warp in a tile."""
    copies: bool = False
    """Whether tiles are copied asynchronously, while shared memory holds two."""

    @property
    def threads(self) -> int:
        return self.down * self.across * WARP

    @property
    def rows(self) -> int:
        return self.down * ROWS

    @property
    def tile(self) -> int:
        """Keys of the block in a tile."""
        return self.across * self.keys


def tensor_core_kernel(attention: StoredAttention, dtype: str, way: Way) -> tirx.PrimFunc:
    """The function as one launch, whose blocks have `way.rows` queries each."""
    builder = KernelBuilder(attention.wide.function)
    found = attention.blocks
    blocks = ceil_div(found.rows, way.rows)
    for extent in found.batch:
        blocks *= extent
    staged: dict[ir.Var, str] = {}

    def of_thread(thread: Threads) -> tirx.Stmt:
        block = _Block(attention, dtype, way, builder, thread)
        body = block.body()
        staged.update(dict.fromkeys((*block.loaded, *block.shared), dtype))
        return tirx.AttrStmt(integer(0), "pragma_unroll_explicit", tirx.const(0), body)

    return attention.stored(builder.function([launch(blocks, way.threads, of_thread)]), staged)


class _Block:
    """What a thread does for its block's queries."""

    def __init__(
        self, attention: StoredAttention, dtype: str, way: Way, builder: KernelBuilder, thread: Threads
    ) -> None:
        self.found, self.dtype, self.way, self.thread = attention.blocks, dtype, way, thread.x
        self.builder, self.threads = builder, thread
        found, warp = self.found, tirx.floordiv(thread.x, integer(WARP))
        self.depth, self.width = (ceil_div(e, STEP) * STEP for e in (found.depth, found.width))
        row_tiles = integer(ceil_div(found.rows, way.rows))
        self.batch = found.batch_at(tirx.floordiv(thread.block, row_tiles))
        self.group = tirx.floordiv(warp, integer(way.across))
        self.share = tirx.floormod(warp, integer(way.across))
        self.lane = tirx.floormod(thread.x, integer(WARP))
        self.line = tirx.floordiv(self.lane, integer(4))
        self.pair = tirx.floormod(self.lane, integer(4)) * integer(2)
        self.first = tirx.floormod(thread.block, row_tiles) * integer(way.rows) + self.group * integer(ROWS)
        self.operands = (
            keys_operand(found, self.batch, way.tile, self.depth, way.threads),
            values_operand(found, self.batch, way.tile, self.width, way.threads),
        )
        self.exponents = Weights.of(found)
        self.copied = tuple(way.copies and o.can_be_copied for o in self.operands)
        self.stages = 2 if any(self.copied) else 1
        self.shared = tuple(
            builder.shared((self.stages * o.elements,), _FLOAT, o.name) for o in self.operands
        )
        self.loaded = tuple(
            builder.registers((o.pieces * o.width,), _FLOAT, f"{o.name}_loaded") for o in self.operands
        )
        registers = builder.registers
        self.queries = registers((self.depth // STEP * 4,), "uint32", "queries")
        self.weights = registers((4,), "uint32", "weights")
        self.fragments = registers((4,), "uint32", "fragments")
        self.element_pair = registers((2,), _FLOAT, "pair")
        self.scores = registers((way.keys // COLUMNS * 4,), _FLOAT, "scores")
        self.sums = registers((self.width // COLUMNS * 4,), _FLOAT, "sums")
        self.peak, self.total, self.top, self.shrink = (
            registers((2,), _FLOAT, name) for name in ("peak", "total", "top", "shrink")
        )
        if way.across > 1:
            states = (way.down * way.across * ROWS,)
            self.peaks, self.totals = (builder.shared(states, _FLOAT, n) for n in ("peaks", "totals"))
            slots = way.across // 2 * way.down * ROWS
            self.partial = builder.shared((slots * (self.width + PAD),), _FLOAT, "partial")

    def body(self) -> tirx.Stmt:
        looking, tiles = self._tiles()

        def turn(number: ir.Expr) -> tirx.Stmt:
            # a loop of as many turns would have numbers that follow from data, and every access checked
            body = sequence([*self._arrival(number, tiles), *self._multiplied(number)])
            return body if isinstance(tiles, int) else when(number < tiles, body)

        return sequence(
            [
                *looking,
                # what it shares may lie where `_cleared` writes
                *([barrier()] if looking else []),
                *self._cleared(),
                self._load_queries(),
                *self._start(),
                loop(ceil_div(self.found.columns, self.way.tile), turn),
                *(self._added_up() if self.way.across > 1 else []),
                self._results(),
            ]
        )

    def _tiles(self) -> tuple[list[tirx.Stmt], int | ir.Expr]:
        """Of keys that the block's queries see, and what finds how many these are."""
        row_tiles = integer(ceil_div(self.found.rows, self.way.rows))
        first = tirx.floormod(self.threads.block, row_tiles) * integer(self.way.rows)
        block = self.batch, first, self.way.rows
        return tiles_of_seen_keys(
            self.builder, self.found, block, self.way.tile, self.threads, self.way.threads
        )

    # ------------------------------------------------------------------------------ from global memory

    def _cleared(self) -> list[tirx.Stmt]:
        """Zero sums and fragments, and the end of shared memory: TVM does not see what instructions write,
        and would make their arrays shorter. The end is padding."""

        def cleared(buffer: ir.Var) -> tirx.Stmt:
            zero = tirx.const(0, str(buffer.dtype))
            return unrolled(int(buffer.shape[0]), lambda i: tirx.BufferStore(buffer, zero, [i]))

        arrays = (self.sums, self.queries, self.weights, self.fragments, self.total)
        ends = (tirx.BufferStore(s, _number(0), [integer(int(s.shape[0]) - 1)]) for s in self.shared)
        lowest = unrolled(2, lambda half: tirx.BufferStore(self.peak, LOWEST, [half]))
        return [*map(cleared, arrays), *ends, lowest]

    def _load_queries(self) -> tirx.Stmt:
        """A lane's pairs of a left factor; rows that do not exist repeat the last one."""
        found = self.found

        def pair(step: ir.Expr, deep: ir.Expr, half: ir.Expr) -> tirx.Stmt:
            row = tirx.min(self._row(half), integer(found.rows - 1))
            start = step * integer(STEP) + deep * integer(8) + self.pair

            def element(e: ir.Expr) -> tirx.Stmt:
                value = found.factor("scores", 0, (*self.batch, row, integer(0)), start + e)
                if found.depth % 2:
                    value = tirx.if_then_else(start + e < integer(found.depth), value, _number(0))
                return tirx.BufferStore(self.element_pair, value, [e])

            loaded = unrolled(2, element) if found.depth % 2 else vectorized(2, element)
            if found.depth % STEP and found.depth % 2 == 0:
                zeros = vectorized(2, lambda e: tirx.BufferStore(self.element_pair, _number(0), [e]))
                loaded = tirx.IfThenElse(start < integer(found.depth), loaded, zeros)
            place = tirx.BufferLoad(self.queries, [step * integer(4) + deep * integer(2) + half])
            return sequence([loaded, packed(place, _at(self.element_pair, 0), self.dtype)])

        return unrolled_nest((self.depth // STEP, 2, 2), pair)

    def _start(self) -> list[tirx.Stmt]:
        """Begin to copy the first tile."""
        return [*self._copies(integer(0), integer(0)), committed()] if any(self.copied) else []

    def _arrival(self, number: ir.Expr, tiles: int | ir.Expr) -> list[tirx.Stmt]:
        """Bring a tile to shared memory, or wait for it and begin to copy the next one."""
        loads = [
            operand.load(loaded, *self._place(operand, number), self.thread)
            for operand, loaded, copied in zip(self.operands, self.loaded, self.copied, strict=True)
            if not copied
        ]
        if not any(self.copied):
            return [*loads, barrier(), *self._stores(integer(0)), barrier()]
        stage = tirx.floormod(number, integer(2))
        # what is filled was read in the turn before, which all have left behind the barrier
        statements = [*loads, *self._stores(stage), awaited(0), barrier()]
        if not isinstance(tiles, int) or tiles > 1:
            following = number + integer(1)
            copies = sequence(self._copies(following, integer(1) - stage))
            statements += [tirx.IfThenElse(following < tiles, copies, None), committed()]
        return statements

    def _copies(self, number: ir.Expr, stage: ir.Expr) -> list[tirx.Stmt]:
        return [
            operand.copy(shared, stage, *self._place(operand, number), self.thread)
            for operand, shared, copied in zip(self.operands, self.shared, self.copied, strict=True)
            if copied
        ]

    def _stores(self, stage: ir.Expr) -> list[tirx.Stmt]:
        sides = zip(self.operands, self.loaded, self.shared, self.copied, strict=True)
        return [o.store(loaded, shared, stage, self.thread) for o, loaded, shared, c in sides if not c]

    def _place(self, operand: Operand, number: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """First position and slice of a tile: keys are positions of one operand, the depth of the other."""
        is_keys = operand is self.operands[0]
        return (number * integer(self.way.tile), integer(0)) if is_keys else (integer(0), number)

    # ------------------------------------------------------------------------------------ one tile

    def _multiplied(self, number: ir.Expr) -> list[tirx.Stmt]:
        stage = tirx.floormod(number, integer(self.stages))
        first = self.share * integer(self.way.keys)
        """Of the warp's keys in the tile."""
        return [
            self._scores(stage, first),
            *self._weights(number * integer(self.way.tile) + first),
            self._products(stage, first),
        ]

    def _scores(self, stage: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        keys, shared = self.operands[0], self.shared[0]
        zero = unrolled(int(self.scores.shape[0]), lambda i: tirx.BufferStore(self.scores, _number(0), [i]))

        def step(columns: ir.Expr, deep: ir.Expr) -> tirx.Stmt:
            places, depth = in_order(first + columns * integer(STEP)), deep * integer(STEP)
            loaded = keys.fragments(
                self.fragments, integer(0), shared, stage, places, depth, self.lane, depth_first=True
            )
            left = tirx.BufferLoad(self.queries, [deep * integer(4)])
            return sequence([loaded, *self._two_products(self.scores, columns, left)])

        return sequence([zero, unrolled_nest((self.way.keys // STEP, self.depth // STEP), step)])

    def _two_products(self, sums: ir.Var, columns: ir.Expr, left: ir.TensorLoad) -> list[tirx.Stmt]:
        """Multiply a left factor by the two right ones in `fragments`: 16 columns."""
        return [
            multiply_add(
                tirx.BufferLoad(sums, [columns * integer(8) + integer(4 * side)]),
                left,
                _at(self.fragments, 2 * side),
                self.dtype,
            )
            for side in range(2)
        ]

    def _weights(self, begin: ir.Expr) -> list[tirx.Stmt]:
        """Scores become weights; maximum, sum and products so far follow a new maximum."""
        columns = self.way.keys // COLUMNS

        def place(j: ir.Expr, half: ir.Expr, e: ir.Expr) -> ir.Expr:
            return (j * integer(2) + half) * integer(2) + e

        def largest(half: ir.Expr, j: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            score = tirx.BufferLoad(self.scores, [place(j, half, e)])
            return tirx.BufferStore(self.top, tirx.max(tirx.BufferLoad(self.top, [half]), score), [half])

        def shrinking(half: ir.Expr) -> tirx.Stmt:
            peak, top = tirx.BufferLoad(self.peak, [half]), tirx.BufferLoad(self.top, [half])
            return sequence(
                [
                    *combined_by_lanes(self.top, half, tirx.max, (1, 2)),
                    tirx.BufferStore(self.shrink, self.exponents.shrunk(peak, top), [half]),
                    tirx.BufferStore(self.peak, tirx.BufferLoad(self.top, [half]), [half]),
                    tirx.BufferStore(self.total, self.total[half] * self.shrink[half], [half]),
                ]
            )

        def weight(half: ir.Expr, j: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            at = [place(j, half, e)]
            score, peak = tirx.BufferLoad(self.scores, at), tirx.BufferLoad(self.peak, [half])
            stored = tirx.BufferStore(self.scores, self.exponents.weight(score, peak), at)
            own = tirx.BufferLoad(self.scores, at)
            return sequence([stored, tirx.BufferStore(self.total, self.total[half] + own, [half])])

        def shrunk(j: ir.Expr, half: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            at = [place(j, half, e)]
            return tirx.BufferStore(self.sums, tirx.BufferLoad(self.sums, at) * self.shrink[half], at)

        return [
            *self._logits(begin, place),
            unrolled(2, lambda half: tirx.BufferStore(self.top, tirx.BufferLoad(self.peak, [half]), [half])),
            unrolled_nest((2, columns, 2), largest),
            unrolled(2, shrinking),
            unrolled_nest((2, columns, 2), weight),
            unrolled_nest((self.width // COLUMNS, 2, 2), shrunk),
        ]

    def _logits(
        self, begin: ir.Expr, place: Callable[[ir.Expr, ir.Expr, ir.Expr], ir.Expr]
    ) -> list[tirx.Stmt]:
        """What the softmax sees of the scores: those of keys that do not exist are -inf."""
        found, is_whole = self.found, self.found.columns % self.way.tile == 0
        extents = (self.way.keys // COLUMNS, 2)

        def logit(j: ir.Expr, half: ir.Expr) -> tirx.Stmt:
            row = tirx.min(self._row(half), integer(found.rows - 1))
            column = begin + j * integer(COLUMNS) + self.pair

            def element(e: ir.Expr) -> tirx.Stmt:
                at = [place(j, half, e)]
                key = column + e if is_whole else tirx.min(column + e, integer(found.columns - 1))
                value = found.logit((*self.batch, row, key), tirx.BufferLoad(self.scores, at))
                return tirx.BufferStore(self.scores, value, at)

            return vectorized(2, element) if is_whole else unrolled(2, element)

        def hidden(j: ir.Expr, half: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            missing = begin + j * integer(COLUMNS) + self.pair + e >= integer(found.columns)
            return when(missing, tirx.BufferStore(self.scores, _number(float("-inf")), [place(j, half, e)]))

        statements = [] if self.exponents.is_scaled_only else [unrolled_nest(extents, logit)]
        if not is_whole:
            is_last = begin + integer(self.way.keys) > integer(found.columns)
            statements.append(when(is_last, unrolled_nest((*extents, 2), hidden)))
        return statements

    def _products(self, stage: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        """Weights in 16 bits times values."""
        values, shared = self.operands[1], self.shared[1]

        def keys(step: ir.Expr) -> tirx.Stmt:
            depth = first + step * integer(STEP)

            def pair(number: ir.Expr) -> tirx.Stmt:
                source = tirx.BufferLoad(self.scores, [step * integer(8) + number * integer(2)])
                return packed(tirx.BufferLoad(self.weights, [number]), source, self.dtype)

            def columns(number: ir.Expr) -> tirx.Stmt:
                places = in_order(number * integer(STEP))
                loaded = values.fragments(
                    self.fragments, integer(0), shared, stage, places, depth, self.lane, depth_first=True
                )
                return sequence([loaded, *self._two_products(self.sums, number, _at(self.weights, 0))])

            return sequence([unrolled(4, pair), unrolled(self.width // STEP, columns)])

        return unrolled(self.way.keys // STEP, keys)

    # -------------------------------------------------------------------------------------- results

    def _row(self, half: ir.Expr) -> ir.Expr:
        return self.first + self._line(half)

    def _added_up(self) -> list[tirx.Stmt]:
        """Give the first of the warps that share queries the sums of all of them, relative to the greatest
        score of all."""
        across = self.way.across

        def state(share: ir.Expr, half: ir.Expr) -> ir.Expr:
            group = self.group * integer(across) + share
            return (group * integer(2) + half) * integer(8) + self.line

        def noted(half: ir.Expr) -> tirx.Stmt:
            at = [state(self.share, half)]
            peak, total = tirx.BufferLoad(self.peak, [half]), tirx.BufferLoad(self.total, [half])
            return sequence(
                [tirx.BufferStore(self.peaks, peak, at), tirx.BufferStore(self.totals, total, at)]
            )

        def largest(half: ir.Expr, share: ir.Expr) -> tirx.Stmt:
            other = tirx.BufferLoad(self.peaks, [state(share, half)])
            return tirx.BufferStore(self.top, tirx.max(tirx.BufferLoad(self.top, [half]), other), [half])

        def scaled(peak: ir.Expr, half: ir.Expr) -> ir.Expr:
            return self.exponents.shrunk(peak, tirx.BufferLoad(self.top, [half]))

        def added(half: ir.Expr, share: ir.Expr) -> tirx.Stmt:
            at = [state(share, half)]
            other = tirx.BufferLoad(self.totals, at) * scaled(tirx.BufferLoad(self.peaks, at), half)
            return tirx.BufferStore(self.total, self.total[half] + other, [half])

        def own(half: ir.Expr) -> tirx.Stmt:
            value = scaled(tirx.BufferLoad(self.peak, [half]), half)
            return tirx.BufferStore(self.shrink, value, [half])

        def each(body: Callable[[ir.Expr, ir.Expr], tirx.Stmt], slot: ir.Expr) -> tirx.Stmt:
            """What `body` makes of all sums and their places in a slot."""

            def pair(j: ir.Expr, half: ir.Expr) -> tirx.Stmt:
                line = (slot * integer(self.way.down) + self.group) * integer(ROWS) + self._line(half)
                at = line * integer(self.width + PAD) + j * integer(COLUMNS) + self.pair
                own = (j * integer(2) + half) * integer(2)
                return vectorized(2, lambda e: body(own + e, at + e))

            return unrolled_nest((self.width // COLUMNS, 2), pair)

        def written(own: ir.Expr, at: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.partial, tirx.BufferLoad(self.sums, [own]), [at])

        def taken(own: ir.Expr, at: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(self.sums, self.sums[own] + self.partial[at], [own])

        def halved(count: int) -> list[tirx.Stmt]:
            """The first `count` warps add the sums of as many others to their own."""
            givers = tirx.all(self.share >= integer(count), self.share < integer(2 * count))
            return [
                when(givers, each(written, self.share - integer(count))),
                barrier(),
                when(self.share < integer(count), each(taken, self.share)),
                barrier(),
            ]

        def shrunk(j: ir.Expr, half: ir.Expr, e: ir.Expr) -> tirx.Stmt:
            at = [(j * integer(2) + half) * integer(2) + e]
            return tirx.BufferStore(self.sums, tirx.BufferLoad(self.sums, at) * self.shrink[half], at)

        is_first = tirx.floormod(self.lane, integer(4)).equal(integer(0))
        counts = [across >> level for level in range(1, across.bit_length())]
        return [
            unrolled(2, lambda half: sequence(self._total(half))),
            when(is_first, unrolled(2, noted)),
            barrier(),
            unrolled(2, lambda half: tirx.BufferStore(self.top, LOWEST, [half])),
            unrolled_nest((2, across), largest),
            unrolled(2, lambda half: tirx.BufferStore(self.total, _number(0), [half])),
            unrolled_nest((2, across), added),
            unrolled(2, own),
            unrolled_nest((self.width // COLUMNS, 2, 2), shrunk),
            *(statement for count in counts for statement in halved(count)),
        ]

    def _line(self, half: ir.Expr) -> ir.Expr:
        """Of a warp's queries."""
        return half * integer(8) + self.line

    def _total(self, half: ir.Expr) -> list[tirx.Stmt]:
        """Give the lanes of a row the sum of all of its weights."""
        return combined_by_lanes(self.total, half, lambda a, b: a + b, (1, 2))

    def _results(self) -> tirx.Stmt:
        found = self.found

        def invert(half: ir.Expr) -> tirx.Stmt:
            combine = self._total(half) if self.way.across == 1 else []
            inverse = found.quotient(_number(1), tirx.BufferLoad(self.total, [half]))
            return sequence([*combine, tirx.BufferStore(self.total, inverse, [half])])

        def pair(j: ir.Expr, half: ir.Expr) -> tirx.Stmt:
            row, column = self._row(half), j * integer(COLUMNS) + self.pair

            def element(e: ir.Expr) -> tirx.Stmt:
                total = self.sums[(j * integer(2) + half) * integer(2) + e]
                return found.store((*self.batch, row, column + e), total * self.total[half])

            if found.width % 2:
                body = unrolled(2, lambda e: when(column + e < integer(found.width), element(e)))
            else:
                is_whole = found.width % COLUMNS == 0
                body = when(column < integer(found.width), vectorized(2, element), always=is_whole)
            return when(row < integer(found.rows), body, always=found.rows % self.way.rows == 0)

        stored = unrolled_nest((ceil_div(found.width, COLUMNS), 2), pair)
        has_all = self.share.equal(integer(0))
        return sequence([unrolled(2, invert), when(has_all, stored, always=self.way.across == 1)])


def _number(value: float) -> tirx.FloatImm:
    return tirx.FloatImm(_FLOAT, value)


def _at(buffer: ir.Var, place: int) -> ir.TensorLoad:
    return tirx.BufferLoad(buffer, [integer(place)])
