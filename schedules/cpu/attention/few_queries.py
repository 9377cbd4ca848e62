"""Attention of a few queries on a CPU, as decoders have it: keys and values are read once, as they lie.

    scores    some queries and keys at a time: dot products along the depth, whose lanes shuffles add up
    weights   exponentials of the distance to the row's greatest score
    context   sums of weighted values, all rows' in registers

Packing keys, which pays for many queries, would take longer than all of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.attention.attention import LEAST, across
from hybridc.schedules.cpu.attention.seen import SeenKeys, seen_keys
from hybridc.schedules.cpu.core.attention import AttentionBlocks, read_attention
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    INDEX,
    PARALLEL_WORK,
    Point,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import Stream, reduction, register_tile
from hybridc.schedules.cpu.core.shuffles import sums_of_lanes
from hybridc.schedules.cpu.reduction.softmax import LOG2_E, power_of_two
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MOST_QUERIES = 8
"""With more, sums over lanes take longer than packing the keys (AVX2: 8 to 12, AVX-512: more than 12)."""
SCORES_SHARE = 1 / 4
"""Of the second-level cache, for the scores of a task."""
AHEAD = 1
"""Vectors of keys that are fetched ahead: rows of many keys at once are no stream that hardware follows."""
MOST_SHARED = 4
"""Queries that a key is read for at once: a vector of each, and of a key, are in registers beside a sum for
each lane."""
SPARE_REGISTERS = 4
"""For a weight, a vector of values, and what LLVM loads ahead."""


@schedule_rule(family="matmul")
def few_queries(request: Request) -> Scheduled | None:
    """Accepts attention of at most `MOST_QUERIES` queries, along whose depth keys lie in whole vectors.

    Tiling: a task is all queries of a batch (of a head), and goes over the keys that are seen once for the
    scores and once for the result.

    Error: that of the two products and exp, at most 2e-6 of the result's scale, tested up to 700 keys.
    """
    found, isa = read_attention(request.function), request.target.isa
    if found is None or not 0 < found.rows <= MOST_QUERIES:
        return None
    if found.depth % isa.lanes() or found.width % isa.lanes() or not _lie_in_rows(found):
        return None
    padded = ceil_div(found.columns, isa.lanes()) * isa.lanes()
    if 4 * found.rows * padded > isa.l2_bytes * SCORES_SHARE:
        return None
    scores = tirx.decl_buffer((found.rows, padded), "float32", "scores")
    rows = [
        tirx.decl_buffer(shape, "float32", name)
        for name, shape in (
            ("peaks", (found.rows, isa.lanes())),
            ("tops", (found.rows,)),
            ("totals", (found.rows,)),
            ("sums", (isa.lanes(),)),
            ("dots", (isa.lanes(),)),
        )
    ]
    vectors = found.width // isa.lanes()
    most = max((isa.vector_registers - SPARE_REGISTERS) // found.rows, 1)
    at_once = max(n for n in range(1, min(most, vectors) + 1) if vectors % n == 0)
    seen = seen_keys(found, isa.lanes(), found.rows)
    kernel = _Kernel(found, isa.lanes(), math.gcd(found.rows, MOST_SHARED), at_once, seen, scores, *rows)
    work = math.prod(found.batch) * found.rows * found.columns * (found.depth + found.width)
    body = grid((math.prod(found.batch),), kernel.task, parallel=work >= PARALLEL_WORK)
    stages, buffers = ([body], []) if seen is None else ([*seen.find(), body], seen.buffers)
    function = function_of(request.function, list(request.function.params), stages, [scores, *rows, *buffers])
    return finish(function, few_queries.__name__)


def _lie_in_rows(found: AttentionBlocks) -> bool:
    """Whether keys lie along the depth, and values along their width."""
    scores, context = found.blocks["scores"], found.blocks["context"]
    key, value = scores.value.b.b.indices[-1], context.value.b.b.indices[-1]
    return bool(key.same_as(scores.reduce[0]) and value.same_as(context.spatial[-1]))


@dataclass(frozen=True, slots=True)
class _Kernel:
    found: AttentionBlocks
    lanes: int
    shared: int
    """Queries that a key is read for at once."""
    at_once: int
    """Vectors of the result whose sums are in registers, for each query."""
    seen: SeenKeys | None
    """None: all keys."""
    scores: ir.Var
    """Of a task, `[queries, keys]`, which become weights."""
    peaks: ir.Var
    """The greatest scores of a query, in lanes."""
    tops: ir.Var
    """The greatest score of each query: in memory, as a vectorised loop takes no shuffle."""
    totals: ir.Var
    """Of the weights of each query."""
    sums: ir.Var
    """Of the weights of a query, in lanes."""
    dots: ir.Var
    """Products of some queries with some keys, a lane each."""

    def task(self, point: Point) -> tirx.Stmt:
        """All queries of a batch."""
        found, batch = self.found, self.found.batch_at(point[0])
        least = tirx.FloatImm("float32", LEAST)

        def begin(m: ir.Expr) -> tirx.Stmt:
            return vectorized(self.lanes, lambda lane: tirx.BufferStore(self.peaks, least, [m, lane]))

        groups: int | ir.Expr = ceil_div(found.columns, self.lanes)
        named: list[tirx.Stmt] = []
        if self.seen is not None:
            # read once, so that it stays within the bounds that it has
            named.append(tirx.Bind(groups := tirx.Var("groups", INDEX), self.seen.groups(batch, 1)))
        return sequence(
            [
                *named,
                loop(found.rows, begin),
                loop(groups, lambda g: loop(found.rows // self.shared, lambda m: self._scores(batch, m, g))),
                loop(found.rows, lambda m: self._weights(m, groups)),
                loop(found.width // self.lanes // self.at_once, lambda v: self._context(batch, v, groups)),
            ]
        )

    def _scores(self, batch: list[ir.Expr], rows: ir.Expr, group: ir.Expr) -> tirx.Stmt:
        """What the softmax sees of a vector of keys, and the greatest so far, for some queries."""
        found, lanes, first = self.found, self.lanes, group * integer(self.lanes)
        is_whole = found.columns % lanes == 0

        def logit(m: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            column = first + lane
            at = clamp(column, found.columns, inside=is_whole)
            value = found.logit((*batch, m, at), tirx.BufferLoad(self.scores, [m, column]))
            if not is_whole:
                none = tirx.FloatImm("float32", float("-inf"))
                value = tirx.Select(column < integer(found.columns), value, none)
            return tirx.BufferStore(self.scores, value, [m, column])

        def peak(m: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            score = tirx.BufferLoad(self.scores, [m, first + lane])
            greatest = tirx.max(tirx.BufferLoad(self.peaks, [m, lane]), score)
            return tirx.BufferStore(self.peaks, greatest, [m, lane])

        def seen(number: int) -> tirx.Stmt:
            m = rows * integer(self.shared) + integer(number)
            return sequence(
                [vectorized(lanes, partial(logit, m)), vectorized(lanes, partial(peak, m))],
            )

        keys = lanes // self.shared
        products = loop(self.shared, lambda part: self._dots(batch, rows, first + part * integer(keys)))
        return sequence([products, *map(seen, range(self.shared))])

    def _dots(self, batch: list[ir.Expr], rows: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        """Products of some queries with as many keys as leave a sum for each lane: a key is read once for all
        of them, and converted once where it has other bits in memory."""
        found, lanes, keys = self.found, self.lanes, self.lanes // self.shared
        is_whole = found.columns % lanes == 0
        tile = register_tile(lanes, 1, lanes)

        def step(k: Point) -> tirx.Stmt:
            def product(number: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                d, (row, key) = k[0] * integer(lanes) + lane, divmod(number, keys)
                # of keys that do not exist, the last one's
                column = clamp(first + integer(key), found.columns, inside=is_whole)
                m = rows * integer(self.shared) + integer(row)
                query = found.factor("scores", 0, (*batch, m, integer(0)), d)
                return tile.sum_at(number, v, lane) + query * found.factor(
                    "scores", 1, (*batch, integer(0), column), d
                )

            return tile.set(product)

        lines = ceil_div(found.depth, CACHE_LINE_FLOATS)

        def ahead(_: Point, n: ir.Expr) -> tirx.BufferLoad:
            key = first + integer(AHEAD * lanes) + tirx.floordiv(n, integer(lines))
            d = tirx.floormod(n, integer(lines)) * integer(CACHE_LINE_FLOATS)
            return found.factor("scores", 1, (*batch, integer(0), key), d)

        every = tirx.Ramp(integer(0), integer(1), lanes)
        added, dots = sums_of_lanes([tile.sum_at(i, integer(0), every) for i in range(lanes)], lanes)

        def placed(row: int, lane: ir.Expr) -> tirx.Stmt:
            m = rows * integer(self.shared) + integer(row)
            score = tirx.BufferLoad(self.dots, [integer(row * keys) + lane])
            return tirx.BufferStore(self.scores, score, [m, first + lane])

        return tile.within(
            [
                tile.clear(),
                reduction((found.depth // lanes,), tile, step, [Stream(0, keys * lines, ahead)]),
                *added,
                tirx.BufferStore(self.dots, dots, [every]),
                *(vectorized(keys, partial(placed, row)) for row in range(self.shared)),
            ]
        )

    def _weights(self, m: ir.Expr, groups: int | ir.Expr) -> tirx.Stmt:
        """Scores of a query become weights, which are added up."""
        lanes = self.lanes
        every = tirx.Ramp(integer(0), integer(1), lanes)
        statements: list[tirx.Stmt] = []
        after: list[tirx.Stmt] = []

        def named(value: ir.Expr, into: list[tirx.Stmt]) -> ir.Var:
            into.append(tirx.Bind(var := tirx.Var("t", str(value.ty.dtype)), value))
            return var

        peaks = tirx.BufferLoad(self.peaks, [m, every])
        top = across(peaks, lanes, tirx.max, lambda value: named(value, statements))

        def weight(start: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            distance = tirx.BufferLoad(self.scores, [m, start + lane]) - tirx.BufferLoad(self.tops, [m])
            exponential = power_of_two(distance * tirx.FloatImm("float32", LOG2_E))
            return tirx.BufferStore(self.scores, exponential, [m, start + lane])

        def add(start: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(self.sums, [lane]) + tirx.BufferLoad(self.scores, [m, start + lane])
            return tirx.BufferStore(self.sums, total, [lane])

        def each(g: ir.Expr) -> tirx.Stmt:
            start = g * integer(lanes)
            return sequence(
                [
                    vectorized(lanes, lambda lane: weight(start, lane)),
                    vectorized(lanes, lambda lane: add(start, lane)),
                ]
            )

        zero = tirx.FloatImm("float32", 0.0)
        sums = tirx.BufferLoad(self.sums, [every])
        total = across(sums, lanes, lambda a, b: a + b, lambda value: named(value, after))
        return sequence(
            [
                *statements,
                tirx.BufferStore(self.tops, top, [m]),
                vectorized(lanes, lambda lane: tirx.BufferStore(self.sums, zero, [lane])),
                loop(groups, each),
                *after,
                tirx.BufferStore(self.totals, total, [m]),
            ]
        )

    def _context(self, batch: list[ir.Expr], part: ir.Expr, groups: int | ir.Expr) -> tirx.Stmt:
        """Some columns of the result, for all queries."""
        found, lanes = self.found, self.lanes
        tile = register_tile(found.rows, self.at_once, lanes)

        def column(v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return (part * integer(self.at_once) + v) * integer(lanes) + lane

        def step(key: ir.Expr) -> tirx.Stmt:
            # keys that do not exist have no weight
            existing = clamp(key, found.columns, inside=found.columns % lanes == 0)

            def product(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                weight = tirx.BufferLoad(self.scores, [integer(m), key])
                value = found.factor("context", 1, (*batch, integer(0), column(v, lane)), existing)
                return tile.sum_at(m, v, lane) + weight * value

            return tile.set(product)

        def group(g: ir.Expr) -> tirx.Stmt:
            return reduction((lanes,), tile, lambda k: step(g * integer(lanes) + k[0]))

        def write(m: int, v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            value = found.quotient(tile.sum_at(m, v, lane), tirx.BufferLoad(self.totals, [integer(m)]))
            return found.store((*batch, integer(m), column(v, lane)), value)

        return tile.within([tile.clear(), loop(groups, group), tile.each(write)])
