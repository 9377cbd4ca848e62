"""Chunks of columns: rows that lie side by side in memory, each lane of a vector a row of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, Point, ceil_div, grid, integer, loop
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cpu.reduction.read import RowReductions
from hybridc.schedules.cpu.reduction.vectors import Values, flat_axes

BLOCK_VECTORS = 4
"""Accumulators that hide the latency of an addition."""


@dataclass(frozen=True, slots=True)
class StridedRows:
    """The axes of a function and how they become expressions."""

    rows: RowReductions
    count: int
    """Trailing axes of the rows that are contiguous together."""
    lanes: int

    @property
    def columns(self) -> int:
        """Rows that lie side by side: the elements of the contiguous axes."""
        return math.prod(self.rows.row_extents[-self.count :])

    @property
    def outer(self) -> tuple[int, ...]:
        """Extents of the row's axes before the contiguous ones."""
        return self.rows.row_extents[: -self.count]

    def at(self, outer: Point, reduced: Point, column: ir.Expr) -> Values:
        """What every variable stands for, at a point of the outer axes, the reduced axes and a column."""
        axes, extents = self.rows.row[-self.count :], self.rows.row_extents[-self.count :]
        values = dict(zip(self.rows.row, outer, strict=False)) | flat_axes(axes, extents, column)
        return values | dict(zip(self.rows.reduced, reduced, strict=False))

    def output(self, at: Values, value: ir.Expr) -> tirx.Stmt:
        """Store what a row makes of its results."""
        return tirx.BufferStore(self.rows.output, value, [substitute(i, at) for i in self.rows.indices])

    def chunks(self, width: int, body: Callable[[Point, ir.Expr, int], tirx.Stmt]) -> tirx.Stmt:
        """All tasks: `body(outer, first column, columns)`; the last chunk of columns may be narrower."""
        # the last chunk has code of its own, so that inner loops have constant extents
        whole, rest = divmod(self.columns, width)

        def task(point: Point) -> tirx.Stmt:
            *outer, number = point
            start = number * integer(width)
            if not rest:
                return body(outer, start, width)
            if not whole:
                return body(outer, start, rest)
            last = body(outer, integer(whole * width), rest)
            return tirx.IfThenElse(number < integer(whole), body(outer, start, width), last)

        work = self.rows.row_count * self.rows.reduced_length * len(self.rows.stages)
        return grid((*self.outer, ceil_div(self.columns, width)), task, parallel=work >= PARALLEL_WORK)


def even_width(columns: StridedRows, limit: int, least_tasks: int) -> int:
    """Columns of a chunk: whole vectors, no more than `limit`, and fewer if there were too few tasks."""
    tasks = math.prod(columns.outer)
    wanted = ceil_div(columns.columns, max(least_tasks // tasks, 1))
    # fewer vectors would wait for their own sums
    width = max(min(limit, wanted), BLOCK_VECTORS * columns.lanes)
    return min(ceil_div(width, columns.lanes) * columns.lanes, columns.columns)


def nested(extents: Sequence[int], body: Callable[[tuple[ir.Expr, ...]], tirx.Stmt]) -> tirx.Stmt:
    """Serial loops, one for each extent."""
    if not extents:
        return body(())
    return loop(extents[0], lambda i: nested(extents[1:], lambda rest: body((i, *rest))))
