"""Scaled dot-product attention, as `passes/fuse/attention.py` writes it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks, read_attention
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    prefetch,
    sequence,
    unrolled,
    vectorized,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import (
    finish,
)
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.matmul.kernel import Element, GemmAccess, gemm_kernel, rank_gemm_tiles
from hybridc.schedules.cpu.reduction.softmax import exp_of_nonpositive
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="matmul")
def attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` over any batch axes, all of them float32.

    Tiling: keys are copied into panels once. A task is a block of query rows: its scores for all keys stay in
    L1 (rows x keys), where they become weights; the second product reads them as its scalars and the values
    as its vectors. The sum of the weights divides the result, not each weight.

    Error: that of the two products and exp, at most 2e-6 of the result's scale for a thousand keys.
    """
    found = read_attention(request.function)
    if found is None:
        return None
    isa = request.target.isa
    # both products share the rows of a block, so the first one's tile decides them
    first = rank_gemm_tiles(isa, found.rows, found.columns)[0][1]
    second = _value_tile(first, found.width, isa.lanes(), isa.vector_registers)
    if second is None:
        return None
    panels = ceil_div(found.columns, first.columns)
    batches = math.prod(found.batch)
    keys = tirx.decl_buffer((batches, panels, found.depth, first.columns), "float32", "keys")
    buffers = [keys]
    stages = [_pack_keys(found, keys, first.lanes), _rows(found, first, second, keys, buffers)]
    return finish(
        function_of(request.function, list(request.function.params), stages, buffers), attention.__name__
    )


def _value_tile(first: Tile, width: int, lanes: int, registers: int) -> Tile | None:
    """Rows of the first product, and as many vectors of the value's width as registers allow."""
    # a tail of the values' vectors would need conditions in the inner loop
    if width % lanes:
        return None
    vectors = width // lanes
    # accumulators, the values' vectors and one weight have to fit the registers
    fitting = (v for v in range(vectors, 0, -1) if vectors % v == 0 and first.rows * v + v + 1 <= registers)
    found = next(fitting, None)
    return None if found is None else Tile(first.rows, 1, found, lanes)


def _pack_keys(found: AttentionBlocks, keys: ir.Var, lanes: int) -> tirx.Stmt:
    """Panels of columns, each with the whole depth; columns that do not exist repeat the last one.

    One vector of columns at a time: more rows of the keys than a cache has ways would evict each other.
    Beside it come the queries and values that the same thread is going to need: rows of one head are too far
    apart for the hardware's prefetcher.
    """
    batches, panels, depth, columns = (int(e) for e in keys.shape)
    product = found.blocks["scores"]
    contiguous = product.value.b.b.indices[-1].same_as(product.reduce[0]) and depth % COLUMNS == 0

    def vector(point: Point) -> tirx.Stmt:
        b, panel, v = point
        batch, first = found.batch_at(b), v * integer(lanes)

        def key(lane: ir.Expr, d: ir.Expr) -> ir.Expr:
            inside = found.columns % columns == 0
            column = clamp(panel * integer(columns) + first + lane, found.columns, inside=inside)
            return found.factor("scores", 1, (*batch, integer(0), column), d)

        def through_registers(group: ir.Expr) -> tirx.Stmt:
            d = group * integer(COLUMNS)
            ramp = tirx.Ramp(d, integer(1), COLUMNS)
            statements, vectors = transposed(lambda lane: key(integer(lane), ramp), lanes, "float32")
            at = tirx.Ramp(first, integer(1), lanes)
            places = enumerate(vectors)
            stores = [tirx.BufferStore(keys, value, [b, panel, d + integer(i), at]) for i, value in places]
            return sequence([*statements, *stores])

        def one_by_one(d: ir.Expr) -> tirx.Stmt:
            def element(lane: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(keys, key(lane, d), [b, panel, d, first + lane])

            return loop(lanes, element)

        def ahead(lane: ir.Expr) -> tirx.Stmt:
            return _fetch_row(found, batch, panel * integer(columns) + first + lane)

        packed = loop(depth // COLUMNS, through_registers) if contiguous else loop(depth, one_by_one)
        return sequence([packed, loop(lanes, ahead)])

    work = batches * panels * depth * columns
    return grid((batches, panels, columns // lanes), vector, parallel=work >= PARALLEL_WORK)


def _fetch_row(found: AttentionBlocks, batch: Sequence[ir.Expr], row: ir.Expr) -> tirx.Stmt:
    """Bring a row of the queries and of the values into L2."""
    # queries may be fewer than keys: their last row is fetched again
    column, zero = clamp(row, found.columns, inside=False), integer(0)
    query_row = clamp(row, found.rows, inside=False)
    queries = [
        found.factor("scores", 0, (*batch, query_row, zero), integer(d))
        for d in range(0, found.depth, CACHE_LINE_FLOATS)
    ]
    values = [
        found.factor("context", 1, (*batch, zero, integer(w)), column)
        for w in range(0, found.width, CACHE_LINE_FLOATS)
    ]
    return sequence([prefetch(load, locality=2) for load in (*queries, *values)])


def _rows(
    found: AttentionBlocks, first: Tile, second: Tile, keys: ir.Var, buffers: list[ir.Var]
) -> tirx.Stmt:
    """The parallel loop over blocks of query rows; scratch it needs is added to `buffers`."""
    # whole panels: softmax goes over whole vectors
    pitch = int(keys.shape[1]) * first.columns
    scores = tirx.decl_buffer((first.rows, pitch), "float32", "block_scores")
    totals = tirx.decl_buffer((first.rows,), "float32", "totals")
    peaks = tirx.decl_buffer((first.lanes,), "float32", "peaks")
    sums = tirx.decl_buffer((first.lanes,), "float32", "lane_sums")
    top = tirx.decl_buffer((1,), "float32", "top")
    buffers += [scores, totals, peaks, sums, top]

    def task(point: Point) -> tirx.Stmt:
        block = _QueryBlock(found, first, second, keys, scores, totals, point, buffers)
        softmax = loop(first.rows, lambda m: _row_weights(scores, totals, (peaks, sums, top), m, first.lanes))
        # columns of the last panel that do not exist: exp(-inf) is zero, and adds nothing
        missing = [loop(first.rows, block.no_scores)] if pitch > found.columns else []
        panels = loop(pitch // first.columns, block.panel_scores)
        return sequence([panels, *missing, softmax, loop(found.width // second.columns, block.context)])

    batches, blocks = math.prod(found.batch), ceil_div(found.rows, first.rows)
    # multiply-adds of both products
    work = batches * found.rows * found.columns * (found.depth + found.width)
    return grid((batches, blocks), task, parallel=work >= PARALLEL_WORK)


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """A task: the query rows of one block, `point` being batch and block."""

    found: AttentionBlocks
    first: Tile
    second: Tile
    keys: ir.Var
    scores: ir.Var
    """`[rows, columns]`, columns up to a whole panel."""
    totals: ir.Var
    point: Point
    buffers: list[ir.Var]
    """Where the micro-kernels' accumulators are added."""

    @property
    def batch(self) -> list[ir.Expr]:
        return self.found.batch_at(self.point[0])

    @property
    def is_whole(self) -> bool:
        return self.found.rows % self.first.rows == 0

    def row(self, m: int) -> ir.Expr:
        return self.point[1] * integer(self.first.rows) + integer(m)

    def existing(self, m: int) -> ir.Expr:
        return clamp(self.row(m), self.found.rows, inside=self.is_whole)

    def panel_scores(self, panel: ir.Expr) -> tirx.Stmt:
        """What the softmax sees of one panel of keys."""
        found, first = self.found, self.first

        def query(k: ir.Expr, m: int) -> ir.Expr:
            return found.factor("scores", 0, (*self.batch, self.existing(m), integer(0)), k)

        def key(k: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(self.keys, [self.point[0], panel, k, vector * integer(first.lanes) + lane])

        def write(sum_at: Element) -> tirx.Stmt:
            def vector(m: int, v: ir.Expr) -> tirx.Stmt:
                def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                    value = found.logit((*self.batch, self.existing(m), column), sum_at(m, v, lane))
                    return tirx.BufferStore(self.scores, value, [integer(m), column])

                start = panel * integer(first.columns)
                return write_columns(start, found.columns, first, v, element)

            return sequence([unrolled(first.width, partial(vector, m)) for m in range(first.rows)])

        body, sums = gemm_kernel(first, found.depth, GemmAccess(query, key, write))
        self.buffers.extend(sums)
        return body

    def no_scores(self, m: ir.Expr) -> tirx.Stmt:
        """Columns that do not exist weigh nothing."""
        minus, columns = tirx.FloatImm("float32", float("-inf")), self.found.columns
        rest = int(self.scores.shape[1]) - columns
        return loop(rest, lambda i: tirx.BufferStore(self.scores, minus, [m, integer(columns) + i]))

    def context(self, panel: ir.Expr) -> tirx.Stmt:
        """The second product, for one panel of the values."""
        found, second = self.found, self.second

        def weight(k: ir.Expr, m: int) -> ir.Expr:
            return tirx.BufferLoad(self.scores, [integer(m), k])

        def value(k: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            column = panel * integer(second.columns) + vector * integer(second.lanes) + lane
            return found.factor("context", 1, (*self.batch, integer(0), column), k)

        def write(sum_at: Element) -> tirx.Stmt:
            def vector(m: int, v: ir.Expr) -> tirx.Stmt:
                column = panel * integer(second.columns) + v * integer(second.lanes)
                total = tirx.BufferLoad(self.totals, [integer(m)])

                def element(lane: ir.Expr) -> tirx.Stmt:
                    return found.store((*self.batch, self.row(m), column + lane), sum_at(m, v, lane) / total)

                return vectorized(second.lanes, element)

            def row(m: int) -> tirx.Stmt:
                vectors = unrolled(second.width, partial(vector, m))
                return when(self.row(m) < integer(found.rows), vectors, always=self.is_whole)

            return sequence([row(m) for m in range(second.rows)])

        body, sums = gemm_kernel(second, found.columns, GemmAccess(weight, value, write))
        self.buffers.extend(sums)
        return body


def _row_weights(
    scores: ir.Var, totals: ir.Var, registers: tuple[ir.Var, ir.Var, ir.Var], m: ir.Expr, lanes: int
) -> tirx.Stmt:
    """`scores[m] = exp(scores[m] - max)` in place, and the sum of the weights into `totals[m]`."""
    peaks, sums, top = registers
    zero = integer(0)

    def each(body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        return loop(int(scores.shape[1]) // lanes, lambda i: body(i * integer(lanes)))

    def assign(buffer: ir.Var, width: int, value: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        return vectorized(width, lambda lane: tirx.BufferStore(buffer, value(lane), [lane]))

    def score(at: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(scores, [m, at])

    def weigh(start: ir.Expr) -> tirx.Stmt:
        def weight(lane: ir.Expr) -> tirx.Stmt:
            value = exp_of_nonpositive(score(start + lane) - tirx.BufferLoad(top, [zero]))
            return tirx.BufferStore(scores, value, [m, start + lane])

        total = assign(sums, lanes, lambda lane: tirx.BufferLoad(sums, [lane]) + score(start + lane))
        return sequence([vectorized(lanes, weight), total])

    def raise_peak(start: ir.Expr) -> tirx.Stmt:
        return assign(
            peaks, lanes, lambda lane: tirx.max(tirx.BufferLoad(peaks, [lane]), score(start + lane))
        )

    def across(buffer: ir.Var, combine: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> list[tirx.Stmt]:
        """Halves of a vector onto each other, until the first lane has it all."""

        def half(width: int) -> tirx.Stmt:
            def value(lane: ir.Expr) -> ir.Expr:
                other = tirx.BufferLoad(buffer, [lane + integer(width)])
                return combine(tirx.BufferLoad(buffer, [lane]), other)

            return assign(buffer, width, value)

        # lanes 8, 4, 2, 1 onto those below
        return [half(lanes >> step) for step in range(1, lanes.bit_length())]

    return sequence(
        [
            assign(peaks, lanes, lambda lane: tirx.FloatImm("float32", float("-inf"))),
            each(raise_peak),
            *across(peaks, tirx.max),
            tirx.BufferStore(top, tirx.BufferLoad(peaks, [zero]), [zero]),
            assign(sums, lanes, lambda lane: tirx.FloatImm("float32", 0.0)),
            each(weigh),
            *across(sums, operator.add),
            tirx.BufferStore(totals, tirx.BufferLoad(sums, [zero]), [m]),
        ]
    )
