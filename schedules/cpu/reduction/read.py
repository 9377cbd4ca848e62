"""Reading functions that reduce rows: softmax, normalisation, sums, norms.

Such a function computes, for every point of some axes (a *row*), reductions along the other axes (the
*reduced* axes), each of which may need the results of earlier ones; and at last writes either one element a
row or all elements of the row. Reading it gives every value as an expression of the row, the position along
the reduced axes and the results so far. How these become loops and vectors is then a schedule's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, s_tir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import INDEX, integer
from hybridc.schedules.cpu.core.nest import Nest, NestBlock, loads, read_nest, replace_loads, substitute, uses

Combine = type[tirx.Add] | type[tirx.Mul] | type[tirx.Max] | type[tirx.Min]

_COSTLY = ("exp", "log", "tanh", "erf", "sigmoid", "pow", "sqrt", "rsqrt")
"""Calls that are worth a store and a load if their result is needed twice."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """`result = combine over the reduced axes of operand`."""

    combine: Combine
    identity: ir.Expr
    operand: ir.Expr
    result: ir.Var
    """Stands for the result in later expressions."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A value of every element of a row that later stages need again and that is costly to compute."""

    value: ir.Expr
    var: ir.Var
    """Stands for it in later expressions."""


@dataclass(frozen=True, slots=True)
class ReductionStage:
    """One pass over a row: what it keeps, and reductions that do not depend on each other."""

    kept: tuple[Kept, ...]
    reductions: tuple[Reduction, ...]

    @property
    def values(self) -> tuple[ir.Expr, ...]:
        """Everything the stage computes for an element."""
        return (*(k.value for k in self.kept), *(r.operand for r in self.reductions))


@dataclass(frozen=True, slots=True)
class RowReductions:
    """`for row: for each stage: for reduced: ...; output[indices] = value`, once a row or for its every
    element."""

    row: tuple[ir.Var, ...]
    row_extents: tuple[int, ...]
    reduced: tuple[ir.Var, ...]
    reduced_extents: tuple[int, ...]
    stages: tuple[ReductionStage, ...]
    output: ir.Var
    indices: tuple[ir.Expr, ...]
    value: ir.Expr
    writes_elements: bool

    @property
    def row_count(self) -> int:
        """Rows, over all their axes."""
        return math.prod(self.row_extents)

    @property
    def reduced_length(self) -> int:
        """Elements of a row."""
        return math.prod(self.reduced_extents)

    @property
    def element_dtypes(self) -> set[str]:
        """Of everything that is read, computed or written for every element of a row."""
        read = {str(load.source.dtype) for value in self.element_values for load in loads(value)}
        return read | {str(value.ty.dtype) for value in self.element_values}

    @property
    def element_values(self) -> list[ir.Expr]:
        """What is computed for every element of a row."""
        values = [v for stage in self.stages for v in stage.values]
        return (
            [*values, self.value, tirx.BufferLoad(self.output, self.indices)]
            if self.writes_elements
            else values
        )

    @property
    def output_may_hold(self) -> bool:
        """Whether values of the elements may stay in the output until it is written.

        Not if the output may share the bytes of an input that is read only then.
        """
        size = math.prod(int(e) for e in self.output.shape)
        last = [load.source for load in loads(self.value)]
        return self.writes_elements and all(math.prod(int(e) for e in b.shape) != size for b in last)


def read_rows(function: tirx.PrimFunc) -> RowReductions | None:
    """Read a function with one output and reductions that agree in their rows and reduced axes; else None.

    Rows of a single element are left to others.
    """
    nest = read_nest(function)
    if nest is None:
        return None
    schedule = s_tir.Schedule(function)
    inits = {b.buffer: schedule.get(schedule.get_sblock(b.name)).init for b in nest.reductions}
    if not all(isinstance(init, tirx.BufferStore) for init in inits.values()):
        return None
    return rows_of(nest, {buffer: init.value for buffer, init in inits.items()})


def rows_of(nest: Nest, identities: Mapping[ir.Var, ir.Expr]) -> RowReductions | None:
    """Read the blocks of a function; `identities` are what its reductions begin with."""
    outputs = [block for block in nest.blocks if nest.parameter(block.buffer) is not None]
    if not nest.reductions or len(outputs) != 1 or outputs[0] is not nest.blocks[-1]:
        return None
    try:
        return _Reader(nest, identities).read(outputs[0])
    except _OtherForm:
        return None


class _OtherForm(Exception):
    """The function does not have the form; raised from inside the walk over its expressions."""


class _Reader:
    """Inlines spatial blocks; what is left refers to parameters, the row, the reduced axes and results."""

    def __init__(self, nest: Nest, identities: Mapping[ir.Var, ir.Expr]) -> None:
        self.nest = nest
        self.identities = identities
        self.analyzer = sym.Analyzer()
        first = nest.reductions[0]
        self.row_extents = _extents(first, first.spatial)
        self.reduced_extents = _extents(first, first.reduce)
        self.row = tuple(tirx.Var(f"row{i}", INDEX) for i in range(len(self.row_extents)))
        self.reduced = tuple(tirx.Var(f"line{i}", INDEX) for i in range(len(self.reduced_extents)))
        for var, extent in zip(
            (*self.row, *self.reduced), (*self.row_extents, *self.reduced_extents), strict=True
        ):
            self.analyzer.bind(var, ir.Range(0, extent))
        self.results = {
            block.buffer: tirx.Var(block.name, str(block.buffer.dtype)) for block in nest.reductions
        }
        self.ready: dict[ir.Var, int] = {}
        """The first stage that can use a result or a kept value, by the variable that stands for it."""
        self.kept: dict[ir.Var, tuple[Kept, list[ir.Expr]]] = {}

    def read(self, output: NestBlock) -> RowReductions:
        if not self.reduced:
            raise _OtherForm
        reductions = [self._reduction(block) for block in self.nest.reductions]
        at, writes_elements = self._output_point(output)
        if output.reduce:
            value: ir.Expr = self.results[output.buffer]
        else:
            value = self._inlined(substitute(output.value, at))
        depth = max(self.ready[r.result] for r in reductions)
        # a value that no stage can compute before the output is written
        if any(self.ready[k.var] >= depth for k, _ in self.kept.values()):
            raise _OtherForm
        stages = tuple(
            ReductionStage(
                tuple(k for k, _ in self.kept.values() if self.ready[k.var] == stage),
                tuple(r for r in reductions if self.ready[r.result] == stage + 1),
            )
            for stage in range(depth)
        )
        indices = tuple(substitute(index, at) for index in output.indices)
        return RowReductions(
            row=self.row,
            row_extents=self.row_extents,
            reduced=self.reduced,
            reduced_extents=self.reduced_extents,
            stages=stages,
            output=output.buffer,
            indices=indices,
            value=value,
            writes_elements=writes_elements,
        )

    def _reduction(self, block: NestBlock) -> Reduction:
        spatial, reduced = _extents(block, block.spatial), _extents(block, block.reduce)
        value = block.value
        combine = next((c for c in (tirx.Add, tirx.Mul, tirx.Max, tirx.Min) if isinstance(value, c)), None)
        if (spatial, reduced) != (self.row_extents, self.reduced_extents) or combine is None:
            raise _OtherForm
        if not isinstance(value.a, ir.TensorLoad) or not value.a.source.same_as(block.buffer):
            raise _OtherForm
        at = _point(block, block.spatial, self.row) | _point(block, block.reduce, self.reduced)
        operand = self._inlined(substitute(value.b, at))
        result = self.results[block.buffer]
        self.ready[result] = self._needs(operand) + 1
        return Reduction(combine, self.identities[block.buffer], operand, result)

    def _output_point(self, output: NestBlock) -> tuple[dict[ir.Var, ir.Expr], bool]:
        """Which of the output's axes are the row's, which the reduced ones: it reads results at the row's.

        An axis of which a quotient is the row's is both: groups of channels that are reduced together.
        """
        if output.reduce:
            return _point(output, output.spatial, self.row), False
        at: dict[ir.Var, ir.Expr] = {v: integer(0) for v in output.spatial}
        axes = [v for v in output.spatial if output.extents[v] > 1]
        found = self._row_axes(output.value, axes)
        divisors = {v: divisor for v, divisor in found}
        rows, reduced = list(self.row), list(self.reduced)
        for axis in axes:
            size, divisor = output.extents[axis], divisors.get(axis, 0)
            # axes come in the order of the row's and of the reduced ones
            row = rows.pop(0) if divisor and rows else None
            along = reduced.pop(0) if divisor != 1 and reduced else None
            if row is not None and along is not None:
                at[axis] = row * integer(divisor) + along
            elif row is not None or along is not None:
                at[axis] = row if row is not None else along
            expected = self._extent(row) * self._extent(along)
            if size != expected or (divisor and self._extent(along) != divisor):
                raise _OtherForm
        if rows or len(reduced) not in (0, len(self.reduced)):
            raise _OtherForm
        return at, len(self.reduced) > len(reduced)

    def _extent(self, var: ir.Var | None) -> int:
        extents = dict(
            zip((*self.row, *self.reduced), (*self.row_extents, *self.reduced_extents), strict=True)
        )
        return 1 if var is None else extents[var]

    def _row_axes(self, value: ir.Expr, axes: Sequence[ir.Var]) -> list[tuple[ir.Var, int]]:
        """Axes at which a result is read, and by what they are divided for that."""
        for load in loads(value):
            block = self.nest.producer(load.source)
            if block is None:
                continue
            if not block.reduce:
                found = self._row_axes(block.value_at(load.indices), axes)
                if found or not self.row_extents:
                    return found
                continue
            used = [_quotient(index) for index in load.indices]
            return [(v, d) for v, d in used if any(v.same_as(axis) for axis in axes)]
        return []

    def _inlined(self, expr: ir.Expr) -> ir.Expr:
        return replace_loads(expr, self._value_at)

    def _value_at(self, buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
        block = self.nest.producer(buffer)
        if block is None:
            return None
        if block.reduce:
            expected = [substitute(i, _point(block, block.spatial, self.row)) for i in block.indices]
            self._require_equal(indices, expected)
            return self.results[buffer]
        # cheap values are computed again wherever they are needed
        if not self._is_kept(block):
            return self._inlined(block.value_at(indices))
        if buffer not in self.kept:
            value = self._inlined(block.value_at(indices))
            var = tirx.Var(block.name, str(buffer.dtype))
            self.ready[var] = self._needs(value)
            self.kept[buffer] = Kept(value, var), list(indices)
        kept, at = self.kept[buffer]
        self._require_equal(indices, at)
        return kept.var

    def _is_kept(self, block: NestBlock) -> bool:
        readers = [b for b in self.nest.blocks if any(x.source.same_as(block.buffer) for x in loads(b.value))]
        elements = math.prod(block.extents[v] for v in block.spatial)
        # values of a row alone are computed again, which costs little beside its elements
        whole = elements == math.prod(self.row_extents) * math.prod(self.reduced_extents)
        return whole and len(readers) > 1 and any(f"T.{name}(" in str(block.value) for name in _COSTLY)

    def _require_equal(self, indices: Sequence[ir.Expr], expected: Sequence[ir.Expr]) -> None:
        for a, b in zip(indices, expected, strict=True):
            if not self.analyzer.can_prove_equal(a, b):
                raise _OtherForm

    def _needs(self, expr: ir.Expr) -> int:
        """The first stage that can compute an expression."""
        return max((stage for var, stage in self.ready.items() if uses(expr, var)), default=0)


def _quotient(index: ir.Expr) -> tuple[ir.Expr, int]:
    """An index as an expression divided by a number."""
    if isinstance(index, tirx.FloorDiv) and isinstance(index.b, tirx.IntImm):
        return index.a, int(index.b)
    return index, 1


def _extents(block: NestBlock, axes: Sequence[ir.Var]) -> tuple[int, ...]:
    return tuple(block.extents[v] for v in axes if block.extents[v] > 1)


def _point(block: NestBlock, axes: Sequence[ir.Var], values: Sequence[ir.Expr]) -> dict[ir.Var, ir.Expr]:
    """Iterators that have more than one value take `values` in order, the others are zero."""
    rest = iter(values)
    return {v: next(rest) if block.extents[v] > 1 else integer(0) for v in axes}
