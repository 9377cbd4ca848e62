"""Skinny matrix products: a few rows times a large matrix that is known at run time only, which is read once
and in order.

Fully connected layers of small batches are such products: forward with the weights transposed, backward as
they are. Their time is that of reading the weights, so what matters is that cache lines come one after the
other.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    prefetch,
    sequence,
    vectorized,
    when,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.register_tile import RegisterTile, reduction, register_tile
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.matmul.read import Product, read_product
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa

MOST_ROWS = 32
LEAST_BYTES = 2 << 20
"""Of a matrix that no cache of one core holds."""
STRIP_VECTORS = 16
"""Columns of a task, in vectors: their sums stay in the first-level cache, and a row's part of the matrix is
long enough to be fetched at full speed."""
MOST_TASKS, MOST_DEPTH = 64, 16
STREAMS = 8
"""Rows of a transposed matrix that are read side by side: enough sums to hide the multiply-adds' latency."""


@schedule_rule(family="matmul")
def skinny_gemm(request: Request) -> Scheduled | None:
    """Accepts a product of 2 to `MOST_ROWS` rows with a large two-dimensional parameter.

    As it is, `[K, N]`: a task has a strip of columns, whose sums it keeps in memory while it goes through the
    matrix by `MOST_DEPTH` rows; a micro-kernel holds all rows' sums of one vector of columns. The next rows'
    part of the strip is fetched ahead. Transposed, `[N, K]`: the rows' elements of one k, transposed before,
    are a vector, which is multiplied with a scalar from each of `STREAMS` rows of the matrix.
    """
    product = read_product(request.function)
    if product is None or not _is_streamed(request, product):
        return None
    isa = request.target.isa
    if product.right.indices[-1].same_as(product.k):
        buffers, stages = _transposed(product, isa)
    elif product.columns % isa.lanes() == 0 and _depth_at_once(product) > 1:
        buffers, stages = _strips(product, isa, request.threads)
    else:
        return None
    params = list(request.function.params)
    return finish(function_of(request.function, params, stages, buffers), skinny_gemm.__name__)


def _is_streamed(request: Request, product: Product) -> bool:
    source = product.right.source
    position = product.contraction.nest.parameter(source)
    # a constant matrix is packed when compiling, and read in order anyway
    plain = position is not None and position not in request.constants and len(source.shape) == 2
    size_bytes = 4 * product.depth * product.columns
    return plain and product.batches == 1 and 1 < product.rows <= MOST_ROWS and size_bytes >= LEAST_BYTES


def _depth_at_once(product: Product) -> int:
    return max(d for d in range(1, MOST_DEPTH + 1) if product.depth % d == 0)


def _left_columns(product: Product, width: int) -> tuple[ir.Var, tirx.Stmt]:
    """The left factor as `[K, width]`, and what fills it: rows far apart would share few sets of a cache."""
    left = tirx.decl_buffer((product.depth, width), "float32", "left_columns")

    def column(point: Point) -> tirx.Stmt:
        def element(m: ir.Expr) -> tirx.Stmt:
            row = clamp(m, product.rows, inside=width == product.rows)
            return tirx.BufferStore(left, product.left_at(integer(0), row, point[0]), [point[0], m])

        return loop(width, element)

    return left, grid((product.depth,), column, parallel=width * product.depth >= PARALLEL_WORK)


# ------------------------------------------------------------------------------------------- as it is


def _strips(product: Product, isa: Isa, threads: int) -> tuple[list[ir.Var], list[tirx.Stmt]]:
    lanes, vectors = isa.lanes(), product.columns // isa.lanes()
    # narrower strips would be read in pieces too short for the prefetcher
    tasks = max(min(vectors // STRIP_VECTORS, at_least_one_each(MOST_TASKS, threads)), 1)
    # a sum for each row; three are left for the matrix's vector, the scalar and one to spare
    tiles = ceil_div(product.rows, isa.vector_registers - 3)
    rows = ceil_div(product.rows, tiles)
    left, transpose = _left_columns(product, tiles * rows)
    sums = tirx.decl_buffer((ceil_div(vectors, tasks), tiles, rows, lanes), "float32", "strip")
    strip = _Strip(product, left, sums, _depth_at_once(product))

    def task(point: Point) -> tirx.Stmt:
        start, end = (
            tirx.floordiv((point[0] + integer(i)) * integer(vectors), integer(tasks)) for i in (0, 1)
        )
        blocks = loop(
            product.depth // strip.depth,
            lambda number: loop(end - start, lambda v: strip.vector(number, v, start + v)),
        )
        return sequence([blocks, loop(end - start, lambda v: strip.stored(v, start + v))])

    return [left, sums], [transpose, grid((tasks,), task, parallel=True)]


@dataclass(frozen=True, slots=True)
class _Strip:
    """Vectors of columns and their sums `[vector, tile, row, lane]`; `depth` rows of the matrix at a time."""

    product: Product
    left: ir.Var
    sums: ir.Var
    depth: int

    def vector(self, number: ir.Expr, v: ir.Expr, place: ir.Expr) -> tirx.Stmt:
        """What the `number`-th rows add to the v-th vector of the strip; it is at `place` in the matrix."""
        _, tiles, _, lanes = (int(e) for e in self.sums.shape)
        column, below = place * integer(lanes), (number + integer(1)) * integer(self.depth)

        def ahead(k: ir.Expr) -> tirx.Stmt:
            return prefetch(self.product.right_at(integer(0), below + k, column), 3)

        return sequence([loop(self.depth, ahead), *(self._tile(number, t, v, column) for t in range(tiles))])

    def _tile(self, number: ir.Expr, t: int, v: ir.Expr, column: ir.Expr) -> tirx.Stmt:
        _, _, rows, lanes = (int(e) for e in self.sums.shape)
        tile = register_tile(rows, 1, lanes)

        def place(m: int, lane: ir.Expr) -> list[ir.Expr]:
            return [v, integer(t), integer(m), lane]

        def step(point: Point) -> tirx.Stmt:
            k = number * integer(self.depth) + point[0]

            def value(m: int, w: ir.Expr, lane: ir.Expr) -> ir.Expr:
                factor = tirx.BufferLoad(self.left, [k, integer(t * rows + m)])
                return tile.sum_at(m, w, lane) + factor * self.product.right_at(integer(0), k, column + lane)

            return tile.set(value)

        restore = tile.set(lambda m, w, lane: tirx.BufferLoad(self.sums, place(m, lane)))
        # the first rows start from zero instead of from memory
        begin = tirx.IfThenElse(number > integer(0), restore, tile.clear())
        save = tile.each(
            lambda m, w, lane: tirx.BufferStore(self.sums, tile.sum_at(m, w, lane), place(m, lane))
        )
        return tile.within([begin, reduction([self.depth], tile, step), save])

    def stored(self, v: ir.Expr, place: ir.Expr) -> tirx.Stmt:
        _, _, rows, lanes = (int(e) for e in self.sums.shape)

        def element(m: int, lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(self.sums, [v, integer(m // rows), integer(m % rows), lane])
            return self.product.store(integer(0), integer(m), place * integer(lanes) + lane, value)

        def row(m: int) -> tirx.Stmt:
            return vectorized(lanes, lambda lane: element(m, lane))

        return sequence([row(m) for m in range(self.product.rows)])


# ----------------------------------------------------------------------------------------- transposed


def _transposed(product: Product, isa: Isa) -> tuple[list[ir.Var], list[tirx.Stmt]]:
    # half vectors of AVX-512 where they hold all rows: the other half would be padding
    lanes = isa.lanes() if product.rows > isa.lanes() // 2 or isa.lanes() == 8 else isa.lanes() // 2
    vectors = ceil_div(product.rows, lanes)
    # all streams' sums, the rows' vectors and one broadcast have to fit the registers
    streams = min(STREAMS, (isa.vector_registers - vectors - 1) // vectors)
    left, transpose = _left_columns(product, vectors * lanes)

    def task(point: Point) -> tirx.Stmt:
        tile = register_tile(streams, vectors, lanes)
        # the last task reads its last column again where columns are missing
        first, whole = point[0] * integer(streams), product.columns % streams == 0

        def at(r: int) -> ir.Expr:
            return clamp(first + integer(r), product.columns, inside=whole)

        def step(k: Point) -> tirx.Stmt:
            def value(r: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
                factor = tirx.BufferLoad(left, [k[0], v * integer(lanes) + lane])
                return tile.sum_at(r, v, lane) + product.right_at(integer(0), k[0], at(r)) * factor

            return tile.set(value)

        stores = [
            when(
                first + integer(r) < integer(product.columns), _stored(product, tile, r, at(r)), always=whole
            )
            for r in range(streams)
        ]
        return tile.within([tile.clear(), reduction([product.depth], tile, step), *stores])

    tasks = ceil_div(product.columns, streams)
    return [left], [transpose, grid((tasks,), task, parallel=True)]


def _stored(product: Product, tile: RegisterTile, r: int, column: ir.Expr) -> tirx.Stmt:
    def row(m: int) -> tirx.Stmt:
        value = tile.sum_at(r, integer(m // tile.lanes), integer(m % tile.lanes))
        return product.store(integer(0), integer(m), column, value)

    return sequence([row(m) for m in range(product.rows)])
