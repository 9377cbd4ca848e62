"""Rows that are contiguous in memory: vectors along the reduced axes.

    for row:                                          (parallel)
        for each stage:
            for step in row:  accumulators[u, :] = combine(accumulators[u, :], operand(vector))
            result = the accumulators and their lanes, combined as a tree
        for step in row:  output(vector) = value

Memory would have nothing to do in the stages between, which find the row in a cache, and first only read and
then only write. So where rows are many a task has several, and while one is written the next is read:

    first stage of the task's first row
    for row of the task:
        the other stages, which fetch what is written then
        for step in row:  output(vector) = value;  first stage of this vector of the next row

Several accumulators hide the latency of the combination, and a sum of n elements is made of at least
`lanes` partial ones, so that its error grows with n / lanes. What a vector does not divide is done in vectors
of half the size, a quarter, and so on: each joins the tree at its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_BYTES,
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    prefetch,
    sequence,
)
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.reduction.read import Reduction, RowReductions
from hybridc.schedules.cpu.reduction.vectors import (
    ACCUMULATORS,
    Registers,
    Values,
    VectorStep,
    assign,
    contiguous_axes,
    element,
    flat_axes,
    lanes_of,
    steps,
    tail_pieces,
)
from hybridc.targets import Isa

TASKS = 16
"""A multiple of common numbers of threads; more threads have one each."""
LEAST_TASK_ROWS, MOST_TASK_ROWS = 4, 32
"""Rows of a task, whose first one is not read ahead; fewer rows are tasks of their own."""
MOST_CACHED_ELEMENTS = 1 << 13
"""Of a row: what two longer ones read and write would take too much of a second-level cache."""


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

    def add(self, step: VectorStep, operand: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        buffer = self.by_width[step.width][step.slot]
        return assign(
            buffer, step.width, lambda lane: self.reduction.combine(element(buffer, lane), operand(lane))
        )

    def finish(self) -> list[tirx.Stmt]:
        """Combine everything into `result`: vectors of one width pairwise, then their halves."""
        parts: list[tirx.Stmt] = []
        width, halves = max(self.by_width), list[tuple[ir.Var, int]]()
        # each width joins the tree where what is left of wider vectors is as wide
        while width:
            operands = [*((buffer, 0) for buffer in self.by_width.get(width, ())), *halves]
            target = self.result if width == 1 else operands[0][0]
            parts.append(self._combined(target, width, operands))
            halves, width = [(target, 0), (target, width // 2)], width // 2
        return parts

    def _combined(self, target: ir.Var, width: int, operands: Sequence[tuple[ir.Var, int]]) -> tirx.Stmt:
        def value(lane: ir.Expr) -> ir.Expr:
            values = [element(buffer, lane + integer(offset)) for buffer, offset in operands]
            # pairwise: depth and rounding error grow with the logarithm of the accumulators
            while len(values) > 1:
                pairs = zip(values[::2], values[1::2], strict=False)
                values = [self.reduction.combine(a, b) for a, b in pairs] + values[len(values) & ~1 :]
            return values[0]

        return assign(target, width, value)


@dataclass(frozen=True, slots=True)
class _KeptPlace:
    """Where a kept value lies."""

    memory: ir.Var
    registers: Mapping[int, ir.Var]
    """By width, while the stage computes it."""


@dataclass(frozen=True, slots=True)
class _ContiguousNest:
    """The loop nest of one row: `segments` of contiguous runs of `length` elements."""

    rows: RowReductions
    threads: int
    lanes: int
    segments: int
    """Leading reduced axes that are loops; the others are one contiguous run."""
    length: int
    accumulators: tuple[tuple[_Accumulators, ...], ...]
    """Of each stage's reductions."""
    kept: Mapping[ir.Var, _KeptPlace]

    def row(self, row: Point) -> tirx.Stmt:
        rows = self.rows
        known: Values = dict(zip(rows.row, row, strict=True))
        parts = [stmt for number in range(len(rows.stages)) for stmt in self._stage(number, known)]
        if rows.writes_elements:
            return sequence([*parts, self._each_step(partial(self._output_step, known))])
        known |= self._results
        indices = [substitute(index, known) for index in rows.indices]
        return sequence([*parts, tirx.BufferStore(rows.output, substitute(rows.value, known), indices)])

    def task(self, point: Point) -> tirx.Stmt:
        """A share of the rows. The last of them is its own next one, whose results nobody uses."""
        (number,) = point
        count, tasks = self.rows.row_count, self.tasks
        start, end = (
            tirx.floordiv(n * integer(count), integer(tasks)) for n in (number, number + integer(1))
        )

        def known(row: ir.Expr) -> Values:
            return flat_axes(self.rows.row, self.rows.row_extents, row)

        def one(i: ir.Expr) -> tirx.Stmt:
            row = start + i
            # the task's last row reads itself once more, so that no condition is needed
            following = known(tirx.min(row + integer(1), end - integer(1)))
            stages = range(1, len(self.rows.stages))
            fetch, write = (partial(step, known(row)) for step in (self._fetch_step, self._output_step))
            parts = [stmt for number in stages for stmt in self._stage(number, known(row), beside=fetch)]
            return sequence([*parts, *self._stage(0, following, beside=write)])

        return sequence([*self._stage(0, known(start)), loop(end - start, one)])

    @property
    def tasks(self) -> int:
        """As many as rows if none is read ahead: what its first stage kept would overwrite another row's."""
        rows = self.rows
        ahead = (
            rows.writes_elements and not rows.stages[0].kept and rows.reduced_length <= MOST_CACHED_ELEMENTS
        )
        # a task's first row is not read ahead: with few rows a task that would be most of them
        tasks = at_least_one_each(TASKS, self.threads)
        many = rows.row_count >= tasks * LEAST_TASK_ROWS
        return tasks * ceil_div(rows.row_count, tasks * MOST_TASK_ROWS) if ahead and many else rows.row_count

    @property
    def _results(self) -> Values:
        """Those of all stages; their memory is the same for every row."""
        every = [sums for stage in self.accumulators for sums in stage]
        return {sums.reduction.result: element(sums.result, 0) for sums in every}

    def _stage(
        self, number: int, known: Values, beside: Callable[[Values, VectorStep], tirx.Stmt] | None = None
    ) -> list[tirx.Stmt]:
        """A stage of a row, and beside it something else at each step."""
        accumulators = self.accumulators[number]
        stage: Callable[[Values, VectorStep], tirx.Stmt] = partial(self._stage_step, number, known)
        bodies = [stage, beside] if beside else [stage]

        def both(segment: Values, step: VectorStep) -> tirx.Stmt:
            return sequence([body(segment, step) for body in bodies])

        clear = [statement for sums in accumulators for statement in sums.clear()]
        return [*clear, self._each_step(both), *(stmt for sums in accumulators for stmt in sums.finish())]

    def _each_step(self, body: Callable[[Values, VectorStep], tirx.Stmt]) -> tirx.Stmt:
        """`body` takes the leading reduced axes, and a step along the others."""
        count = self.segments

        def run(segment: Point) -> tirx.Stmt:
            at = dict(zip(self.rows.reduced[:count], segment, strict=True))
            return steps(self.length, self.lanes, lambda step: body(at, step))

        return grid(self.rows.reduced_extents[:count], run)

    def _stage_step(self, number: int, row: Values, segment: Values, step: VectorStep) -> tirx.Stmt:
        known = row | segment
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

    def _remember(self, place: _KeptPlace, known: Values, step: VectorStep) -> tirx.Stmt:
        register = place.registers[step.width]
        return assign(
            place.memory,
            step.width,
            lambda lane: element(register, lane),
            lambda lane: self._indices(place, self._reduced_at(known, step, lane)),
        )

    def _output_step(self, row: Values, segment: Values, step: VectorStep) -> tirx.Stmt:
        rows, known = self.rows, row | segment
        return assign(
            rows.output,
            step.width,
            lambda lane: substitute(rows.value, self._at(known, step, lane, ())),
            lambda lane: [substitute(index, self._reduced_at(known, step, lane)) for index in rows.indices],
        )

    def _fetch_step(self, row: Values, segment: Values, step: VectorStep) -> tirx.Stmt:
        """Fetch the cache lines that are written next, unless values are kept there."""
        rows = self.rows
        # one prefetch a cache line, however many vectors it has
        elements = CACHE_LINE_BYTES * 8 // dtype_bits(str(rows.output.dtype))
        holds = any(place.memory.same_as(rows.output) for place in self.kept.values())
        if holds or step.slot * step.width % elements:
            return tirx.Evaluate(integer(0))
        at = self._reduced_at(row | segment, step, integer(0))
        return prefetch(tirx.BufferLoad(rows.output, [substitute(index, at) for index in rows.indices]), 3)

    def _reduced_at(self, known: Values, step: VectorStep, lane: ir.Expr) -> Values:
        """The reduced axes, for one lane of a step."""
        axes, extents = self.rows.reduced[self.segments :], self.rows.reduced_extents[self.segments :]
        return known | flat_axes(axes, extents, step.start + lane)

    def _at(self, known: Values, step: VectorStep, lane: ir.Expr, computed: Sequence[ir.Var]) -> Values:
        """Every variable, for one lane of a step; kept values that this stage computed are in registers."""
        at = self._reduced_at(known, step, lane)
        return (
            self._results
            | at
            | {
                var: element(place.registers[step.width], lane)
                if any(var.same_as(c) for c in computed)
                else tirx.BufferLoad(place.memory, self._indices(place, at))
                for var, place in self.kept.items()
            }
        )

    def _indices(self, place: _KeptPlace, at: Values) -> list[ir.Expr]:
        if place.memory.same_as(self.rows.output):
            return [substitute(index, at) for index in self.rows.indices]
        return [at[axis] for axis in self.rows.reduced]


def schedule_contiguous(
    function: tirx.PrimFunc, rows: RowReductions, isa: Isa, threads: int
) -> tirx.PrimFunc | None:
    """The function with vectors along its rows; None if their elements are not contiguous.

    Errors are those of sums of n / lanes terms, a tree of lanes, and of the polynomials of `intrinsics.py`.
    """
    inner = contiguous_axes(rows.element_values, rows.reduced, rows.reduced_extents)
    if not inner:
        return None
    # axes that are not contiguous with the innermost ones are loops around the run
    segments = len(rows.reduced) - inner
    length, lanes = math.prod(rows.reduced_extents[segments:]), lanes_of(rows, isa)
    # without a loop over rows a global buffer would become workspace
    registers = Registers("global" if rows.row_count > 1 else "local")
    widths = _widths(length, lanes)
    accumulators = tuple(
        tuple(_accumulators(r, widths, registers) for r in stage.reductions) for stage in rows.stages
    )
    kept = _keep(rows, widths, registers)
    nest = _ContiguousNest(rows, threads, lanes, segments, length, accumulators, kept)
    # every stage passes over all elements
    parallel = rows.row_count * rows.reduced_length * len(rows.stages) >= PARALLEL_WORK
    if parallel and nest.tasks < rows.row_count:
        body = grid((nest.tasks,), nest.task, parallel=True)
    else:
        body = grid(rows.row_extents, nest.row, parallel=parallel)
    return function_of(function, list(function.params), [body], registers.buffers)


def _widths(length: int, lanes: int) -> dict[int, int]:
    """How many accumulators of each width the steps of a row use."""
    # one accumulator is enough for each smaller vector, which comes once a run
    pieces = {width: 1 for _, width in tail_pieces(length, lanes)}
    return {lanes: min(length // lanes, ACCUMULATORS)} | pieces if length >= lanes else pieces


def _accumulators(reduction: Reduction, widths: Mapping[int, int], registers: Registers) -> _Accumulators:
    name, dtype = reduction.result.name, str(reduction.operand.ty.dtype)
    by_width = {
        width: tuple(registers.vector(width, dtype, f"{name}_{width}") for _ in range(count))
        for width, count in widths.items()
    }
    return _Accumulators(reduction, by_width, registers.vector(1, dtype, name))


def _keep(rows: RowReductions, widths: Mapping[int, int], registers: Registers) -> dict[ir.Var, _KeptPlace]:
    """One value may lie in the output; others get memory of a row for each thread."""
    places: dict[ir.Var, _KeptPlace] = {}
    for kept in (kept for stage in rows.stages for kept in stage.kept):
        name, dtype = kept.var.name, str(kept.value.ty.dtype)
        # the first one only: two values would overwrite each other there
        if not places and rows.output_may_hold and dtype == str(rows.output.dtype):
            memory = rows.output
        else:
            memory = tirx.decl_buffer(rows.reduced_extents, dtype, f"{name}_line")
            registers.buffers.append(memory)
        places[kept.var] = _KeptPlace(memory, {w: registers.vector(w, dtype, f"{name}_{w}") for w in widths})
    return places
