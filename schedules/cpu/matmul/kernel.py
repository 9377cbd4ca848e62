"""The micro-kernel of matrix products: a tile of accumulators in registers, and what it prefetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    UNROLLED_MULTIPLY_ADDS,
    Tile,
    ceil_div,
    integer,
    lanes_for,
    loop,
    prefetch,
    sequence,
    unrolled,
    vectorized,
)
from hybridc.targets import Isa

Element = Callable[[int, ir.Expr, ir.Expr], ir.Expr]
"""A value by row of the tile, vector and lane."""
Ahead = Callable[[ir.Expr, int], Sequence[tirx.Stmt]]
"""Statements beside one iteration of the reduction, given its number and how many there are."""

ZERO = integer(0)
SPARE_REGISTERS = 3
"""Registers that LLVM fills ahead where it has 32 of them; a tile that leaves fewer spills accumulators."""


def rank_gemm_tiles(isa: Isa, rows: int, columns: int, *, halves: int = 1) -> list[tuple[float, Tile]]:
    """All tiles with their predicted time for each step of the reduction, the least first.

    Predicted time is padded work, in each of so many `halves` of both sides, times the load of the
    pipeline: a multiply-add needs its share of broadcasts and vector loads, of which the latter come from
    L2, and waits a few steps for its own result.
    """
    lanes = lanes_for(isa, columns)
    vectors = ceil_div(columns, lanes)
    # of 16 registers a spare one would take too many sums away
    free = isa.vector_registers - (SPARE_REGISTERS if isa.vector_registers > 16 else 0)

    def cost(tile: Tile) -> float:
        height, width = tile.rows * halves, tile.width * halves
        # tiles stick out in both directions
        padded = ceil_div(rows, height) * height * ceil_div(vectors, width) * width * lanes
        sums = tile.rows * tile.width
        loads = (tile.rows + tile.width) / sums
        return padded * max(1.0, isa.sums_in_flight / sums) * (1.0 + 0.4 * loads + 0.1 / tile.rows)

    # accumulators, a row of vectors of B and one broadcast element of A
    tiles = (
        Tile(m, 1, w, lanes)
        for m in range(1, min(rows, 16) + 1)
        for w in range(1, min(vectors, 8) + 1)
        if m * w + w + 1 <= free
    )
    return sorted(((cost(tile), tile) for tile in tiles), key=lambda ranked: ranked[0])


@dataclass(frozen=True, slots=True)
class GemmAccess:
    """Where a tile's factors are read, and what becomes of its sums."""

    left: Callable[[ir.Expr, int], ir.Expr]
    """`left(k, m)`, a scalar."""
    right: Callable[[ir.Expr, ir.Expr, ir.Expr], ir.Expr]
    """`right(k, vector, lane)`."""
    write: Callable[[Element], tirx.Stmt]
    """The statement that stores the sums it is given."""
    initial: Element | None = None
    """What sums start with; None: zero."""


def gemm_kernel(
    tile: Tile,
    depth: int,
    access: GemmAccess,
    ahead: Sequence[Ahead] = (),
    dot: Dot | None = None,
    times: int | ir.Expr = 1,
) -> tuple[tirx.Stmt, list[ir.Var]]:
    """`initial(m, vector, lane) + sum over k of left(k, m) * right(k, vector, lane)`, given to `write`.

    The reduction has `depth * times` steps, of which `times` may only be known at run time.

    With `dot` the factors are VNNI-packed low-precision operands.
    Returns the accumulators' buffers too, which the function's root block must allocate. They are one a row
    and of global scope: TVM puts on the stack, from where LLVM moves them into registers whatever else the
    loop does, only what is in that scope and below 1 KiB.
    """
    # 8-bit products are summed in int32
    dtype = "float32" if dot is None else dot.sum_dtype
    sums = [tirx.decl_buffer((tile.width, tile.lanes), dtype, f"sums{m}") for m in range(tile.rows)]

    def sum_at(m: int, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(sums[m], [vector, lane])

    def zero(m: int, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return tirx.const(0, dtype)

    def each(value: Element) -> list[tirx.Stmt]:
        def row(m: int) -> tirx.Stmt:
            def vector(v: ir.Expr) -> tirx.Stmt:
                return vectorized(
                    tile.lanes, lambda lane: tirx.BufferStore(sums[m], value(m, v, lane), [v, lane])
                )

            return unrolled(tile.width, vector)

        return [row(m) for m in range(tile.rows)]

    def vectors(k: ir.Expr, m: int, v: ir.Expr) -> tirx.Stmt:
        assert dot is not None
        lanes = tirx.Ramp(integer(0), integer(1), tile.lanes)
        total = dot.multiply_add(sum_at(m, v, lanes), access.left(k, m), access.right(k, v, lanes))
        return tirx.BufferStore(sums[m], total, [v, lanes])

    def step(k: ir.Expr) -> tirx.Stmt:
        if dot is not None:
            return sequence([unrolled(tile.width, partial(vectors, k, m)) for m in range(tile.rows)])
        return sequence(
            each(lambda m, v, lane: sum_at(m, v, lane) + access.left(k, m) * access.right(k, v, lane))
        )

    budget = max(UNROLLED_MULTIPLY_ADDS // (tile.rows * tile.width), 1)
    # a divisor of the depth, so that no step is left over
    together = max(s for s in range(1, min(depth, budget) + 1) if depth % s == 0)
    count = depth // together

    def iteration(number: ir.Expr) -> tirx.Stmt:
        steps = unrolled(together, lambda i: step(number * integer(together) + i))
        return sequence([*(stmt for each in ahead for stmt in each(number, count)), steps])

    trips = count * times if isinstance(times, int) else integer(count) * times
    begin = each(access.initial or zero)
    return sequence([*begin, loop(trips, iteration), access.write(sum_at)]), sums


def prefetch_next(
    element: Callable[[ir.Expr], ir.Expr], elements: int, part: ir.Expr = ZERO, parts: int = 1
) -> Ahead:
    """Prefetch as many elements as a kernel reads, from behind those, into L2: one part of `parts`.

    `element(i)` is element i of those it reads. Streams of the hardware's prefetcher end at every page, and
    it does not know that a panel is read from its begin again by every block of rows.
    """

    def ahead(number: ir.Expr, count: int) -> Sequence[tirx.Stmt]:
        # evenly over all iterations: bursts would delay the loads between them
        together = ceil_div(elements, CACHE_LINE_FLOATS * count * parts)
        first = (part * integer(count) + number) * integer(together)
        cache_lines = (
            integer(elements) + (first + integer(i)) * integer(CACHE_LINE_FLOATS) for i in range(together)
        )
        return [prefetch(element(at), locality=2) for at in cache_lines]

    return ahead


def prefetch_rows(
    element: Callable[[ir.Expr, ir.Expr], ir.Expr], shape: tuple[int, int], part: ir.Expr, parts: int
) -> Ahead:
    """Prefetch rows of `shape`, rows and elements of each, into L2: one part of `parts`.

    `element(row, k)` is an element of them. Several iterations ask for the same line where there are fewer.
    """
    rows, depth = shape
    lines_of_row = ceil_div(depth, CACHE_LINE_FLOATS)
    lines = rows * lines_of_row
    lines_of_part = ceil_div(lines, parts)

    def ahead(number: ir.Expr, count: int) -> Sequence[tirx.Stmt]:
        # evenly over all iterations, as above; two divisions, so that products fit into 32 bits
        begin = tirx.floordiv(part * integer(lines), integer(parts))
        first = begin + tirx.floordiv(number * integer(lines_of_part), integer(count))

        def line(i: int) -> tirx.Stmt:
            place = first + integer(i)
            k = tirx.floormod(place, integer(lines_of_row)) * integer(CACHE_LINE_FLOATS)
            return prefetch(element(tirx.floordiv(place, integer(lines_of_row)), k), locality=2)

        return [line(i) for i in range(ceil_div(lines_of_part, count))]

    return ahead
