"""Elements that do not lie side by side along the depth, as the data of a convolution.

Tensor cores take four bytes, one behind the other along the depth, from a register. A thread loads a piece
of several lines, a word of four positions from each, transposes the bytes in registers, and stores them along
the depth. Where positions do not lie side by side either, as in a window, or elements have 16 bits, it loads
single elements of one position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute, uses
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import transposed
from hybridc.schedules.cuda.tensor_core.staging import Operand, either

WORD = 4
"""Bytes of a register."""


@dataclass(frozen=True, slots=True)
class Gathered(Operand):
    """An operand whose pieces are `lines` along the depth times `width` positions: 4 of bytes, or 1. Of words
    eight threads store every fourth position at once: it lies `in_pairs`."""

    @property
    def unit(self) -> int:
        """Lines of a piece: where they are of one tap, that is found out for all of them at once."""
        return self.lines

    @property
    def lines(self) -> int:
        """As many as fit a row of a matrix, so that stores are long, if there is a piece for each thread."""
        share = self.elements // (self.width * self.threads)
        return min(self.chunk, share)

    @property
    def pieces(self) -> int:
        return self.elements // (self.lines * self.width * self.threads)

    @property
    def can_be_copied(self) -> bool:
        return False

    @property
    def joins(self) -> bool:
        return self.item_bytes == 2

    def piece(self, number: ir.Expr, thread: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """First position of a piece, and its first line. Threads side by side load a sector of each line of
        words; of single elements all positions, so that a thread of many has few of them, and warps agree on
        the taps that they read."""
        flat = number * integer(self.threads) + thread
        side_by_side = self.extent if self.width == 1 else WARP // self.width
        depths = self.step // self.lines
        near = tirx.floormod(flat, integer(side_by_side))
        rest = tirx.floordiv(flat, integer(side_by_side))
        far = tirx.floordiv(rest, integer(depths)) * integer(side_by_side)
        return (near + far) * integer(self.width), tirx.floormod(rest, integer(depths)) * integer(self.lines)

    def load(self, registers: ir.Var, start: ir.Expr, number: ir.Expr, thread: ir.Var) -> tirx.Stmt:
        """Load a thread's pieces of slice `number`, of positions from `start` on; what stands for zero where
        there is no element."""
        turn, line = (tirx.Var(name, "int64") for name in ("turn", "line"))
        known = sym.Analyzer()
        for variable, extent in ((turn, self.pieces), (thread, self.threads), (line, self.lines)):
            known.bind(variable, ir.Range.from_min_extent(integer(0), integer(extent)))
        position, first = (known.simplify(place) for place in self.piece(turn, thread))
        depth = first + line
        units, unit = (
            integer(self.step // self.unit),
            known.simplify(tirx.floordiv(first, integer(self.unit))),
        )
        point = {
            self.position: start + position,
            self.slice: number * units + unit,
            self.depth_in_slice: line,
        }
        conditions = [known.simplify(substitute(c, point)) for c in self.element.conditions]
        if self.positions.extent % self.extent:
            conditions.append(start + position < integer(self.positions.extent))
        if self.depth.extent % self.step:
            last = first if self.depth.extent % self.lines == 0 else depth
            conditions.append(number * integer(self.step) + last < integer(self.depth.extent))

        first_load = substitute(self.element.load, point)
        # simplified, so that lines of one tap are seen to be so many elements apart
        offsets = [known.simplify(index) for index in first_load.indices]

        def loaded(at: dict[ir.Var, ir.Expr]) -> tirx.Stmt:
            def one(lane: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(first_load.source, [*offsets[:-1], offsets[-1] + lane])
                place = self._register(at[turn], at[line]) + lane
                return tirx.BufferStore(registers, substitute(value, at), [place])

            return vectorized(self.width, one)

        def missing(at: dict[ir.Var, ir.Expr]) -> tirx.Stmt:
            return self.without_element(registers, self._register(at[turn], at[line]))

        own = [c for c in conditions if uses(c, line)]
        of_piece = [c for c in conditions if uses(c, turn) and not uses(c, line)]
        common = [c for c in conditions if not uses(c, turn) and not uses(c, line)]

        def lines(piece: ir.Expr, body: Callable[[dict[ir.Var, ir.Expr]], tirx.Stmt]) -> tirx.Stmt:
            return unrolled(self.lines, lambda i: body({turn: piece, line: i}))

        def guarded(at: dict[ir.Var, ir.Expr]) -> tirx.Stmt:
            return either([substitute(c, at) for c in own], loaded(at), missing(at))

        def piece(number: ir.Expr) -> tirx.Stmt:
            conditions = [substitute(c, {turn: number}) for c in of_piece]
            return either(conditions, lines(number, guarded), lines(number, missing))

        nothing = unrolled(self.pieces, lambda number: lines(number, missing))
        return either(common, unrolled(self.pieces, piece), nothing)

    def _register(self, piece: ir.Expr, line: ir.Expr) -> ir.Expr:
        """Where the first byte of a line is loaded to. Words of four lines are to be transposed with each
        other, behind which those of one position lie side by side."""
        start = piece * integer(self.lines * self.width)
        if self.width == 1:
            return start + line
        words = integer(self.lines // WORD)
        word = tirx.floordiv(line, integer(WORD)) + words * tirx.floormod(line, integer(WORD))
        return start + word * integer(WORD)

    def store(self, registers: ir.Var, shared: ir.Var, stage: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        """Store to shared memory what `load` loaded, or `join` joined, along the depth."""
        words = self.lines // WORD

        def piece(number: ir.Expr) -> tirx.Stmt:
            position, depth = self.piece(number, thread)
            start = number * integer(self.lines * self.width)

            def transpose(group: ir.Expr) -> tirx.Stmt:
                return transposed(tirx.BufferLoad(registers, [start + group * integer(WORD)]), words)

            def line(lane: ir.Expr) -> tirx.Stmt:
                first = stage * integer(self.elements) + self.offset(position + lane, depth)

                def element(at: ir.Expr) -> tirx.Stmt:
                    value = tirx.BufferLoad(registers, [start + lane * integer(self.lines) + at])
                    return tirx.BufferStore(shared, value, [first + at])

                return vectorized(self.lines, element)

            stores = unrolled(self.width, line)
            return stores if self.width == 1 else tirx.SeqStmt([unrolled(words, transpose), stores])

        return unrolled(self.pieces, piece)
