"""Results in blocks as plain ones, through the epilogue.

A task has a block of channels of some hundred pixels: tiles of them are transposed in registers into a buffer
that stays in the first-level cache, from which the epilogue reads whole vectors, each element once.
"""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_converted.read import PlainConvolution
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    grid,
    integer,
    loop,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.shuffles import COLUMNS, transposed

TASK_PIXELS = 256
"""Of a task, at most: 16 KiB of a block of 16 channels, half of the first-level cache."""


def plain_results(plain: PlainConvolution, results: ir.Var) -> tirx.Stmt:
    """The last stage of a kernel whose sums are `results`, `[N, OB, H, W, o]`."""
    conv = plain.conv
    batches, blocks, height, width, lanes = (int(e) for e in results.shape)
    pixels = height * width
    vectors = ceil_div(ceil_div(pixels, ceil_div(pixels, TASK_PIXELS)), lanes)
    tile = Tile(1, 1, vectors, lanes)
    turned = tirx.decl_buffer((lanes, tile.columns), "float32", "turned")

    def turn(image: ir.Expr, block: ir.Expr, start: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """A square of pixels and channels; pixels behind the last one are that one again."""
        first = start + number * integer(lanes)
        plane = (image * integer(blocks) + block) * integer(pixels)

        def square(inside: bool) -> tirx.Stmt:
            statements: list[tirx.Stmt] = []
            for quad in range(0, lanes, COLUMNS):

                def piece(row: int, quad: int = quad) -> ir.Expr:
                    pixel = first + integer(row)
                    pixel = pixel if inside else tirx.min(pixel, integer(pixels - 1))
                    at = (plane + pixel) * integer(lanes) + integer(quad)
                    zeros = [integer(0)] * 4
                    return tirx.BufferLoad(results, [*zeros, tirx.Ramp(at, integer(1), COLUMNS)])

                made, columns = transposed(piece, lanes, "float32")
                ramp = tirx.Ramp(number * integer(lanes), integer(1), lanes)
                stores = [
                    tirx.BufferStore(turned, column, [integer(quad + k), ramp])
                    for k, column in enumerate(columns)
                ]
                statements += [*made, *stores]
            return tirx.SeqStmt(statements)

        if pixels % tile.columns == 0:
            return square(True)
        if pixels % lanes == 0:
            return tirx.IfThenElse(first < integer(pixels), square(True), None)
        rest = tirx.IfThenElse(first < integer(pixels), square(False), None)
        return tirx.IfThenElse(first + integer(lanes) <= integer(pixels), square(True), rest)

    def task(point: Point) -> tirx.Stmt:
        image, block, part = point
        start = part * integer(tile.columns)

        def channel(c: ir.Expr) -> tirx.Stmt:
            output = block * integer(lanes) + c

            def vector(v: ir.Expr) -> tirx.Stmt:
                def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                    value = tirx.BufferLoad(turned, [c, v * integer(lanes) + lane])
                    y, x = tirx.floordiv(column, integer(width)), tirx.floormod(column, integer(width))
                    return conv.contraction.store(conv.point(image, output, y, x), value)

                return write_columns(start, pixels, tile, v, element)

            body = loop(vectors, vector)
            return when(output < integer(plain.outputs), body, always=plain.outputs % lanes == 0)

        squares = loop(vectors, lambda number: turn(image, block, start, number))
        return tirx.SeqStmt([tirx.AllocBuffer(turned), squares, loop(lanes, channel)])

    parts = ceil_div(pixels, tile.columns)
    work = batches * blocks * pixels * lanes
    return grid((batches, blocks, parts), task, parallel=work >= PARALLEL_WORK)
