"""A few rows times a packed matrix: codes are multiplied as they are, and the sums of a block scaled.

sum of a * scale * (code - zero)  =  scale * (sum of a * code  -  zero * sum of a)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import Point, Tile, grid, integer, loop, sequence, write_columns
from hybridc.schedules.cpu.core.register_tile import RegisterTile, reduction, register_tile
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.rule import Request

Column = Callable[[ir.Expr, ir.Expr], ir.Expr]
"""Of a panel, by vector and lane."""
FEW_ROWS = 8
"""Rows whose sums fit the registers beside a weight that is used once, and need no buffer."""
_SUMMED_AT_ONCE = 16
"""Elements that are added up as a tree, so that additions do not wait for one another."""


def few_rows(packed: Packed, request: Request) -> tuple[list[tirx.Stmt], list[ir.Var]]:
    """The stages of the product, and their buffers.

    A task is a panel of columns. What zeros subtract follows from the sum of each block of each row, which is
    computed once for all tasks.
    """
    lanes = request.target.isa.lanes()
    totals = (
        None if packed.is_centred else tirx.decl_buffer((packed.rows, packed.blocks), "float32", "totals")
    )
    body = grid((packed.panels,), lambda at: _panel(packed, totals, at[0], request), parallel=True)
    assert packed.width % lanes == 0
    return ([body], []) if totals is None else ([_summed(packed, totals), body], [totals])


def _summed(packed: Packed, totals: ir.Var) -> tirx.Stmt:
    """The sum of each block of each row."""
    block = packed.block
    together = max(s for s in range(1, _SUMMED_AT_ONCE + 1) if block % s == 0)

    def total(m: ir.Expr, b: ir.Expr) -> tirx.Stmt:
        def added(group: ir.Expr) -> tirx.Stmt:
            first = b * integer(block) + group * integer(together)
            terms = [packed.row_at(m, first + integer(i)) for i in range(together)]
            return tirx.BufferStore(totals, tirx.BufferLoad(totals, [m, b]) + _tree(terms), [m, b])

        zero = tirx.BufferStore(totals, tirx.const(0, "float32"), [m, b])
        return sequence([zero, loop(block // together, added)])

    return loop(packed.rows, lambda m: loop(packed.blocks, lambda b: total(m, b)))


def _tree(terms: list[ir.Expr]) -> ir.Expr:
    while len(terms) > 1:
        terms = [reduce(add, terms[i : i + 2]) for i in range(0, len(terms), 2)]
    return terms[0]


def _panel(packed: Packed, totals: ir.Var | None, panel: ir.Expr, request: Request) -> tirx.Stmt:
    isa = request.target.isa
    lanes = isa.lanes()
    # sums of a block and those of all blocks share the registers
    most = max(min(isa.vector_registers // (2 * packed.rows), packed.width // lanes), 1)
    vectors = max(v for v in (1, 2, 4, 8) if v <= most)
    parts = packed.width // (vectors * lanes)
    return loop(parts, lambda part: _part(packed, totals, (panel, part), (vectors, lanes)))


def _part(
    packed: Packed, totals: ir.Var | None, at: tuple[ir.Expr, ir.Expr], width: tuple[int, int]
) -> tirx.Stmt:
    (panel, part), (vectors, lanes) = at, width
    sums, inner = (register_tile(packed.rows, vectors, lanes) for _ in range(2))

    def column(v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return part * integer(vectors * lanes) + v * integer(lanes) + lane

    def block(b: ir.Expr) -> tirx.Stmt:
        def scaled(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            total, place = inner.sum_at(m, v, lane), (panel, b, column(v, lane))
            if totals is not None:
                total = total - packed.zero_at(*place) * tirx.BufferLoad(totals, [integer(m), b])
            return sums.sum_at(m, v, lane) + packed.scale_at(*place) * total

        spans = packed.block // packed.span

        def step(point: Point) -> tirx.Stmt:
            return _multiplied(packed, inner, (panel, b * integer(spans) + point[0], point[1]), column)

        return inner.within(
            [inner.clear(), reduction([spans, packed.bytes_of_span], inner, step), sums.set(scaled)]
        )

    tile = Tile(packed.rows, 1, vectors, lanes)
    start = panel * integer(packed.width) + part * integer(tile.columns)

    def stored(m: int, v: int) -> tirx.Stmt:
        return write_columns(
            start,
            packed.columns,
            tile,
            integer(v),
            lambda place, lane: packed.store(integer(m), place, sums.sum_at(m, integer(v), lane)),
        )

    stores = [stored(m, v) for m in range(packed.rows) for v in range(vectors)]
    store = packed.where_columns_are(start, sequence(stores))
    return sums.within([sums.clear(), loop(packed.blocks, block), store])


def _multiplied(
    packed: Packed, inner: RegisterTile, at: tuple[ir.Expr, ir.Expr, ir.Expr], column: Column
) -> tirx.Stmt:
    """The codes of each byte, times the elements of the rows that they belong to."""
    panel, span, j = at
    apart = packed.bytes_of_span

    def value(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        codes = packed.codes_at(panel, span * integer(apart) + j, column(v, lane))
        first = span * integer(packed.span) + j
        factors = (packed.row_at(integer(m), first + integer(i * apart)) for i in range(len(codes)))
        return reduce(
            add, (a * code for a, code in zip(factors, codes, strict=True)), inner.sum_at(m, v, lane)
        )

    return inner.set(value)
