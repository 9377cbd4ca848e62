"""Loops over all elements of an output: tasks, and contiguous runs of vectors.

for task: (parallel)
    for run of the task:
        for vector of the run
        the run's tail, in vectors of half the size, a quarter, and so on
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, ceil_div, grid, integer, loop, vectorized
from hybridc.schedules.cpu.core.nest import uses
from hybridc.schedules.cpu.elementwise.index_maps import IterationSpace, IterSplit, affine_index
from hybridc.targets import Isa

TASK_ELEMENTS = 1 << 13
"""Elements of a task: a few microseconds of work for which its loops are set up once."""

Point = tuple[ir.Expr, ...]


def tasks(
    extents: Sequence[int], elements_each: int, body: Callable[[Point], tirx.Stmt], *, parallel: bool
) -> tirx.Stmt:
    """A nest over `extents`: the outer part fused into tasks, the inner part loops of a task."""
    if not parallel:
        return _nest(extents, body)
    # inner loops belong to a task until it has enough elements; divisors keep tasks equal
    budget = max(TASK_ELEMENTS // elements_each, 1)
    inner: list[int] = []
    for extent in reversed(extents):
        inner.insert(0, max(d for d in range(1, min(extent, budget) + 1) if extent % d == 0))
        budget = budget // inner[0] if inner[0] == extent else 1
    outer = [extent // step for extent, step in zip(extents, inner, strict=True)]

    def task(start: Point) -> tirx.Stmt:
        def at(offset: Point) -> tirx.Stmt:
            return body(tuple(s * integer(n) + o for s, n, o in zip(start, inner, offset, strict=True)))

        return _nest(inner, at)

    return grid(outer, task, parallel=True)


def _nest(extents: Sequence[int], body: Callable[[Point], tirx.Stmt]) -> tirx.Stmt:
    if not extents:
        return body(())
    return loop(extents[0], lambda i: _nest(extents[1:], lambda rest: body((i, *rest))))


def worth_threads(space: IterationSpace) -> bool:
    """Whether there is enough work for a parallel region."""
    return space.elements >= PARALLEL_WORK


def lanes_of(space: IterationSpace, isa: Isa) -> int:
    """Elements of a vector of the widest type that the space reads or writes."""
    buffers = [space.buffer, *(operand.load.source for operand in space.operands)]
    # booleans count as one bit and take a byte
    return isa.lanes(max(8, *(dtype_bits(str(buffer.dtype)) for buffer in buffers)))


def contiguous_runs(space: IterationSpace, isa: Isa) -> tirx.Stmt:
    """Runs along the innermost loop.

    A run is cut where a condition on its index changes, so that padding and concatenation leave no condition
    inside. Where an operand is not contiguous along the run the loop is left to LLVM's vectoriser.
    """
    if not space.loops:
        return space.store(())
    *outer, inner = space.loops
    edges = breakpoints(space)
    # a lane alone where operands are strided: LLVM decides whether gathers pay
    lanes = lanes_of(space, isa) if space.is_contiguous and edges is not None else 1
    edges = edges or [0, inner.extent]
    extents = [lp.extent for lp in outer]
    # shorter runs are shared among tasks whole
    if len(edges) == 2 and inner.extent >= 2 * TASK_ELEMENTS:
        return _long_runs(space, extents, inner.extent, lanes)

    def run(point: Point) -> tirx.Stmt:
        pieces = [_piece(space, point, low, high - low, lanes) for low, high in itertools.pairwise(edges)]
        return tirx.SeqStmt(pieces) if len(pieces) > 1 else pieces[0]

    return tasks(extents, inner.extent, run, parallel=worth_threads(space))


def _long_runs(space: IterationSpace, extents: Sequence[int], length: int, lanes: int) -> tirx.Stmt:
    """Runs that are several tasks each; the last task of a run takes the tail too."""
    whole = length // lanes
    chunks = ceil_div(length, TASK_ELEMENTS)
    # whole vectors a task, so that only the last one has a tail
    step = ceil_div(whole, chunks)

    def chunk(point: Point) -> tirx.Stmt:
        *outer, at = point
        first = at * integer(step)
        count = integer(step) if whole % step == 0 else tirx.min(integer(step), integer(whole) - first)
        vectors = loop(count, lambda v: _vector(space, outer, (first + v) * integer(lanes), lanes))
        if whole * lanes == length:
            return vectors
        tail = _piece(space, outer, whole * lanes, length - whole * lanes, lanes)
        return tirx.SeqStmt([vectors, tirx.IfThenElse(tirx.EQ(at, integer(chunks - 1)), tail, None)])

    chunks = ceil_div(whole, step)
    return tasks((*extents, chunks), TASK_ELEMENTS, chunk, parallel=worth_threads(space))


def _piece(space: IterationSpace, outer: Sequence[ir.Expr], start: int, length: int, lanes: int) -> tirx.Stmt:
    """Part of a run: whole vectors, then vectors of half the size, a quarter, and so on."""
    statements = []
    while length:
        count = length // lanes
        if count:
            statements.append(_vectors(space, outer, start, count, lanes))
            start, length = start + count * lanes, length - count * lanes
        # the rest in halves: no element is computed twice, which an output over its input forbids
        lanes //= 2
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def _vectors(
    space: IterationSpace, outer: Sequence[ir.Expr], start: int, count: int, lanes: int
) -> tirx.Stmt:
    return loop(count, lambda v: _vector(space, outer, integer(start) + v * integer(lanes), lanes))


def _vector(space: IterationSpace, outer: Sequence[ir.Expr], start: ir.Expr, lanes: int) -> tirx.Stmt:
    if lanes == 1:
        return space.store((*outer, start))
    return vectorized(lanes, lambda lane: space.store((*outer, start + lane)))


def breakpoints(space: IterationSpace) -> list[int] | None:
    """Where along the innermost loop comparisons change, with its ends; None if that is not known."""
    inner = space.loops[-1]
    edges = {0, inner.extent}
    axis = inner.splits[0].axis
    # a loop over several axes: no condition depends on one of them, or they would not be fused
    if len(inner.splits) > 1:
        return sorted(edges)
    for compared in _comparisons(space.value):
        if uses(compared, space.iterators[axis]):
            changes = _changes(compared, space, inner.splits[0])
            if changes is None:
                return None
            edges |= {edge for edge in changes if 0 < edge < inner.extent}
    return sorted(edges)


_HOLDS: dict[type, Callable[[int], bool]] = {
    tirx.LT: lambda gap: gap > 0,
    tirx.LE: lambda gap: gap >= 0,
    tirx.GT: lambda gap: gap < 0,
    tirx.GE: lambda gap: gap <= 0,
    tirx.EQ: lambda gap: gap == 0,
    tirx.NE: lambda gap: gap != 0,
}
"""Whether `a < b` and the like hold, by the sign of b - a."""


def _comparisons(value: ir.Expr) -> list[ir.Expr]:
    found: list[ir.Expr] = []
    tvm_ffi.structural_walk(value, (tuple(_HOLDS), found.append))
    return found


def _changes(compared: ir.Expr, space: IterationSpace, split: IterSplit) -> set[int] | None:
    """Values of a split from which on a comparison holds, or no longer does; None if it is another kind."""
    a, b = (affine_index(side, space.iterators, space.extents) for side in (compared.a, compared.b))
    if a is None or b is None:
        return None
    gap = b.plus(a, -1)
    slope = gap.terms.get(split, 0)
    if len(gap.terms) != 1 or abs(slope) != 1:
        return None
    # b - a is zero there; a comparison changes before it, behind it, or both
    root, holds = -gap.base * slope, _HOLDS[type(compared)]
    below = {root} if holds(-slope) != holds(0) else set()
    return below | ({root + 1} if holds(0) != holds(slope) else set())
