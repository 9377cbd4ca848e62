"""Functions of columns that walk their lines several times: softmax over channels, variance over rows.

The elements of a line are far apart, often by a power of two, where neither caches nor prefetchers work well.
So memory is only walked in chunks of columns, and everything else happens in copies:

    for other rows, chunk of columns:                              (parallel)
        for line:  copy[line, chunk] = first operand
        for block of few vectors in the chunk:
            for each stage:
                for line:  accumulators[vector, :] = combine(accumulators[vector, :], operand)
            for line:  result[line, block] = value
        for line:  output = result[line, chunk]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tvm_ffi
from tvm import ir, tirx
from tvm_ffi import structural_equal

from hybridc.schedules.cpu.column_chunks import BLOCK_VECTORS, Columns, even_width, nested
from hybridc.schedules.cpu.lines import Registers, Values, assign, element, sequence, steps, tail_pieces
from hybridc.schedules.cpu.nest import substitute
from hybridc.schedules.cpu.rows import Kept, Reduction, Rows, Stage
from hybridc.schedules.cpu.tile import Point, integer, loop, vectorized

TASKS = 8
"""Chunks are narrower where this gives so many tasks."""
CHUNK_BYTES = 1 << 18
"""Copies of a chunk's lines take at most a quarter of a common second-level cache."""


def _copying(rows: Rows) -> Rows:
    """Rows whose first stage keeps what it reads, for the stages that read it again."""
    first = rows.stages[0].reductions[0].operand
    copy = Kept(first, tirx.Var("copy", str(first.ty.dtype)))

    def copied(expr: ir.Expr) -> ir.Expr:
        same = (type(first), lambda e: copy.var if structural_equal(e, first) else e)
        return tvm_ffi.structural_map(expr, same)

    stages = [
        Stage(
            tuple(replace(k, value=copied(k.value)) for k in stage.kept),
            tuple(replace(r, operand=copied(r.operand)) for r in stage.reductions),
        )
        for stage in rows.stages
    ]
    stages[0] = replace(stages[0], kept=(copy, *stages[0].kept))
    return replace(rows, stages=tuple(stages), value=copied(rows.value))


def staged(columns: Columns) -> tuple[tirx.Stmt, list[ir.Var]]:
    """Several walks along the line, in copies."""
    columns = replace(columns, rows=_copying(columns.rows))
    rows, lanes = columns.rows, columns.lanes
    line_bytes = rows.line_length * 4 * (sum(len(s.kept) for s in rows.stages) + rows.writes_line)
    block = BLOCK_VECTORS * lanes
    width = even_width(columns, max(CHUNK_BYTES // line_bytes // block, 1) * block, TASKS)
    registers = Registers("global" if rows.row_count > width else "local")
    lines = {
        k.var: tirx.decl_buffer((*rows.line_extents, width), str(k.value.ty.dtype), f"{k.var.name}_lines")
        for stage in rows.stages
        for k in stage.kept
    }
    result = tirx.decl_buffer((*rows.line_extents, width), str(rows.output.dtype), "result_lines")
    copied, *_ = rows.stages[0].kept

    def chunk(outer: Point, start: ir.Expr, size: int) -> tirx.Stmt:
        def copy(line: Point, column: ir.Expr) -> tirx.Stmt:
            at = columns.at(outer, line, start + column)
            return tirx.BufferStore(lines[copied.var], substitute(copied.value, at), [*line, column])

        def write(line: Point, column: ir.Expr) -> tirx.Stmt:
            at = columns.at(outer, line, start + column)
            return columns.output(at, tirx.BufferLoad(result, [*line, column]))

        def stream(body: Callable[[Point, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
            def one(line: Point) -> tirx.Stmt:
                return steps(
                    size, lanes, lambda s: vectorized(s.width, lambda lane: body(line, s.start + lane))
                )

            return nested(rows.line_extents, one)

        def compute(first: ir.Expr, size: int) -> tirx.Stmt:
            vectors = _vectors(rows, size, lanes, registers)
            return _Block(columns, lines, result, outer, start, first, vectors).compute()

        parts = [stream(copy)]
        if size >= block:
            parts.append(loop(size // block, lambda i: compute(i * integer(block), block)))
        if size % block:
            parts.append(compute(integer(size - size % block), size % block))
        return sequence([*parts, stream(write)] if rows.writes_line else parts)

    body = columns.chunks(width, chunk)
    return body, [*registers.buffers, *lines.values(), *([result] if rows.writes_line else [])]


@dataclass(frozen=True, slots=True)
class _Vector:
    """Columns `offset` to `offset + width` of a block, and the registers that belong to them."""

    offset: int
    width: int
    registers: Mapping[ir.Var, ir.Var]
    """For results and kept values."""


def _vectors(rows: Rows, columns: int, lanes: int, registers: Registers) -> list[_Vector]:
    """The vectors of a block of so many columns."""
    whole = [(start, lanes) for start in range(0, columns - columns % lanes, lanes)]
    values = {r.result: r.operand for stage in rows.stages for r in stage.reductions}
    values |= {k.var: k.value for stage in rows.stages for k in stage.kept}

    def vector(offset: int, width: int) -> _Vector:
        named = {v: registers.vector(width, str(e.ty.dtype), v.name) for v, e in values.items()}
        return _Vector(offset, width, named)

    return [vector(*piece) for piece in [*whole, *tail_pieces(columns, lanes)]]


@dataclass(frozen=True, slots=True)
class _Block:
    """All stages of a few vectors of columns; what they read of the line lies in `lines`."""

    columns: Columns
    lines: Mapping[ir.Var, ir.Var]
    result: ir.Var
    outer: Point
    start: ir.Expr
    """First column of the chunk."""
    first: ir.Expr
    """First column of the block in its chunk."""
    vectors: Sequence[_Vector]

    def compute(self) -> tirx.Stmt:
        rows = self.columns.rows
        parts: list[tirx.Stmt] = []
        for stage in rows.stages:
            parts += [self._clear(r) for r in stage.reductions]
            parts.append(nested(rows.line_extents, partial(self._step, stage)))
        return sequence(
            [*parts, nested(rows.line_extents, self._write) if rows.writes_line else self._write_row()]
        )

    def _each(self, body: Callable[[_Vector], tirx.Stmt]) -> tirx.Stmt:
        return sequence([body(vector) for vector in self.vectors])

    def _clear(self, reduction: Reduction) -> tirx.Stmt:
        return self._each(
            lambda v: assign(v.registers[reduction.result], v.width, lambda lane: reduction.identity)
        )

    def _step(self, stage: Stage, line: Point) -> tirx.Stmt:
        kept = [k for k in stage.kept if k is not self.columns.rows.stages[0].kept[0]]
        computed = [k.var for k in kept]
        parts = [statement for k in kept for statement in self._keep(k, line, computed)]
        return sequence([*parts, *(self._accumulate(r, line, computed) for r in stage.reductions)])

    def _keep(self, kept: Kept, line: Point, computed: Sequence[ir.Var]) -> list[tirx.Stmt]:
        def compute(v: _Vector) -> tirx.Stmt:
            return assign(
                v.registers[kept.var],
                v.width,
                lambda lane: substitute(kept.value, self._at(v, lane, line, computed)),
            )

        def remember(v: _Vector) -> tirx.Stmt:
            register = v.registers[kept.var]
            return assign(
                self.lines[kept.var],
                v.width,
                lambda lane: element(register, lane),
                partial(self._place, v, line),
            )

        return [self._each(compute), self._each(remember)]

    def _accumulate(self, reduction: Reduction, line: Point, computed: Sequence[ir.Var]) -> tirx.Stmt:
        def add(v: _Vector) -> tirx.Stmt:
            register = v.registers[reduction.result]

            def value(lane: ir.Expr) -> ir.Expr:
                operand = substitute(reduction.operand, self._at(v, lane, line, computed))
                return reduction.combine(element(register, lane), operand)

            return assign(register, v.width, value)

        return self._each(add)

    def _write(self, line: Point) -> tirx.Stmt:
        value = self.columns.rows.value
        return self._each(
            lambda v: assign(
                self.result,
                v.width,
                lambda lane: substitute(value, self._at(v, lane, line, ())),
                partial(self._place, v, line),
            )
        )

    def _write_row(self) -> tirx.Stmt:
        def store(v: _Vector, lane: ir.Expr) -> tirx.Stmt:
            at = self._at(v, lane, None, ())
            return self.columns.output(at, substitute(self.columns.rows.value, at))

        return self._each(lambda v: vectorized(v.width, partial(store, v)))

    def _place(self, v: _Vector, line: Point, lane: ir.Expr) -> list[ir.Expr]:
        return [*line, self.first + integer(v.offset) + lane]

    def _at(self, v: _Vector, lane: ir.Expr, line: Point | None, computed: Sequence[ir.Var]) -> Values:
        """Every variable; of a row alone, without `line`, there are no kept values."""
        column = self.first + integer(v.offset) + lane
        values = self.columns.at(self.outer, line or (), self.start + column)
        for var, register in v.registers.items():
            if var not in self.lines or any(var.same_as(c) for c in computed):
                values[var] = element(register, lane)
            elif line is not None:
                values[var] = tirx.BufferLoad(self.lines[var], [*line, column])
        return values
