"""Rows whose line is contiguous in memory: vectors along the line.

    for row:                                          (parallel)
        for each stage:
            for step in line:  accumulators[u, :] = combine(accumulators[u, :], operand(vector))
            result = the accumulators and their lanes, combined as a tree
        for step in line:  output(vector) = value

Several accumulators hide the latency of the combination, and a sum of n elements is made of at least
`lanes` partial ones, so that its error grows with n / lanes. What a vector does not divide is done in vectors
of half the size, a quarter, and so on: each joins the tree at its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.nest import loads, substitute, uses
from hybridc.schedules.cpu.rows import Reduction, Rows
from hybridc.schedules.cpu.tile import (
    INDEX,
    PARALLEL_WORK,
    Point,
    function_of,
    grid,
    integer,
    loop,
    vectorized,
)
from hybridc.targets import Isa

Values = dict[ir.Var, ir.Expr]
"""What variables stand for."""

ACCUMULATORS = 4
"""Vectors in flight: an addition takes three to four cycles, and one vector is loaded a cycle."""
UNROLLED_VECTORS = 16
"""Lines of at most so many vectors have no loop."""


def flat_offset(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
    """Position of an element in row-major order."""
    offset: ir.Expr = integer(0)
    for index, extent in zip(indices, buffer.shape, strict=True):
        offset = offset * extent + index
    return offset


def flat_axes(axes: Sequence[ir.Var], extents: Sequence[int], position: ir.Expr) -> dict[ir.Var, ir.Expr]:
    """Each axis as a function of the position in the axes fused into one."""
    values: dict[ir.Var, ir.Expr] = {}
    for i in reversed(range(len(axes))):
        values[axes[i]] = tirx.floormod(position, integer(extents[i])) if i else position
        position = tirx.floordiv(position, integer(extents[i]))
    return values


def contiguous_axes(exprs: Sequence[ir.Expr], axes: Sequence[ir.Var], extents: Sequence[int]) -> int:
    """How many trailing axes, fused, every load walks element by element or does not depend on."""
    count = 0
    while count < len(axes) and _walks(exprs, axes[-count - 1 :], extents[-count - 1 :]):
        count += 1
    return count


def _walks(exprs: Sequence[ir.Expr], axes: Sequence[ir.Var], extents: Sequence[int]) -> bool:
    position = tirx.Var("position", INDEX)
    analyzer = sym.Analyzer()
    analyzer.bind(position, ir.Range(0, math.prod(extents)))
    at = flat_axes(axes, extents, position)
    for load in (load for expr in exprs for load in loads(expr) if load.indices):
        if not any(uses(index, axis) for index in load.indices for axis in axes):
            continue
        offset = flat_offset(load.source, [substitute(index, at) for index in load.indices])
        if uses(analyzer.simplify(offset - position), position):
            return False
    return True


def lanes_of(rows: Rows, isa: Isa) -> int:
    """Lanes of the widest element type that a function handles."""
    return isa.lanes(max(max(map(dtype_bits, rows.line_dtypes)), 32))


@dataclass(slots=True)
class Registers:
    """Small buffers of a kernel, which its root block allocates and LLVM keeps in registers.

    In the scope "global" TVM puts up to a kilobyte on the stack of the innermost loop around all uses; any
    other scope costs a call for each buffer and task. Without a loop it would become workspace.
    """

    scope: str
    buffers: list[ir.Var] = field(default_factory=list)

    def vector(self, lanes: int, dtype: str, name: str) -> ir.Var:
        buffer = tirx.decl_buffer((lanes,), dtype, name, scope=self.scope)
        self.buffers.append(buffer)
        return buffer


def element(buffer: ir.Var, lane: ir.Expr | int) -> tirx.BufferLoad:
    return tirx.BufferLoad(buffer, [integer(lane) if isinstance(lane, int) else lane])


@dataclass(frozen=True, slots=True)
class Step:
    """One vector of the line: `width` elements from `start`, for accumulator `slot` of that width."""

    start: ir.Expr
    width: int
    slot: int


def steps(length: int, lanes: int, body: Callable[[Step], tirx.Stmt]) -> tirx.Stmt:
    """Walk a line: a loop over groups of accumulators, what is left of whole vectors, smaller vectors."""
    vectors = length // lanes
    groups = vectors // ACCUMULATORS if vectors > UNROLLED_VECTORS else 0

    def group(i: ir.Expr) -> tirx.Stmt:
        first = i * integer(ACCUMULATORS * lanes)
        return sequence([body(Step(first + integer(u * lanes), lanes, u)) for u in range(ACCUMULATORS)])

    parts = [loop(groups, group)] if groups else []
    parts += [
        body(Step(integer(v * lanes), lanes, v % ACCUMULATORS)) for v in range(groups * ACCUMULATORS, vectors)
    ]
    parts += [body(Step(integer(start), width, 0)) for start, width in tail_pieces(length, lanes)]
    return sequence(parts)


def tail_pieces(length: int, lanes: int) -> list[tuple[int, int]]:
    """Start and width of the vectors that cover what whole ones leave over: powers of two, largest first."""
    start, pieces = length - length % lanes, []
    while start < length:
        width = 1 << ((length - start).bit_length() - 1)
        pieces.append((start, width))
        start += width
    return pieces


def sequence(parts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    return tirx.SeqStmt(list(parts)) if len(parts) > 1 else parts[0]


def assign(
    buffer: ir.Var,
    width: int,
    value: Callable[[ir.Expr], ir.Expr],
    where: Callable[[ir.Expr], list[ir.Expr]] = lambda lane: [lane],
) -> tirx.Stmt:
    """Write one vector; `value` and `where` are of a lane."""
    return vectorized(width, lambda lane: tirx.BufferStore(buffer, value(lane), where(lane)))


@dataclass(frozen=True, slots=True)
class _Accumulators:
    """Partial results of one reduction, by width of the vector: one or more vectors each."""

    reduction: Reduction
    by_width: Mapping[int, tuple[ir.Var, ...]]
    result: ir.Var

    def clear(self) -> list[tirx.Stmt]:
        return [
            assign(buffer, width, lambda lane: self.reduction.identity)
            for width, buffers in self.by_width.items()
            for buffer in buffers
        ]

    def add(self, step: Step, operand: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        buffer = self.by_width[step.width][step.slot]
        return assign(
            buffer, step.width, lambda lane: self.reduction.combine(element(buffer, lane), operand(lane))
        )

    def finish(self) -> list[tirx.Stmt]:
        """Combine everything into `result`: vectors of one width pairwise, then their halves."""
        parts: list[tirx.Stmt] = []
        width, halves = max(self.by_width), list[tuple[ir.Var, int]]()
        while width:
            operands = [*((buffer, 0) for buffer in self.by_width.get(width, ())), *halves]
            target = self.result if width == 1 else operands[0][0]
            parts.append(self._combined(target, width, operands))
            halves, width = [(target, 0), (target, width // 2)], width // 2
        return parts

    def _combined(self, target: ir.Var, width: int, operands: Sequence[tuple[ir.Var, int]]) -> tirx.Stmt:
        def value(lane: ir.Expr) -> ir.Expr:
            values = [element(buffer, lane + integer(offset)) for buffer, offset in operands]
            while len(values) > 1:
                pairs = zip(values[::2], values[1::2], strict=False)
                values = [self.reduction.combine(a, b) for a, b in pairs] + values[len(values) & ~1 :]
            return values[0]

        return assign(target, width, value)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a kept value lies."""

    memory: ir.Var
    registers: Mapping[int, ir.Var]
    """By width, while the stage computes it."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """The loop nest of one row: `segments` of contiguous runs of `length` elements."""

    rows: Rows
    lanes: int
    segments: int
    """Leading axes of the line that are loops; the others are one contiguous run."""
    length: int
    accumulators: tuple[tuple[_Accumulators, ...], ...]
    """Of each stage's reductions."""
    kept: Mapping[ir.Var, _Place]

    def row(self, row: Point) -> tirx.Stmt:
        rows = self.rows
        known: Values = dict(zip(rows.row, row, strict=True))
        parts: list[tirx.Stmt] = []
        for number, accumulators in enumerate(self.accumulators):
            parts += [statement for sums in accumulators for statement in sums.clear()]
            parts.append(self._walk(known, partial(self._stage_step, number)))
            parts += [statement for sums in accumulators for statement in sums.finish()]
            known = known | {sums.reduction.result: element(sums.result, 0) for sums in accumulators}
        if rows.writes_line:
            return sequence([*parts, self._walk(known, self._output_step)])
        indices = [substitute(index, known) for index in rows.indices]
        return sequence([*parts, tirx.BufferStore(rows.output, substitute(rows.value, known), indices)])

    def _walk(self, known: Values, body: Callable[[Values, Step], tirx.Stmt]) -> tirx.Stmt:
        count = self.segments

        def run(segment: Point) -> tirx.Stmt:
            at = known | dict(zip(self.rows.line[:count], segment, strict=True))
            return steps(self.length, self.lanes, lambda step: body(at, step))

        return grid(self.rows.line_extents[:count], run)

    def _stage_step(self, number: int, known: Values, step: Step) -> tirx.Stmt:
        stage, parts = self.rows.stages[number], list[tirx.Stmt]()
        computed = [kept.var for kept in stage.kept]

        def value(expr: ir.Expr) -> Callable[[ir.Expr], ir.Expr]:
            return lambda lane: substitute(expr, self._at(known, step, lane, computed))

        for kept in stage.kept:
            place = self.kept[kept.var]
            parts.append(assign(place.registers[step.width], step.width, value(kept.value)))
            parts.append(self._remember(place, known, step))
        parts += [sums.add(step, value(sums.reduction.operand)) for sums in self.accumulators[number]]
        return sequence(parts)

    def _remember(self, place: _Place, known: Values, step: Step) -> tirx.Stmt:
        register = place.registers[step.width]
        return assign(
            place.memory,
            step.width,
            lambda lane: element(register, lane),
            lambda lane: self._indices(place, self._line(known, step, lane)),
        )

    def _output_step(self, known: Values, step: Step) -> tirx.Stmt:
        rows = self.rows
        return assign(
            rows.output,
            step.width,
            lambda lane: substitute(rows.value, self._at(known, step, lane, ())),
            lambda lane: [substitute(index, self._line(known, step, lane)) for index in rows.indices],
        )

    def _line(self, known: Values, step: Step, lane: ir.Expr) -> Values:
        """The line's axes, for one lane of a step."""
        axes, extents = self.rows.line[self.segments :], self.rows.line_extents[self.segments :]
        return known | flat_axes(axes, extents, step.start + lane)

    def _at(self, known: Values, step: Step, lane: ir.Expr, computed: Sequence[ir.Var]) -> Values:
        """Every variable, for one lane of a step; kept values that this stage computed are in registers."""
        at = self._line(known, step, lane)
        return at | {
            var: element(place.registers[step.width], lane)
            if any(var.same_as(c) for c in computed)
            else tirx.BufferLoad(place.memory, self._indices(place, at))
            for var, place in self.kept.items()
        }

    def _indices(self, place: _Place, at: Values) -> list[ir.Expr]:
        if place.memory.same_as(self.rows.output):
            return [substitute(index, at) for index in self.rows.indices]
        return [at[axis] for axis in self.rows.line]


def schedule_lines(function: tirx.PrimFunc, rows: Rows, isa: Isa) -> tirx.PrimFunc | None:
    """The function with vectors along its lines; None if they are not contiguous.

    Errors are those of sums of n / lanes terms, a tree of lanes, and of the polynomials of `intrinsics.py`.
    """
    inner = contiguous_axes(rows.line_values, rows.line, rows.line_extents)
    if not inner:
        return None
    segments = len(rows.line) - inner
    length, lanes = math.prod(rows.line_extents[segments:]), lanes_of(rows, isa)
    registers = Registers("global" if rows.row_count > 1 else "local")
    widths = _widths(length, lanes)
    accumulators = tuple(
        tuple(_accumulators(r, widths, registers) for r in stage.reductions) for stage in rows.stages
    )
    kept = _keep(rows, widths, registers)
    lines = _Lines(rows, lanes, segments, length, accumulators, kept)
    work = rows.row_count * rows.line_length * len(rows.stages)
    body = grid(rows.row_extents, lines.row, parallel=work >= PARALLEL_WORK)
    return function_of(function, list(function.params), [body], registers.buffers)


def _widths(length: int, lanes: int) -> dict[int, int]:
    """How many accumulators of each width the steps of a line use."""
    pieces = {width: 1 for _, width in tail_pieces(length, lanes)}
    return {lanes: min(length // lanes, ACCUMULATORS)} | pieces if length >= lanes else pieces


def _accumulators(reduction: Reduction, widths: Mapping[int, int], registers: Registers) -> _Accumulators:
    name, dtype = reduction.result.name, str(reduction.operand.ty.dtype)
    by_width = {
        width: tuple(registers.vector(width, dtype, f"{name}_{width}") for _ in range(count))
        for width, count in widths.items()
    }
    return _Accumulators(reduction, by_width, registers.vector(1, dtype, name))


def _keep(rows: Rows, widths: Mapping[int, int], registers: Registers) -> dict[ir.Var, _Place]:
    """One value may lie in the output; others get memory of a line for each thread."""
    places: dict[ir.Var, _Place] = {}
    for kept in (kept for stage in rows.stages for kept in stage.kept):
        name, dtype = kept.var.name, str(kept.value.ty.dtype)
        if not places and rows.output_may_hold and dtype == str(rows.output.dtype):
            memory = rows.output
        else:
            memory = tirx.decl_buffer(rows.line_extents, dtype, f"{name}_line")
            registers.buffers.append(memory)
        places[kept.var] = _Place(memory, {w: registers.vector(w, dtype, f"{name}_{w}") for w in widths})
    return places
