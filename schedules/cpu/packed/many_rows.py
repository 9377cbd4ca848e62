"""Many rows times a packed matrix: parts of a panel are dequantized into a buffer that stays in cache.

There the weights are float32, or pairs of bf16 numbers, if the rows are (`bf16_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
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
from hybridc.schedules.cpu.packed.bf16_rows import rounded_pairs
from hybridc.schedules.cpu.packed.dequantize import ROWS_OF_DEQUANTIZING, dequantized
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.rule import Request

_TASKS = 32
"""Tasks that a product is cut into at most, but one for each thread: enough for few threads to share
evenly."""
_PART_OF_L2 = 1 / 8
"""Of a second-level cache that a part takes in float32: codes, rows and results pass through it, too."""


@dataclass(frozen=True, slots=True)
class _Product:
    packed: Packed
    tile: Tile
    part: ir.Var
    """[depth of a part, width]: weights in float32, or half as many pairs of bf16."""
    partial: ir.Var | None
    """[rows of a task, width]: sums between parts, if there are several."""
    per_task: int
    """Blocks of rows."""
    dot: Dot | None
    """What multiplies bf16 numbers; None: they are float32."""
    pairs: ir.Var | None
    """[rows, depth / 2]: pairs of bf16, if these are multiplied."""

    @property
    def together(self) -> int:
        """Consecutive k that a step of the kernel multiplies."""
        return 1 if self.dot is None else self.dot.group_size

    @property
    def depth(self) -> int:
        return int(self.part.shape[0]) * self.together


def many_rows(
    packed: Packed, request: Request, dot: Dot | None = None
) -> tuple[list[tirx.Stmt], list[ir.Var]]:
    """The stages of the product, and their buffers. With `dot` both factors are rounded to bf16.

    A task is a panel of columns and a group of rows. For each part of the depth it dequantizes the panel's
    weights, and adds the products of its rows, which wait in a buffer of the task meanwhile.
    """
    ranked = rank_gemm_tiles(request.target.isa, packed.rows, packed.width)
    tile = next(tile for _, tile in ranked if packed.width % tile.columns == 0)
    together = 1 if dot is None else dot.group_size
    spans = packed.depth // packed.span
    span_bytes = 4 * packed.width * packed.span // together
    part_bytes = int(request.target.isa.l2_bytes * _PART_OF_L2)
    depth = min(max(part_bytes // span_bytes, 1), spans) * packed.span
    blocks = ceil_div(packed.rows, tile.rows)
    groups = groups_of_rows(
        packed.panels, blocks, tile.rows, ROWS_OF_DEQUANTIZING * together, request.threads
    )
    per_task = ceil_div(blocks, groups)
    part = tirx.decl_buffer(
        (depth // together, packed.width), "float32" if dot is None else "int32", "weights"
    )
    partial = None
    if depth < packed.depth:
        partial = tirx.decl_buffer((per_task * tile.rows, packed.width), "float32", "partial")
    pairs = None
    if dot is not None:
        pairs = tirx.decl_buffer((packed.rows, packed.depth // together), "int32", "pairs")
    product = _Product(packed, tile, part, partial, per_task, dot, pairs)
    sums: list[ir.Var] = []
    body = grid(
        (packed.panels, ceil_div(blocks, per_task)),
        lambda at: _task(product, at[0], at[1], sums),
        parallel=True,
    )
    buffers = [part, *([] if partial is None else [partial]), *sums]
    if dot is None or pairs is None:
        return [body], buffers
    rounded = rounded_pairs(packed, dot, pairs, lambda row, pair: [row, pair])
    return [rounded, dot.within(body)], [pairs, *buffers]


def groups_of_rows(panels: int, blocks: int, rows_of_block: int, dequantizing: int, threads: int) -> int:
    """Into how many groups blocks of rows are best cut, whose tasks `threads` share: each dequantizes all
    weights, at the cost of so many rows."""

    def time(groups: int) -> int:
        tasks_of_thread = ceil_div(panels * groups, threads)
        return tasks_of_thread * (ceil_div(blocks, groups) * rows_of_block + dequantizing)

    most = ceil_div(at_least_one_each(_TASKS, threads), panels)
    return min(range(1, min(most, blocks) + 1), key=time)


def _task(product: _Product, panel: ir.Expr, group: ir.Expr, sums: list[ir.Var]) -> tirx.Stmt:
    packed, depth = product.packed, product.depth
    before = ceil_div(packed.depth, depth) - 1

    def part(start: ir.Expr, extent: int) -> tirx.Stmt:
        return sequence(
            [
                dequantized(packed, product.part, panel, start, extent, product.tile.lanes),
                _multiplied(product, panel, group, start, extent, sums),
            ]
        )

    # TVM allocates a buffer in the innermost loop that has all of its accesses, and sums wait from part to
    # part: so the last one stands behind the loop of the others
    last = part(integer(before * depth), packed.depth - before * depth)
    return sequence([loop(before, lambda i: part(i * integer(depth), depth)), last] if before else [last])


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
    packed, tile, partial, pairs = product.packed, product.tile, product.partial, product.pairs
    (_, part), (group, i) = columns, rows
    whole = packed.rows % tile.rows == 0
    block = group * integer(product.per_task) + i

    def row(m: int) -> ir.Expr:
        return block * integer(tile.rows) + integer(m)

    def place(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        column = part * integer(tile.columns) + v * integer(tile.lanes) + lane
        return [i * integer(tile.rows) + integer(m), column]

    def left(k: ir.Expr, m: int) -> ir.Expr:
        at = clamp(row(m), packed.rows, inside=whole)
        if pairs is None:
            return packed.row_at(at, start + k)
        return tirx.BufferLoad(pairs, [at, tirx.floordiv(start, integer(product.together)) + k])

    def right(k: ir.Expr, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        first = place(0, v, integer(0))[1]
        # all lanes at once; TVM finds no region of a number added to a vector
        column = first + lane if pairs is None else tirx.Ramp(first, integer(1), tile.lanes)
        return tirx.BufferLoad(product.part, [k, column])

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
    return gemm_kernel(tile, extent // product.together, access, dot=product.dot)


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
