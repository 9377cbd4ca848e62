"""Many rows times a packed matrix: parts of a panel are dequantized into a buffer that stays in cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    Tile,
    ceil_div,
    clamp,
    grid,
    integer,
    loop,
    sequence,
    unrolled,
    vectorized,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.matmul.kernel import Element, GemmAccess, gemm_kernel, rank_gemm_tiles
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.rule import Request

_TASKS = 32
"""Tasks that a product is cut into if its size allows: enough for few threads to share evenly."""
_SHARING_ROWS = 32
"""Rows that must share a dequantized part: it costs each weight about as much as four multiply-adds."""
_PART_OF_L2 = 1 / 8
"""Of a second-level cache that a part takes in float32: codes, rows and results pass through it, too."""


@dataclass(frozen=True, slots=True)
class _Product:
    packed: Packed
    tile: Tile
    part: ir.Var
    """[depth of a part, width]: weights in float32."""
    partial: ir.Var | None
    """[rows of a task, width]: sums between parts, if there are several."""
    per_task: int
    """Blocks of rows."""

    @property
    def depth(self) -> int:
        return int(self.part.shape[0])


def many_rows(packed: Packed, request: Request) -> tuple[list[tirx.Stmt], list[ir.Var]]:
    """The stages of the product, and their buffers.

    A task is a panel of columns and a group of rows. For each part of the depth it dequantizes the panel's
    weights, and adds the products of its rows, which wait in a buffer of the task meanwhile.
    """
    ranked = rank_gemm_tiles(request.target.isa, packed.rows, packed.width)
    tile = next(tile for _, tile in ranked if packed.width % tile.columns == 0)
    spans = packed.depth // packed.span
    part_bytes = int(request.target.isa.l2_bytes * _PART_OF_L2)
    depth = min(max(part_bytes // (4 * packed.width * packed.span), 1), spans) * packed.span
    blocks = ceil_div(packed.rows, tile.rows)
    groups = ceil_div(at_least_one_each(_TASKS, request.threads), packed.panels)
    per_task = max(ceil_div(blocks, groups), min(blocks, ceil_div(_SHARING_ROWS, tile.rows)))
    part = tirx.decl_buffer((depth, packed.width), "float32", "weights")
    partial = None
    if depth < packed.depth:
        partial = tirx.decl_buffer((per_task * tile.rows, packed.width), "float32", "partial")
    product = _Product(packed, tile, part, partial, per_task)
    sums: list[ir.Var] = []
    body = grid(
        (packed.panels, ceil_div(blocks, per_task)),
        lambda at: _task(product, at[0], at[1], sums),
        parallel=True,
    )
    return [body], [part, *([] if partial is None else [partial]), *sums]


def _task(product: _Product, panel: ir.Expr, group: ir.Expr, sums: list[ir.Var]) -> tirx.Stmt:
    packed, depth = product.packed, product.depth
    before = ceil_div(packed.depth, depth) - 1

    def part(start: ir.Expr, extent: int) -> tirx.Stmt:
        return sequence(
            [
                _dequantized(product, panel, start, extent),
                _multiplied(product, panel, group, start, extent, sums),
            ]
        )

    # TVM allocates a buffer in the innermost loop that has all of its accesses, and sums wait from part to
    # part: so the last one stands behind the loop of the others
    last = part(integer(before * depth), packed.depth - before * depth)
    return sequence([loop(before, lambda i: part(i * integer(depth), depth)), last] if before else [last])


def _dequantized(product: _Product, panel: ir.Expr, start: ir.Expr, extent: int) -> tirx.Stmt:
    """The weights of the panel from `start` on into the buffer, a vector of columns and a span at a time."""
    packed, lanes, apart = product.packed, product.tile.lanes, product.packed.bytes_of_span

    def span(number: ir.Expr) -> tirx.Stmt:
        first = start + number * integer(packed.span)
        block = tirx.floordiv(first, integer(packed.block))
        row = tirx.floordiv(start, integer(packed.layout.codes_in_byte)) + number * integer(apart)

        def vector(v: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            def weights(i: int) -> tirx.Stmt:
                def element(lane: ir.Expr) -> tirx.Stmt:
                    column = v * integer(lanes) + lane
                    scale = packed.scale_at(panel, block, column)
                    weight = scale * packed.codes_at(panel, row + j, column)[i]
                    if not packed.is_centred:  # one multiply-add: the product of parameters is a span's
                        weight = weight - scale * packed.zero_at(panel, block, column)
                    at = [number * integer(packed.span) + j + integer(i * apart), column]
                    return tirx.BufferStore(product.part, weight, at)

                return vectorized(lanes, element)

            return sequence([weights(i) for i in range(packed.layout.codes_in_byte)])

        return unrolled(packed.width // lanes, lambda v: loop(apart, lambda j: vector(v, j)))

    return loop(extent // packed.span, span)


def _multiplied(
    product: _Product, panel: ir.Expr, group: ir.Expr, start: ir.Expr, extent: int, sums: list[ir.Var]
) -> tirx.Stmt:
    """All rows of a task times the buffer; the last part writes the result."""
    packed, tile = product.packed, product.tile
    blocks, parts = ceil_div(packed.rows, tile.rows), packed.width // tile.columns

    def kernel(v: ir.Expr, i: ir.Expr) -> tirx.Stmt:
        body, buffers = _tile(product, (panel, v), (group, i), start, extent)
        sums.extend(buffers)
        return body

    # the last group may be short
    left = tirx.min(integer(blocks) - group * integer(product.per_task), integer(product.per_task))
    count = product.per_task if blocks % product.per_task == 0 else left
    return loop(count, lambda i: loop(parts, lambda v: kernel(v, i)))


def _tile(
    product: _Product,
    columns: tuple[ir.Expr, ir.Expr],
    rows: tuple[ir.Expr, ir.Expr],
    start: ir.Expr,
    extent: int,
) -> tuple[tirx.Stmt, list[ir.Var]]:
    packed, tile, partial = product.packed, product.tile, product.partial
    (_, part), (group, i) = columns, rows
    whole = packed.rows % tile.rows == 0
    block = group * integer(product.per_task) + i

    def row(m: int) -> ir.Expr:
        return block * integer(tile.rows) + integer(m)

    def place(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        column = part * integer(tile.columns) + v * integer(tile.lanes) + lane
        return [i * integer(tile.rows) + integer(m), column]

    def left(k: ir.Expr, m: int) -> ir.Expr:
        return packed.row_at(clamp(row(m), packed.rows, inside=whole), start + k)

    def right(k: ir.Expr, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(product.part, [k, place(0, v, lane)[1]])

    def saved(sum_at: Element) -> tirx.Stmt:
        assert partial is not None

        def vectors(m: int) -> tirx.Stmt:
            def element(v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(partial, sum_at(m, v, lane), place(m, v, lane))

            return unrolled(tile.width, lambda v: vectorized(tile.lanes, lambda lane: element(v, lane)))

        return sequence([vectors(m) for m in range(tile.rows)])

    def write(sum_at: Element) -> tirx.Stmt:
        if partial is None:
            return _stored(product, columns, row, sum_at)
        is_last = start + integer(extent) == integer(packed.depth)
        return tirx.IfThenElse(is_last, _stored(product, columns, row, sum_at), saved(sum_at))

    def initial(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        zero = tirx.const(0, "float32")
        return tirx.Select(start > integer(0), tirx.BufferLoad(partial, place(m, v, lane)), zero)

    access = GemmAccess(left, right, write, None if partial is None else initial)
    return gemm_kernel(tile, extent, access)


def _stored(
    product: _Product, columns: tuple[ir.Expr, ir.Expr], row: Callable[[int], ir.Expr], sum_at: Element
) -> tirx.Stmt:
    """The results of a tile, of those rows and columns that there are."""
    packed, tile, (panel, part) = product.packed, product.tile, columns
    at = panel * integer(packed.width) + part * integer(tile.columns)
    whole = packed.rows % tile.rows == 0

    def vector(m: int, v: ir.Expr) -> tirx.Stmt:
        def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return packed.store(row(m), column, sum_at(m, v, lane))

        return write_columns(at, packed.columns, tile, v, element)

    def each(m: int) -> tirx.Stmt:
        vectors = unrolled(tile.width, lambda v: vector(m, v))
        return when(row(m) < integer(packed.rows), vectors, always=whole)

    return packed.where_columns_are(at, sequence([each(m) for m in range(tile.rows)]))
