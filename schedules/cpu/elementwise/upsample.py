"""Enlarging an axis by a whole factor, bilinear or nearest: neighbours are read as vectors, not gathered.

    out[.., s * q + r] = value of in[.., q + d] at steps d that depend on r alone (but for the edges)

The index is any expression of the output's index, in floating point as ONNX's Resize defines it. It is
tabulated when compiling, and the factor s read off the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import INDEX, ceil_div, integer, loop, sequence, vectorized
from hybridc.schedules.cpu.core.nest import substitute, uses
from hybridc.schedules.cpu.core.shuffles import picked
from hybridc.schedules.cpu.elementwise.index_maps import IterationSpace, OperandAccess, flat
from hybridc.schedules.cpu.elementwise.loops import Point, tasks, worth_threads

FACTORS = range(2, 9)


def tabulate(expr: ir.Expr, variable: ir.Var, extent: int) -> np.ndarray | None:
    """Values of an expression for 0 .. extent - 1; None where it is of an unknown kind."""

    def of(expr: ir.Expr) -> np.ndarray | None:
        return tabulate(expr, variable, extent)

    if isinstance(expr, ir.Var):
        return np.arange(extent) if expr.same_as(variable) else None
    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        return np.full(extent, expr.value, str(expr.ty.dtype))
    if isinstance(expr, tirx.Cast):
        value = of(expr.value)
        return None if value is None else value.astype(str(expr.ty.dtype))
    if isinstance(expr, ir.Call) and expr.op.name in _CALLS:
        value = of(expr.args[0])
        return None if value is None else _CALLS[expr.op.name](value)
    if type(expr) in _BINARY:
        a, b = of(expr.a), of(expr.b)
        return None if a is None or b is None else _BINARY[type(expr)](a, b).astype(a.dtype)
    return None


_CALLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tirx.floor": np.floor,
    "tirx.ceil": np.ceil,
    "tirx.round": np.rint,
}
_BINARY: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.Div: lambda a, b: a / b if a.dtype.kind == "f" else np.trunc(a / b),
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
}


@dataclass(frozen=True, slots=True)
class Enlarged:
    """An axis whose operands' indices are `q + steps[r]` at s * q + r, for q from `low` up to `high`."""

    factor: int
    low: int
    high: int
    steps: dict[tuple[int, int], Sequence[int]]
    """For an operand and one of its `rest`, a step for each r."""


def upsampled(space: IterationSpace, lanes: int) -> tuple[tirx.Stmt, list[ir.Var]] | None:
    """Statements and registers for an iteration space whose innermost axis is enlarged; None for others."""
    tables = _tables(space)
    if not tables or any(space.overwrites(k) for k in range(len(space.operands))):
        return None
    found = next((e for s in FACTORS if (e := _enlarged(tables, s, space.loops[-1].extent, lanes))), None)
    if found is None:
        return None
    kind = str(space.buffer.dtype)
    registers = tirx.decl_buffer((found.factor, lanes), kind, "stream", scope="local")
    *outer, inner = space.loops
    count = ceil_div(found.high - found.low, lanes)

    def run(point: Point) -> tirx.Stmt:
        def tile(number: ir.Expr) -> tirx.Stmt:
            # the last vector is moved back, and some elements are written twice
            first = tirx.min(integer(found.low) + number * integer(lanes), integer(found.high - lanes))
            return _tile(space, found, point, first, registers)

        def rest(start: int, stop: int) -> list[tirx.Stmt]:
            return [space.store((*point, integer(x))) for x in range(start, stop)]

        left = rest(0, found.low * found.factor)
        right = rest(found.high * found.factor, inner.extent)
        return sequence([*left, loop(count, tile), *right])

    extents = [lp.extent for lp in outer]
    return tasks(extents, inner.extent, run, parallel=worth_threads(space)), [registers]


def _tables(space: IterationSpace) -> dict[tuple[int, int], np.ndarray] | None:
    """Indices of operands along the innermost loop, if it is one axis on which none depends otherwise."""
    if not space.loops or len(space.loops[-1].splits) > 1:
        return None
    inner = space.loops[-1]
    axis = inner.splits[0].axis
    variable = space.iterators[axis]
    others = [v for v in space.iterators if not v.same_as(variable)]
    if inner.extent != space.extents[axis] or any(inner.strides):
        return None
    tables = {}
    for k, operand in enumerate(space.operands):
        for number, (expr, stride) in enumerate(operand.rest):
            if not uses(expr, variable):
                continue
            table = tabulate(expr, variable, inner.extent)
            if stride != 1 or table is None or any(uses(expr, v) for v in others):
                return None
            tables[k, number] = table
    return tables


def _enlarged(
    tables: dict[tuple[int, int], np.ndarray], factor: int, extent: int, lanes: int
) -> Enlarged | None:
    if extent % factor:
        return None
    columns = extent // factor
    gaps = {
        key: table.reshape(columns, factor) - np.arange(columns)[:, None] for key, table in tables.items()
    }
    # away from the edges, where clamping does not act
    middle = {key: gap[columns // 2] for key, gap in gaps.items()}
    # columns where each phase reads at the same distance as in the middle
    regular = np.all([(gap == middle[key]).all(1) for key, gap in gaps.items()], axis=0)
    (odd,) = np.nonzero(~regular)
    low = int(odd[odd < columns // 2].max(initial=-1)) + 1
    high = int(odd[odd > columns // 2].min(initial=columns))
    # edges are written out element by element
    if high - low < lanes or columns - (high - low) > 4:  # more edge than is worth writing out
        return None
    return Enlarged(factor, low, high, {key: [int(d) for d in gap] for key, gap in middle.items()})


def _tile(
    space: IterationSpace, enlarged: Enlarged, point: Point, first: ir.Expr, registers: ir.Var
) -> tirx.Stmt:
    """One vector of each r, then all of them dealt out in turn."""
    factor, lanes = enlarged.factor, int(registers.shape[1])

    def stream(r: int) -> tirx.Stmt:
        column = tirx.Var("q", INDEX)
        operands = (_at_column(k, operand, enlarged, r, column) for k, operand in enumerate(space.operands))
        at_r = replace(space, operands=tuple(operands))

        def element(lane: ir.Expr) -> tirx.Stmt:
            q = first + lane
            value = at_r.value_at((*point, q * integer(factor) + integer(r)))
            return tirx.BufferStore(registers, substitute(value, {column: q}), [integer(r), lane])

        return vectorized(lanes, element)

    row = tirx.Ramp(integer(0), integer(1), lanes)
    vectors = [tirx.BufferLoad(registers, [integer(r), row]) for r in range(factor)]
    places = [divmod(element, factor) for element in range(factor * lanes)]
    base = space.output_offset((*point, first * integer(factor)))

    def dealt(number: int) -> tirx.Stmt:
        picks = [(r, lane) for lane, r in places[number * lanes :][:lanes]]
        target = tirx.Ramp(base + integer(number * lanes), integer(1), lanes)
        return tirx.BufferStore(space.buffer, picked(vectors, picks), flat(space.buffer, target))

    return tirx.SeqStmt([*map(stream, range(factor)), *map(dealt, range(factor))])


def _at_column(k: int, operand: OperandAccess, enlarged: Enlarged, r: int, column: ir.Var) -> OperandAccess:
    """The operand with its enlarged index in terms of q, which is `column`."""
    rest = tuple(
        (column + integer(enlarged.steps[k, number][r]), stride)
        if (k, number) in enlarged.steps
        else (expr, stride)
        for number, (expr, stride) in enumerate(operand.rest)
    )
    return replace(operand, rest=rest)
