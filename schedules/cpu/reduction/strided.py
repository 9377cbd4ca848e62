"""Rows that lie side by side in memory: vectors across rows.

The softmax over channels of an image, sums over leading axes, pooling of blocked activations. A function that
passes over a row only once streams chunks of columns, whose accumulators stay in the first-level cache:

    for other rows, chunk of columns:                              (parallel)
        for groups of the row:  for vector in chunk:  accumulators[vector, :] = combine(..., operands)
        output = value

Others are in `strided_stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import Point, function_of, integer, loop, sequence, vectorized
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cpu.reduction.read import Reduction, RowReductions
from hybridc.schedules.cpu.reduction.strided_chunks import StridedRows, even_width, nested
from hybridc.schedules.cpu.reduction.strided_stages import staged
from hybridc.schedules.cpu.reduction.vectors import (
    UNROLLED_VECTORS,
    Registers,
    contiguous_axes,
    element,
    lanes_of,
    steps,
)
from hybridc.targets import Isa

CHUNK_COLUMNS = 4096
"""Accumulators that leave half of a first-level cache for what streams through. Chunks are narrower where
that gives each thread a task; whole ones are read as one stream, which is fastest."""
GROUP = 4
"""Elements of a row that are combined before their accumulator is stored again, in narrow chunks."""


def schedule_strided(
    function: tirx.PrimFunc, rows: RowReductions, isa: Isa, threads: int
) -> tirx.PrimFunc | None:
    """The function with vectors across its rows; None if they do not lie side by side."""
    operands = [*rows.element_values, rows.value, tirx.BufferLoad(rows.output, rows.indices)]
    count = contiguous_axes(operands, rows.row, rows.row_extents)
    if not count:
        return None
    columns = StridedRows(rows, count, lanes_of(rows, isa))
    # nothing has to stay in a cache for a second pass
    passes_once = len(rows.stages) == 1 and not rows.writes_elements and not rows.stages[0].kept
    body, buffers = _streamed(columns, threads) if passes_once else staged(columns, threads)
    return function_of(function, list(function.params), [body], buffers)


def _streamed(columns: StridedRows, threads: int) -> tuple[tirx.Stmt, list[ir.Var]]:
    """One pass over the rows, a chunk of columns at a time."""
    rows, reductions = columns.rows, columns.rows.stages[0].reductions
    width = even_width(columns, CHUNK_COLUMNS, threads)
    # whole rows of memory are one stream; grouping elements would make several of it
    streams = width == columns.columns > UNROLLED_VECTORS * columns.lanes
    group = 1 if streams else GROUP
    registers = Registers("global" if rows.row_count > width else "local")
    sums = {r.result: registers.vector(width, str(r.operand.ty.dtype), r.result.name) for r in reductions}

    def chunk(outer: Point, start: ir.Expr, size: int) -> tirx.Stmt:
        def each_vector(body: Callable[[ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            return steps(
                size, columns.lanes, lambda s: vectorized(s.width, lambda lane: body(s.start + lane))
            )

        def clear(column: ir.Expr) -> tirx.Stmt:
            return sequence([tirx.BufferStore(sums[r.result], r.identity, [column]) for r in reductions])

        def accumulate(points: Sequence[Point], column: ir.Expr) -> tirx.Stmt:
            def value(r: Reduction) -> ir.Expr:
                result: ir.Expr = element(sums[r.result], column)
                for reduced in points:
                    at = columns.at(outer, reduced, start + column)
                    result = r.combine(result, substitute(r.operand, at))
                return result

            return sequence([tirx.BufferStore(sums[r.result], value(r), [column]) for r in reductions])

        def write(column: ir.Expr) -> tirx.Stmt:
            at = columns.at(outer, (), start + column) | {v: element(b, column) for v, b in sums.items()}
            return columns.output(at, substitute(rows.value, at))

        groups = _grouped(
            rows.reduced_extents, group, lambda points: each_vector(partial(accumulate, points))
        )
        return sequence([each_vector(clear), groups, each_vector(write)])

    return columns.chunks(width, chunk), registers.buffers


def _grouped(extents: Sequence[int], size: int, body: Callable[[Sequence[Point]], tirx.Stmt]) -> tirx.Stmt:
    """Loops over the reduced axes, whose last one is taken several elements at a time."""
    *leading, last = extents
    rest = last % size

    def inner(point: Point) -> tirx.Stmt:
        def group(first: ir.Expr, count: int) -> tirx.Stmt:
            return body([(*point, first + integer(i)) for i in range(count)])

        whole = [loop(last // size, lambda i: group(i * integer(size), size))] if last >= size else []
        return sequence([*whole, group(integer(last - rest), rest)] if rest else whole)

    return nested(leading, inner)
