"""Sums of which groups of threads, or blocks, have parts: added in their order, so that no run differs."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, loop, unrolled, vectorized
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS
from hybridc.schedules.cuda.core.loops import launched
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.results import Results
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.safety.statements import sequence


def collected(tile: Tile, sums: ir.Var, exchanged: ir.Var, group: ir.Expr, own: ir.Expr) -> list[tirx.Stmt]:
    """The sums of all groups into the first one's, one group after the other; barriers stand between."""

    def each(one: Callable[[list[ir.Expr], list[ir.Expr]], tirx.Stmt]) -> tirx.Stmt:
        """`one` for each sum: where it is in registers, and where all threads of a group exchange it."""

        def quad(number: ir.Expr) -> tirx.Stmt:
            def lane(lane: ir.Expr) -> tirx.Stmt:
                place = (number * integer(tile.threads) + own) * integer(WIDTH) + lane
                return one([number * integer(WIDTH) + lane], [place])

            return vectorized(WIDTH, lane)

        return unrolled(tile.accumulators // WIDTH, quad)

    def give(at: list[ir.Expr], place: list[ir.Expr]) -> tirx.Stmt:
        return tirx.BufferStore(exchanged, tirx.BufferLoad(sums, at), place)

    def take(at: list[ir.Expr], place: list[ir.Expr]) -> tirx.Stmt:
        total = tirx.BufferLoad(sums, at) + tirx.BufferLoad(exchanged, place)
        return tirx.BufferStore(sums, total, at)

    statements: list[tirx.Stmt] = []
    for giver in range(1, tile.groups):
        statements.append(tirx.IfThenElse(tirx.EQ(group, integer(giver)), each(give), None))
        statements.append(tirx.IfThenElse(tirx.EQ(group, integer(0)), each(take), None))
    return statements


def added_up(product: Product, count: int, parts: ir.Var, sums: ir.Var, results: Results) -> tirx.Stmt:
    """The launch that adds partial sums, four results a thread."""
    quads = -(-product.columns.size // WIDTH)
    total = product.batch.size * product.rows.size * quads

    def body(block: ir.Var, thread: ir.Var) -> tirx.Stmt:
        flat = block * integer(BLOCK_THREADS) + thread
        column = tirx.floormod(flat, integer(quads)) * integer(WIDTH)
        rest = tirx.floordiv(flat, integer(quads))
        row = tirx.floormod(rest, integer(product.rows.size))
        batch = tirx.floordiv(rest, integer(product.rows.size))

        def clear(lane: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(sums, tirx.FloatImm("float32", 0.0), [lane])

        def part(number: ir.Expr) -> tirx.Stmt:
            def lane(lane: ir.Expr) -> tirx.Stmt:
                slot = batch * integer(count) + number
                value = tirx.BufferLoad(parts, [slot, row, column + lane])
                return tirx.BufferStore(sums, tirx.BufferLoad(sums, [lane]) + value, [lane])

            return vectorized(WIDTH, lane)

        stored = results.store_quad(sums, integer(0), product.batch.at(batch), row, column)
        whole = sequence([vectorized(WIDTH, clear), loop(count, part), stored])
        if total % BLOCK_THREADS:
            return tirx.IfThenElse(flat < integer(total), whole, None)
        return whole

    return launched(-(-total // BLOCK_THREADS), BLOCK_THREADS, body)
