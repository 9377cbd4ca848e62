"""How a slice of an operand gets from global memory to the registers of tensor cores.

Threads load pieces into registers while the slice before is multiplied, then store them to shared memory,
from which `ldmatrix` reads 8x8 matrices, a row of 16 bytes an address. Eight rows of a matrix, and the pieces
that eight threads store, have to lie in different banks: chunks of 16 bytes are rotated within their line, by
the line's number. (CUTLASS takes an exclusive or, of which TVM makes arithmetic in 64 bits.)
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import load_matrices
from hybridc.schedules.cuda.tensor_core.read import Axis, Element, element_of, flattened, steps_by_one

CHUNK = 8
"""Elements of 16 bytes: a row of a matrix, and the longest access of a thread."""
BANK_CHUNKS = 8
"""Chunks that the 32 banks of shared memory hold side by side."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One factor, of which a block of threads needs `extent` positions."""

    name: str
    element: Element
    position: ir.Var
    """In `element`, as `depth_position`."""
    depth_position: ir.Var
    positions: Axis
    depth: Axis
    extent: int
    step: int
    """Of the depth at a time."""
    threads: int
    along_depth: bool
    """Whether lines of shared memory, as those of global memory, run along the depth."""
    width: int
    """Elements of a global load."""

    def point(self, position: ir.Expr, depth: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """What stands for the variables of `element`."""
        return {self.position: position, self.depth_position: depth}

    @property
    def line(self) -> int:
        return self.step if self.along_depth else self.extent

    @property
    def elements(self) -> int:
        return self.extent * self.step

    @property
    def pieces(self) -> int:
        """That a thread loads of each slice."""
        return self.elements // (self.width * self.threads)

    def piece(self, number: ir.Expr, thread: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """Line of a piece, and where in it the piece begins."""
        flat = number * integer(self.threads) + thread
        per_line = integer(self.line // self.width)
        return tirx.floordiv(flat, per_line), tirx.floormod(flat, per_line) * integer(self.width)

    def offset(self, line: ir.Expr, at: ir.Expr) -> ir.Expr:
        """Of an element in shared memory, in elements."""
        chunks = self.line // CHUNK
        period, group = min(chunks, BANK_CHUNKS), max(1, BANK_CHUNKS // chunks)
        chunk, inside = tirx.floordiv(at, integer(CHUNK)), tirx.floormod(at, integer(CHUNK))
        turned = tirx.floormod(chunk + tirx.floordiv(line, integer(group)), integer(period))
        if chunks > period:
            turned = tirx.floordiv(chunk, integer(period)) * integer(period) + turned
        return line * integer(self.line) + turned * integer(CHUNK) + inside

    def load(self, registers: ir.Var, start: ir.Expr, slice_start: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        """Load a thread's pieces of a slice; zeros behind the end of either axis."""

        def one(number: ir.Expr) -> tirx.Stmt:
            line, at = self.piece(number, thread)
            position, depth = (line, at) if self.along_depth else (at, line)
            position, depth = start + position, slice_start + depth
            inside = [
                place < integer(axis.extent)
                for place, axis, step in (
                    (position, self.positions, self.extent),
                    (depth, self.depth, self.step),
                )
                if axis.extent % step
            ]

            def element(lane: ir.Expr) -> tirx.Stmt:
                at = (position, depth + lane) if self.along_depth else (position + lane, depth)
                value = substitute(self.element.load, self.point(*at))
                return tirx.BufferStore(registers, value, [number * integer(self.width) + lane])

            def zero(lane: ir.Expr) -> tirx.Stmt:
                value = tirx.FloatImm("float32", 0.0)
                return tirx.BufferStore(registers, value, [number * integer(self.width) + lane])

            conditions = [substitute(c, self.point(position, depth)) for c in self.element.conditions]
            loaded = vectorized(self.width, element)
            if not inside and not conditions:
                return loaded
            return tirx.IfThenElse(tirx.all(*inside, *conditions), loaded, vectorized(self.width, zero))

        return unrolled(self.pieces, one)

    def store(self, registers: ir.Var, shared: ir.Var, stage: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        """Store what `load` loaded to shared memory."""

        def one(number: ir.Expr) -> tirx.Stmt:
            line, at = self.piece(number, thread)
            first = stage * integer(self.elements) + self.offset(line, at)

            def element(lane: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(registers, [number * integer(self.width) + lane])
                return tirx.BufferStore(shared, value, [first + lane])

            return vectorized(self.width, element)

        return unrolled(self.pieces, one)

    def fragments(
        self, registers: ir.Var, number: ir.Expr, shared: ir.Var, stage: ir.Expr, corner: ir.Expr,
        depth: ir.Expr, lane: ir.Expr, *, depth_first: bool,
    ) -> tirx.Stmt:  # fmt: skip
        """Load the 16x16 elements from position `corner` and `depth` on, four 8x8 matrices, of which the
        second is the next along the depth if `depth_first`, else along the positions."""
        inner, outer = (
            tirx.floormod(tirx.floordiv(lane, integer(8)), integer(2)) * 8,
            tirx.floordiv(lane, integer(16)) * 8,
        )
        row = tirx.floormod(lane, integer(8))
        along, across = (inner, outer) if depth_first else (outer, inner)
        position, depth = corner + across, depth + along
        line, at = (position + row, depth) if self.along_depth else (depth + row, position)
        address = stage * integer(self.elements) + self.offset(line, at)
        return load_matrices(
            tirx.BufferLoad(registers, [number * integer(4)]),
            tirx.BufferLoad(shared, [address]),
            transposed=not self.along_depth,
        )


def operand(
    name: str,
    value: ir.Expr,
    positions: Axis,
    depth: Axis,
    batch: dict[ir.Var, ir.Expr],
    extent: int,
    step: int,
    threads: int,
) -> Operand:
    """A factor as its elements lie in memory: along the depth, or along the positions."""
    p, d = tirx.Var(f"{name}_position", "int64"), tirx.Var(f"{name}_depth", "int64")
    known = sym.Analyzer()
    known.bind(p, ir.Range.from_min_extent(integer(0), integer(positions.extent)))
    known.bind(d, ir.Range.from_min_extent(integer(0), integer(depth.extent)))
    flat = flattened(substitute(value, {**batch, **positions.at(p), **depth.at(d)}), known)
    element = element_of(flat)
    widest = min(CHUNK, extent * step // threads)

    def width(axis: Axis, variable: ir.Var) -> int:
        fits = (w for w in (8, 4, 2) if w <= widest and axis.extent % w == 0)
        return next((w for w in fits if steps_by_one(element, variable, w)), 1)

    widths = {True: width(depth, d), False: width(positions, p)}
    along_depth = widths[True] > widths[False]
    return Operand(
        name, element, p, d, positions, depth, extent, step, threads, along_depth, widths[along_depth],
    )  # fmt: skip


def lane_of(thread: ir.Expr) -> ir.Expr:
    """A thread's number in its warp."""
    return tirx.floormod(thread, integer(WARP))
