"""Scaled dot-product attention, as `passes/fuse/attention.py` writes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.attention.plan import AttentionPlan, plan_of
from hybridc.schedules.cpu.attention.seen import SeenKeys, seen_keys
from hybridc.schedules.cpu.core.attention import AttentionBlocks, read_attention
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    INDEX,
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
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed
from hybridc.schedules.cpu.matmul.kernel import Element, GemmAccess, gemm_kernel
from hybridc.schedules.cpu.reduction.softmax import LOG2_E, power_of_two
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

LEAST = -3.4028234663852886e38
"""The least finite number: what rows are compared with that have no greater score yet."""


@schedule_rule(family="matmul")
def attention(request: Request) -> Scheduled | None:
    """Accepts `softmax(steps(query @ key)) @ value` over any batch axes, all of them float32.

    Tiling: keys and values are copied into panels once. A task is a block of query rows, and goes over the
    keys that some of them see in chunks: its scores for a chunk stay in L1, where they become weights; the
    second product reads them as its scalars and the values as its vectors. Weights are relative to the
    greatest score so far; where a chunk has a greater one, sums so far are scaled down (Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018). The sum of the weights divides the result,
    not each weight.

    Error: that of the two products and exp, at most 2e-6 of the result's scale, tested up to 700 keys.
    """
    found = read_attention(request.function)
    if found is None:
        return None
    plan = plan_of(request, found)
    seen = seen_keys(found, plan.scores.lanes, plan.rows)
    kernel = _Kernel(found, plan, _Buffers.of(found, plan), seen)
    packed = [kernel.pack_keys(), *([kernel.pack_values()] if plan.packs_values else [])]
    stages = [*([] if seen is None else seen.find()), *packed, kernel.rows()]
    function = function_of(request.function, list(request.function.params), stages, kernel.allocated)
    return finish(function, attention.__name__)


@dataclass(frozen=True, slots=True)
class _Buffers:
    keys: ir.Var
    """`[batches, panels, depth, columns of a panel]`"""
    values: ir.Var
    """`[batches, panels, keys, columns of a panel]`"""
    scores: ir.Var
    """Of a task and chunk: `[rows, columns]`."""
    contexts: ir.Var
    """Of a task: `[rows, width]`, not yet divided by `totals`."""
    totals: ir.Var
    """Sum of the weights of each row."""
    peaks: ir.Var
    """Greatest score of each row, in lanes."""
    tops: ir.Var
    """What weights of each row are relative to: exponents of two if scores are only multiplied."""
    changes: ir.Var
    """By how much the chunk scales down what there is of each row."""
    lane_sums: ir.Var

    @classmethod
    def of(cls, found: AttentionBlocks, plan: AttentionPlan) -> _Buffers:
        first, second, batches = plan.scores, plan.context, math.prod(found.batch)

        def made(name: str, *shape: int) -> ir.Var:
            return tirx.decl_buffer(shape, "float32", name)

        return cls(
            made("keys", batches, plan.panels, found.depth, first.columns),
            made(
                "values", batches, plan.width // second.columns, plan.panels * first.columns, second.columns
            ),
            made("block_scores", plan.rows, plan.chunk * first.columns),
            made("contexts", plan.rows, plan.width),
            made("totals", plan.rows),
            made("peaks", plan.rows, first.lanes),
            made("tops", plan.rows),
            made("changes", plan.rows),
            made("lane_sums", first.lanes),
        )


class _Kernel:
    """The statements of an attention."""

    def __init__(
        self, found: AttentionBlocks, plan: AttentionPlan, buffers: _Buffers, seen: SeenKeys | None
    ) -> None:
        self.found, self.plan, self.buffers, self.seen = found, plan, buffers, seen
        self.sums: list[ir.Var] = []

    @property
    def allocated(self) -> list[ir.Var]:
        """Buffers that the function's root block has to allocate."""
        own = self.buffers
        values = [own.values] if self.plan.packs_values else []
        tasks = [own.scores, own.contexts, own.totals, own.peaks, own.tops, own.changes, own.lane_sums]
        seen = [] if self.seen is None else self.seen.buffers
        return [own.keys, *values, *tasks, *seen, *self.sums]

    def _if_seen(self, batch: list[ir.Expr], panel: ir.Expr, body: tirx.Stmt) -> tirx.Stmt:
        """For a panel of keys that some query of the batch sees."""
        if self.seen is None:
            return body
        return tirx.IfThenElse(panel < self.seen.groups(batch, self.plan.scores.width), body, None)

    def pack_keys(self) -> tirx.Stmt:
        """Panels of columns, each with the whole depth; columns that do not exist repeat the last one.

        One vector of columns at a time: more rows of the keys than a cache has ways would evict each other.
        """
        found, keys, lanes = self.found, self.buffers.keys, self.plan.scores.lanes
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
                stores = [
                    tirx.BufferStore(keys, value, [b, panel, d + integer(i), at]) for i, value in places
                ]
                return sequence([*statements, *stores])

            def one_by_one(d: ir.Expr) -> tirx.Stmt:
                def element(lane: ir.Expr) -> tirx.Stmt:
                    return tirx.BufferStore(keys, key(lane, d), [b, panel, d, first + lane])

                return loop(lanes, element)

            packed = loop(depth // COLUMNS, through_registers) if contiguous else loop(depth, one_by_one)
            return self._if_seen(batch, panel, packed)

        work = batches * panels * depth * columns
        return grid((batches, panels, columns // lanes), vector, parallel=work >= PARALLEL_WORK)

    def pack_values(self) -> tirx.Stmt:
        """Panels of a tile's vectors; keys and columns that do not exist have zeros.

        Rows of one head are far apart: many of them would share few sets of a cache.
        """
        found, values, width = self.found, self.buffers.values, self.plan.scores.columns
        batches, panels, keys, columns = (int(e) for e in values.shape)

        def row(point: Point) -> tirx.Stmt:
            b, key = point

            def element(panel: ir.Expr, column: ir.Expr) -> tirx.Stmt:
                place, is_whole = panel * integer(columns) + column, self.plan.width == found.width
                at = (*found.batch_at(b), integer(0), clamp(place, found.width, inside=is_whole))
                existing = clamp(key, found.columns, inside=keys == found.columns)
                value = found.factor("context", 1, at, existing)
                if keys != found.columns:
                    value = tirx.Select(key < integer(found.columns), value, tirx.FloatImm("float32", 0.0))
                if not is_whole:
                    value = tirx.Select(place < integer(found.width), value, tirx.FloatImm("float32", 0.0))
                return tirx.BufferStore(values, value, [b, panel, key, column])

            packed = loop(panels, lambda panel: vectorized(columns, partial(element, panel)))
            return self._if_seen(found.batch_at(b), tirx.floordiv(key, integer(width)), packed)

        return grid((batches, keys), row, parallel=batches * panels * keys * columns >= PARALLEL_WORK)

    def rows(self) -> tirx.Stmt:
        """The parallel loop over blocks of query rows."""
        found, plan = self.found, self.plan
        batches, blocks = math.prod(found.batch), ceil_div(found.rows, plan.rows)
        # multiply-adds of both products
        work = batches * found.rows * found.columns * (found.depth + found.width)
        return grid(
            (batches, blocks), lambda point: _Task(self, point).whole(), parallel=work >= PARALLEL_WORK
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """The query rows of one block, `point` being batch and block."""

    kernel: _Kernel
    point: Point

    @property
    def found(self) -> AttentionBlocks:
        return self.kernel.found

    @property
    def plan(self) -> AttentionPlan:
        return self.kernel.plan

    @property
    def buffers(self) -> _Buffers:
        return self.kernel.buffers

    @property
    def batch(self) -> list[ir.Expr]:
        return self.found.batch_at(self.point[0])

    def row(self, m: ir.Expr) -> ir.Expr:
        return self.point[1] * integer(self.plan.rows) + m

    def existing(self, m: ir.Expr) -> ir.Expr:
        return clamp(self.row(m), self.found.rows, inside=self.found.rows % self.plan.rows == 0)

    def whole(self) -> tirx.Stmt:
        plan, found, own = self.plan, self.found, self.buffers
        left = integer(found.rows) - self.row(integer(0))
        rows = integer(plan.rows)
        if found.rows % plan.rows:
            rows = tirx.min(rows, left)

        seen, named = self.kernel.seen, list[tirx.Stmt]()
        end, chunks = integer(plan.panels), ceil_div(plan.panels, plan.chunk)
        if seen is not None:
            # read once, so that it stays within the bounds that it has
            end = tirx.Var("end", INDEX)
            named.append(tirx.Bind(end, seen.groups(self.batch, plan.scores.width, self.point[1])))
            chunks = tirx.floordiv(end + integer(plan.chunk - 1), integer(plan.chunk))

        def tiles(tile: Tile) -> int | ir.Expr:
            if found.rows % plan.rows == 0:
                return plan.rows // tile.rows
            return tirx.floordiv(rows + integer(tile.rows - 1), integer(tile.rows))

        def begin(m: ir.Expr) -> tirx.Stmt:
            zero = tirx.FloatImm("float32", 0.0)
            top = tirx.FloatImm("float32", LEAST * (1.0 if plan.factor is None else plan.factor * LOG2_E))
            lanes = plan.scores.lanes
            return sequence(
                [
                    tirx.BufferStore(own.totals, zero, [m]),
                    tirx.BufferStore(own.tops, top, [m]),
                    vectorized(lanes, lambda lane: tirx.BufferStore(
                        own.peaks, tirx.FloatImm("float32", LEAST), [m, lane])),
                    loop(plan.width // lanes, lambda i: vectorized(lanes, lambda lane: tirx.BufferStore(
                        own.contexts, zero, [m, i * integer(lanes) + lane]))),
                    *(prefetch(self.query(integer(d), m)) for d in range(0, found.depth, CACHE_LINE_FLOATS)),
                ]
            )  # fmt: skip

        def chunk(number: ir.Expr) -> tirx.Stmt:
            first = number * integer(plan.chunk)
            panels: int | ir.Expr = plan.chunk
            if named or plan.panels % plan.chunk:
                panels = tirx.min(integer(plan.chunk), end - first)
            return sequence(
                [
                    loop(panels, lambda p: loop(tiles(plan.scores), lambda i: self.scores(i, first + p, p))),
                    loop(rows, lambda m: self.weights(m, panels)),
                    loop(plan.width // plan.context.columns, lambda v: loop(
                        tiles(plan.context), lambda i: self.context(i, v, first, panels))),
                ]
            )  # fmt: skip

        return sequence([*named, loop(plan.rows, begin), loop(chunks, chunk), loop(rows, self.result)])

    def query(self, k: ir.Expr, m: ir.Expr) -> ir.Expr:
        return self.found.factor("scores", 0, (*self.batch, self.existing(m), integer(0)), k)

    def scores(self, block: ir.Expr, panel: ir.Expr, place: ir.Expr) -> tirx.Stmt:
        """A tile of what the softmax sees, and the greatest of a row. `place` is the panel's in its chunk."""
        found, tile, own = self.found, self.plan.scores, self.buffers

        def row(m: int) -> ir.Expr:
            return block * integer(tile.rows) + integer(m)

        def key(k: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(own.keys, [self.point[0], panel, k, vector * integer(tile.lanes) + lane])

        def write(sum_at: Element, *, is_whole: bool) -> tirx.Stmt:
            def value(m: int, v: int, lane: ir.Expr) -> ir.Expr:
                column = panel * integer(tile.columns) + integer(v * tile.lanes) + lane
                score = sum_at(m, integer(v), lane)
                if self.plan.factor is None:
                    at = clamp(column, found.columns, inside=is_whole)
                    score = found.logit((*self.batch, self.existing(row(m)), at), score)
                if is_whole:
                    return score
                none = tirx.FloatImm("float32", float("-inf"))
                return tirx.Select(column < integer(found.columns), score, none)

            def vector(m: int, v: int, lane: ir.Expr) -> tirx.Stmt:
                column = place * integer(tile.columns) + integer(v * tile.lanes) + lane
                return tirx.BufferStore(own.scores, value(m, v, lane), [row(m), column])

            def peak(m: int, lane: ir.Expr) -> tirx.Stmt:
                greatest: ir.Expr = tirx.BufferLoad(own.peaks, [row(m), lane])
                for v in range(tile.width):
                    column = place * integer(tile.columns) + integer(v * tile.lanes) + lane
                    greatest = tirx.max(greatest, tirx.BufferLoad(own.scores, [row(m), column]))
                return tirx.BufferStore(own.peaks, greatest, [row(m), lane])

            def line(m: int) -> tirx.Stmt:
                vectors = [vectorized(tile.lanes, partial(vector, m, v)) for v in range(tile.width)]
                return sequence([*vectors, vectorized(tile.lanes, partial(peak, m))])

            return sequence([line(m) for m in range(tile.rows)])

        def each(sum_at: Element) -> tirx.Stmt:
            whole = write(sum_at, is_whole=True)
            if found.columns % tile.columns == 0:
                return whole
            is_last = panel.equal(integer(self.plan.panels - 1))
            return tirx.IfThenElse(is_last, write(sum_at, is_whole=False), whole)

        body, sums = gemm_kernel(tile, found.depth, GemmAccess(lambda k, m: self.query(k, row(m)), key, each))
        self.kernel.sums.extend(sums)
        return body

    def weights(self, m: ir.Expr, panels: int | ir.Expr) -> tirx.Stmt:
        """Scores of a row become weights; `changes` says how what there is of the row is scaled down."""
        own, tile, factor = self.buffers, self.plan.scores, self.plan.factor
        lanes = tile.lanes
        every = tirx.Ramp(integer(0), integer(1), lanes)

        def constant(value: float) -> ir.Expr:
            return tirx.FloatImm("float32", value)

        statements: list[tirx.Stmt] = []

        def named(value: ir.Expr) -> ir.Var:
            statements.append(tirx.Bind(var := tirx.Var("t", str(value.ty.dtype)), value))
            return var

        top = across(tirx.BufferLoad(own.peaks, [m, every]), lanes, tirx.max, named)
        if factor is not None:
            top = top * constant(factor * LOG2_E)
        # exponents of two, as the tops are if scores are only multiplied
        unit = LOG2_E if factor is None else 1.0
        change = power_of_two((tirx.BufferLoad(own.tops, [m]) - top) * constant(unit))

        def weight(start: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            score, top = tirx.BufferLoad(own.scores, [m, start + lane]), tirx.BufferLoad(own.tops, [m])
            if factor is None:
                power = (score - top) * constant(LOG2_E)
            else:
                power = score * constant(factor * LOG2_E) - top
            return tirx.BufferStore(own.scores, power_of_two(power), [m, start + lane])

        def add(start: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(own.lane_sums, [lane]) + tirx.BufferLoad(own.scores, [m, start + lane])
            return tirx.BufferStore(own.lane_sums, total, [lane])

        def each(i: ir.Expr) -> tirx.Stmt:
            start = i * integer(lanes)
            return sequence(
                [vectorized(lanes, partial(weight, start)), vectorized(lanes, partial(add, start))]
            )

        after: list[tirx.Stmt] = []

        def then(value: ir.Expr) -> ir.Var:
            after.append(tirx.Bind(var := tirx.Var("t", str(value.ty.dtype)), value))
            return var

        total = across(tirx.BufferLoad(own.lane_sums, [every]), lanes, lambda a, b: a + b, then)
        so_far = tirx.BufferLoad(own.totals, [m]) * tirx.BufferLoad(own.changes, [m])
        count = panels * tile.width if isinstance(panels, int) else panels * integer(tile.width)
        return sequence(
            [
                *statements,
                tirx.BufferStore(own.changes, change, [m]),
                tirx.BufferStore(own.tops, top, [m]),
                vectorized(lanes, lambda lane: tirx.BufferStore(own.lane_sums, constant(0.0), [lane])),
                loop(count, each),
                *after,
                tirx.BufferStore(own.totals, so_far + total, [m]),
            ]
        )

    def context(self, block: ir.Expr, panel: ir.Expr, first: ir.Expr, panels: int | ir.Expr) -> tirx.Stmt:
        """A tile of the second product, for `panels` panels of keys from the first on."""
        found, tile, own = self.found, self.plan.context, self.buffers
        width = self.plan.scores.columns

        def row(m: int) -> ir.Expr:
            return block * integer(tile.rows) + integer(m)

        def weight(k: ir.Expr, m: int) -> ir.Expr:
            return tirx.BufferLoad(own.scores, [row(m), k])

        def value(k: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            column, key = vector * integer(tile.lanes) + lane, first * integer(width) + k
            if self.plan.packs_values:
                return tirx.BufferLoad(own.values, [self.point[0], panel, key, column])
            at = (*self.batch, integer(0), panel * integer(tile.columns) + column)
            return found.factor(
                "context", 1, at, clamp(key, found.columns, inside=found.columns % width == 0)
            )

        def place(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
            return [row(m), panel * integer(tile.columns) + v * integer(tile.lanes) + lane]

        def initial(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(own.contexts, place(m, v, lane)) * tirx.BufferLoad(own.changes, [row(m)])

        def write(sum_at: Element) -> tirx.Stmt:
            def store(m: int, v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(own.contexts, sum_at(m, v, lane), place(m, v, lane))

            def line(m: int) -> tirx.Stmt:
                return unrolled(tile.width, lambda v: vectorized(tile.lanes, partial(store, m, v)))

            return sequence([line(m) for m in range(tile.rows)])

        access = GemmAccess(weight, value, write, initial)
        body, sums = gemm_kernel(tile, width, access, times=panels)
        self.kernel.sums.extend(sums)
        return body

    def result(self, m: ir.Expr) -> tirx.Stmt:
        """A finished row."""
        found, own, lanes = self.found, self.buffers, self.plan.context.lanes
        total = tirx.BufferLoad(own.totals, [m])

        def element(column: ir.Expr, _: ir.Expr) -> tirx.Stmt:
            value = found.quotient(tirx.BufferLoad(own.contexts, [m, column]), total)
            return found.store((*self.batch, self.row(m), column), value)

        vector = Tile(1, 1, 1, lanes)
        return loop(
            self.plan.width // lanes, lambda i: write_columns(integer(0), found.width, vector, i, element)
        )


def across(
    vector: ir.Expr,
    lanes: int,
    combine: Callable[[ir.Expr, ir.Expr], ir.Expr],
    named: Callable[[ir.Expr], ir.Var],
) -> ir.Expr:
    """Halves of a vector onto each other, until one element has it all."""
    while lanes > 1:
        whole, lanes = named(vector), lanes // 2
        low, high = (tirx.Shuffle([whole], [start + i for i in range(lanes)]) for start in (0, lanes))
        vector = combine(low, high)
    return vector
