"""Many rows times a packed matrix in AMX tiles of bf16: a panel is dequantized into a buffer that stays in
cache, where it lies as tiles are loaded."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    Point,
    Tile,
    ceil_div,
    grid,
    integer,
    loop,
    sequence,
    when,
    write_columns,
)
from hybridc.schedules.cpu.low_precision.amx import (
    ROW_BYTES,
    SIDE,
    Address,
    TileUnit,
    tile_kernel,
    tile_shape,
    tile_unit,
    with_tiles,
)
from hybridc.schedules.cpu.packed.bf16_rows import rounded_pairs
from hybridc.schedules.cpu.packed.dequantize import ROWS_OF_DEQUANTIZING, dequantized
from hybridc.schedules.cpu.packed.many_rows import groups_of_rows
from hybridc.schedules.cpu.packed.read import Packed
from hybridc.schedules.rule import Request

_STEPS_OF_TILES = 16
"""Multiply-adds of bf16 that a tile unit does in the time of one of floats on vectors."""


def tiled_rows(packed: Packed, request: Request, dot: Dot) -> tuple[list[tirx.Stmt], list[ir.Var]]:
    """The stages of the product, and their buffers.

    A task is a panel of columns and a group of rows.
    """
    steps = packed.depth // (SIDE * dot.group_size)
    tiles = ceil_div(packed.rows, SIDE)
    most, columns = tile_shape(packed.width // SIDE)
    shape = min(most, tiles), columns
    blocks = ceil_div(tiles, shape[0])
    pairs = tirx.decl_buffer((steps, blocks * shape[0] * SIDE, SIDE), "int32", "pairs")
    weights = tirx.decl_buffer((packed.depth // dot.group_size, packed.width), "int32", "weights")
    dequantizing = ROWS_OF_DEQUANTIZING * _STEPS_OF_TILES
    groups = groups_of_rows(packed.panels, blocks, shape[0] * SIDE, dequantizing, request.threads)
    per_task = ceil_div(blocks, groups)

    def place(row: ir.Expr, pair: ir.Expr) -> list[ir.Expr]:
        return [tirx.floordiv(pair, integer(SIDE)), row, tirx.floormod(pair, integer(SIDE))]

    def task(point: Point) -> tirx.Stmt:
        panel, group = point
        unit, first = tile_unit(dot), group * integer(per_task)
        filled = dequantized(packed, weights, panel, integer(0), packed.depth, request.target.isa.lanes())
        left = tirx.min(integer(blocks) - first, integer(per_task))
        count = per_task if blocks % per_task == 0 else left

        def kernel(block: ir.Expr, part: ir.Expr) -> tirx.Stmt:
            return _kernel(packed, unit, shape, (pairs, weights), (panel, part, first + block))

        parts = packed.width // SIDE // columns
        multiplied = loop(parts, lambda part: loop(count, lambda block: kernel(block, part)))
        return unit.within(sequence([filled, unit.whole(weights), multiplied]))

    body = grid((packed.panels, ceil_div(blocks, per_task)), task, parallel=True)
    return [rounded_pairs(packed, dot, pairs, place), with_tiles(dot, body)], [pairs, weights]


def _kernel(
    packed: Packed,
    unit: TileUnit,
    shape: tuple[int, int],
    factors: tuple[ir.Var, ir.Var],
    at: tuple[ir.Expr, ir.Expr, ir.Expr],
) -> tirx.Stmt:
    """All depths of a block of rows and a part of the panel."""
    (rows, columns), (pairs, weights), (panel, part, block) = shape, factors, at
    steps = int(pairs.shape[0])

    def row(i: int) -> ir.Expr:
        return (block * integer(rows) + integer(i)) * integer(SIDE)

    def left(k: Point, i: int) -> Address:
        return tirx.BufferLoad(pairs, [k[0], row(i), integer(0)]), integer(ROW_BYTES)

    def right(k: Point, j: int) -> Address:
        column = (part * integer(columns) + integer(j)) * integer(SIDE)
        return tirx.BufferLoad(weights, [k[0] * integer(SIDE), column]), integer(4 * packed.width)

    def write(i: int, j: int, m: ir.Expr, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        first = panel * integer(packed.width) + part * integer(columns * SIDE)
        stored = write_columns(
            first,
            packed.columns,
            Tile(SIDE, 1, columns, SIDE),
            integer(j),
            lambda column, lane: packed.store(row(i) + m, column, sum_at(lane)),
        )
        exists = packed.where_columns_are(first, stored)
        whole = packed.rows % (rows * SIDE) == 0
        return when(row(i) + m < integer(packed.rows), exists, always=whole)

    return tile_kernel(unit, shape, (steps,), left, right, write)
