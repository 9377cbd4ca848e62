"""Positions and vectors along contiguous axes, which loops over rows and over columns share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import INDEX, integer, loop, sequence, vectorized
from hybridc.schedules.cpu.core.nest import loads, substitute, uses
from hybridc.schedules.cpu.reduction.read import RowReductions
from hybridc.targets import Isa

Values = dict[ir.Var, ir.Expr]
"""What variables stand for."""

ACCUMULATORS = 4
"""Vectors in flight: an addition takes three to four cycles, and one vector is loaded a cycle."""
UNROLLED_VECTORS = 16
"""Rows of at most so many vectors have no loop."""


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


def lanes_of(rows: RowReductions, isa: Isa) -> int:
    """Lanes of the widest element type that a function handles."""
    # at least 32 bits, in which narrower numbers are summed up
    return isa.lanes(max(max(map(dtype_bits, rows.element_dtypes)), 32))


@dataclass(slots=True)
class Registers:
    """Small buffers of a kernel, which its root block allocates and LLVM keeps in registers.

    In the scope "global" TVM puts up to a kilobyte on the stack of the innermost loop around all uses; any
    other scope costs a call for each buffer and task. Without a loop it would become workspace.
    """

    scope: str
    buffers: list[ir.Var] = field(default_factory=list)

    def vector(self, lanes: int, dtype: str, name: str) -> ir.Var:
        """A new buffer of so many lanes."""
        buffer = tirx.decl_buffer((lanes,), dtype, name, scope=self.scope)
        self.buffers.append(buffer)
        return buffer


def element(buffer: ir.Var, lane: ir.Expr | int) -> tirx.BufferLoad:
    """One lane of a small buffer."""
    return tirx.BufferLoad(buffer, [integer(lane) if isinstance(lane, int) else lane])


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One vector of a row: `width` elements from `start`, for accumulator `slot` of that width."""

    start: ir.Expr
    width: int
    slot: int


def steps(length: int, lanes: int, body: Callable[[VectorStep], tirx.Stmt]) -> tirx.Stmt:
    """Steps over a row: a loop over groups of accumulators, what is left of whole vectors, smaller
    vectors."""
    vectors = length // lanes
    # short rows are written out: a loop is not worth so few vectors
    groups = vectors // ACCUMULATORS if vectors > UNROLLED_VECTORS else 0

    def group(i: ir.Expr) -> tirx.Stmt:
        first = i * integer(ACCUMULATORS * lanes)
        return sequence([body(VectorStep(first + integer(u * lanes), lanes, u)) for u in range(ACCUMULATORS)])

    parts = [loop(groups, group)] if groups else []
    parts += [
        body(VectorStep(integer(v * lanes), lanes, v % ACCUMULATORS))
        for v in range(groups * ACCUMULATORS, vectors)
    ]
    parts += [body(VectorStep(integer(start), width, 0)) for start, width in tail_pieces(length, lanes)]
    return sequence(parts)


def tail_pieces(length: int, lanes: int) -> list[tuple[int, int]]:
    """Start and width of the vectors that cover what whole ones leave over: powers of two, largest first."""
    start, pieces = length - length % lanes, []
    while start < length:
        width = 1 << ((length - start).bit_length() - 1)
        pieces.append((start, width))
        start += width
    return pieces


def assign(
    buffer: ir.Var,
    width: int,
    value: Callable[[ir.Expr], ir.Expr],
    where: Callable[[ir.Expr], list[ir.Expr]] = lambda lane: [lane],
) -> tirx.Stmt:
    """Write one vector; `value` and `where` are of a lane."""
    return vectorized(width, lambda lane: tirx.BufferStore(buffer, value(lane), where(lane)))
