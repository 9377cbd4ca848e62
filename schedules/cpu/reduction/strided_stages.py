"""Functions of columns that pass over them several times: softmax over channels, variance over rows.

The elements of a column are far apart, often by a power of two, where prefetchers see no stream and even
caches have few places. So few columns at a time go through all stages, for which they stay in a cache, and
meanwhile the same elements of the next few columns are fetched ahead:

    for other rows, chunk of columns:                              (parallel)
        for block of few vectors in the chunk:
            for each stage:
                for reduced:  accumulators[vector, :] = combine(accumulators[vector, :], operand)
            for reduced:  output = value
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    Point,
    integer,
    loop,
    prefetch,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import loads, substitute
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.reduction.read import Kept, Reduction, ReductionStage, RowReductions
from hybridc.schedules.cpu.reduction.strided_chunks import BLOCK_VECTORS, StridedRows, even_width, nested
from hybridc.schedules.cpu.reduction.vectors import Registers, Values, assign, element, tail_pieces

TASKS = 8
"""Chunks are narrower where this gives so many tasks, or one for each thread."""
CHUNK_BLOCKS = 16
"""The first block of a chunk is not fetched ahead."""
NEAR_ELEMENTS = 32
"""So many elements of each column of a block take a quarter of a first-level cache, into which they are
fetched; more go to the second level."""


def staged(columns: StridedRows, threads: int) -> tuple[tirx.Stmt, list[ir.Var]]:
    """All stages of a block of columns, then of the next one."""
    rows, lanes = columns.rows, columns.lanes
    block = BLOCK_VECTORS * lanes
    # long chunks: the fetching ahead starts again in each
    width = even_width(columns, CHUNK_BLOCKS * block, at_least_one_each(TASKS, threads))
    registers = Registers("global" if rows.row_count > width else "local")
    kept = {
        k.var: tirx.decl_buffer((*rows.reduced_extents, block), str(k.value.ty.dtype), f"{k.var.name}_lines")
        for stage in rows.stages
        for k in stage.kept
    }

    def chunk(outer: Point, start: ir.Expr, size: int) -> tirx.Stmt:
        def compute(first: ir.Expr, size: int) -> tirx.Stmt:
            vectors = _vectors(rows, size, lanes, registers)
            return _ColumnBlock(columns, kept, outer, start + first, vectors).compute()

        count, rest = divmod(size, block)
        parts = [loop(count, lambda i: compute(i * integer(block), block))] if count else []
        return sequence([*parts, compute(integer(size - rest), rest)] if rest else parts)

    body = columns.chunks(width, chunk)
    return body, [*registers.buffers, *kept.values()]


@dataclass(frozen=True, slots=True)
class _Vector:
    """Columns `offset` to `offset + width` of a block, and the registers that belong to them."""

    offset: int
    width: int
    registers: Mapping[ir.Var, ir.Var]
    """For results and kept values."""


def _vectors(rows: RowReductions, columns: int, lanes: int, registers: Registers) -> list[_Vector]:
    """The vectors of a block of so many columns."""
    whole = [(start, lanes) for start in range(0, columns - columns % lanes, lanes)]
    values = {r.result: r.operand for stage in rows.stages for r in stage.reductions}
    values |= {k.var: k.value for stage in rows.stages for k in stage.kept}

    def vector(offset: int, width: int) -> _Vector:
        named = {v: registers.vector(width, str(e.ty.dtype), v.name) for v, e in values.items()}
        return _Vector(offset, width, named)

    return [vector(*piece) for piece in [*whole, *tail_pieces(columns, lanes)]]


@dataclass(frozen=True, slots=True)
class _ColumnBlock:
    """All stages of a few vectors of columns; kept values lie in `kept`."""

    columns: StridedRows
    kept: Mapping[ir.Var, ir.Var]
    outer: Point
    start: ir.Expr
    """First column."""
    vectors: Sequence[_Vector]

    def compute(self) -> tirx.Stmt:
        rows = self.columns.rows
        parts: list[tirx.Stmt] = []
        for stage in rows.stages:
            parts += [self._clear(r) for r in stage.reductions]
            parts.append(nested(rows.reduced_extents, partial(self._step, stage)))
        write = nested(rows.reduced_extents, self._write) if rows.writes_elements else self._write(None)
        return sequence([*parts, write])

    def _each(self, body: Callable[[_Vector], tirx.Stmt]) -> tirx.Stmt:
        return sequence([body(vector) for vector in self.vectors])

    def _clear(self, reduction: Reduction) -> tirx.Stmt:
        return self._each(
            lambda v: assign(v.registers[reduction.result], v.width, lambda lane: reduction.identity)
        )

    def _step(self, stage: ReductionStage, reduced: Point) -> tirx.Stmt:
        # what this stage computes is still in registers
        computed = [k.var for k in stage.kept]
        ahead = self._fetch_next(reduced) if stage is self.columns.rows.stages[-1] else []
        parts = [statement for k in stage.kept for statement in self._keep(k, reduced, computed)]
        return sequence([*ahead, *parts, *(self._accumulate(r, reduced, computed) for r in stage.reductions)])

    def _fetch_next(self, reduced: Point) -> list[tirx.Stmt]:
        """Fetch what the next block reads of an element and, where columns are short, writes."""
        rows = self.columns.rows
        # into L1 while a block of so many elements fits beside the next one
        locality = 3 if rows.reduced_length <= NEAR_ELEMENTS else 2
        size = sum(v.width for v in self.vectors)
        places = [ld for r in rows.stages[0].reductions for ld in loads(r.operand) if self._is_stream(ld)]
        if locality == 3 and rows.writes_elements:
            places.append(tirx.BufferLoad(rows.output, rows.indices))

        def fetch(place: ir.TensorLoad, column: int) -> tirx.Stmt:
            at = self.columns.at(self.outer, reduced, self.start + integer(column))
            return prefetch(
                tirx.BufferLoad(place.source, [substitute(i, at) for i in place.indices]), locality
            )

        return [fetch(p, column) for p in places for column in range(size, 2 * size, CACHE_LINE_FLOATS)]

    def _is_stream(self, load: ir.TensorLoad) -> bool:
        """Whether it has a value for every element, and is not broadcast."""
        rows = self.columns.rows
        return math.prod(int(e) for e in load.source.shape) >= rows.row_count * rows.reduced_length

    def _keep(self, kept: Kept, reduced: Point, computed: Sequence[ir.Var]) -> list[tirx.Stmt]:
        def compute(v: _Vector) -> tirx.Stmt:
            return assign(
                v.registers[kept.var],
                v.width,
                lambda lane: substitute(kept.value, self._at(v, lane, reduced, computed)),
            )

        def remember(v: _Vector) -> tirx.Stmt:
            register = v.registers[kept.var]
            return assign(
                self.kept[kept.var],
                v.width,
                lambda lane: element(register, lane),
                partial(self._place, v, reduced),
            )

        return [self._each(compute), self._each(remember)]

    def _accumulate(self, reduction: Reduction, reduced: Point, computed: Sequence[ir.Var]) -> tirx.Stmt:
        def add(v: _Vector) -> tirx.Stmt:
            register = v.registers[reduction.result]

            def value(lane: ir.Expr) -> ir.Expr:
                operand = substitute(reduction.operand, self._at(v, lane, reduced, computed))
                return reduction.combine(element(register, lane), operand)

            return assign(register, v.width, value)

        return self._each(add)

    def _write(self, reduced: Point | None) -> tirx.Stmt:
        """An element of each column, or the one of a row."""

        def store(v: _Vector, lane: ir.Expr) -> tirx.Stmt:
            at = self._at(v, lane, reduced, ())
            return self.columns.output(at, substitute(self.columns.rows.value, at))

        return self._each(lambda v: vectorized(v.width, partial(store, v)))

    def _place(self, v: _Vector, reduced: Point, lane: ir.Expr) -> list[ir.Expr]:
        return [*reduced, integer(v.offset) + lane]

    def _at(self, v: _Vector, lane: ir.Expr, reduced: Point | None, computed: Sequence[ir.Var]) -> Values:
        """Every variable; of a row alone, without `reduced`, there are no kept values."""
        values = self.columns.at(self.outer, reduced or (), self.start + integer(v.offset) + lane)
        for var, register in v.registers.items():
            if var not in self.kept or any(var.same_as(c) for c in computed):
                values[var] = element(register, lane)
            elif reduced is not None:
                values[var] = tirx.BufferLoad(self.kept[var], self._place(v, reduced, lane))
        return values
