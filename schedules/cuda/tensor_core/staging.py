"""How a slice of an operand gets from global memory to the registers of tensor cores.

Threads load pieces into registers while the slice before is multiplied, then store them to shared memory; or
begin to copy them there some slices ahead. From there `ldmatrix` reads 8x8 matrices, a row of 16 bytes an
address. Eight rows of a matrix, and the pieces that eight threads store, have to lie in different banks:
chunks of 16 bytes are rotated within their line, by the line's number. (CUTLASS takes an exclusive or, of
which TVM makes arithmetic in 64 bits.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute, uses
from hybridc.schedules.cuda.core.copies import COPY_BYTES, copied
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import (
    joined,
    load_matrices,
    made_unsigned,
    rounded,
)
from hybridc.schedules.cuda.tensor_core.read import Axis, Element, steps_by_one

CHUNK_BYTES = 16
"""A row of a matrix, and the longest access of a thread."""
BANK_CHUNKS = 8
"""Chunks that the 32 banks of shared memory hold side by side."""
Positions = Callable[[ir.Expr, ir.Expr], ir.Expr]
"""Where the first or second matrix has its row of a number."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One factor, of which a block of threads needs `extent` positions."""

    name: str
    element: Element
    position: ir.Var
    """In `element`, as `slice`, the number of a `unit` of the depth, and `depth_in_slice`."""
    slice: ir.Var
    depth_in_slice: ir.Var
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
    item_bytes: int = 2
    dtype: str = "float32"
    """Of the kernel's buffers, before 16-bit floats become narrow."""
    adds_128: bool = False
    """To what lies in memory: `Factor.adds_128`."""
    rounds: bool = False
    """Whether its elements are float32 in memory and in registers, and float16 in shared memory."""
    in_pairs: bool = False
    """Whether every second pair of lines, or every fourth one, is read or written at once, not only
    neighbours. Lines have as many chunks as half of the banks."""
    in_pieces: bool = False
    """Whether `element` is named by its place in a piece along the depth, not in a slice: pieces of channels
    that slices do not divide have one tap each."""

    @property
    def unit(self) -> int:
        """Steps of the depth by which `element` is named."""
        return self.width if self.in_pieces else self.step

    @property
    def chunk(self) -> int:
        """Elements of a row of a matrix."""
        return CHUNK_BYTES // self.item_bytes

    @property
    def memory_bytes(self) -> int:
        """Of an element in global memory."""
        return 4 if self.rounds else self.item_bytes

    @property
    def joins(self) -> bool:
        """Whether pairs of elements are made of what was loaded, before they are stored to shared memory."""
        return self.rounds

    @property
    def line(self) -> int:
        return self.step if self.along_depth else self.extent

    @property
    def elements(self) -> int:
        return self.extent * self.step

    @property
    def pieces(self) -> int:
        """That a thread loads of each slice, the last of them only if `has_piece`."""
        return ceil_div(self.extent * self.step, self.width * self.threads)

    def has_piece(self, number: ir.Expr, thread: ir.Expr) -> list[ir.Expr]:
        """What has to hold for a piece to be a thread's; nothing where all threads have as many."""
        pieces = self.extent * self.step // self.width
        flat = number * integer(self.threads) + thread
        return [flat < integer(pieces)] if pieces % self.threads else []

    def piece(self, number: ir.Expr, thread: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """Line of a piece, and where in it the piece begins."""
        flat = number * integer(self.threads) + thread
        per_line = integer(self.line // self.width)
        return tirx.floordiv(flat, per_line), tirx.floormod(flat, per_line) * integer(self.width)

    def offset(self, line: ir.Expr, at: ir.Expr) -> ir.Expr:
        """Of an element in shared memory, in elements."""
        if self.in_pairs:
            return self._offset_in_pairs(line, at)
        chunks = self.line // self.chunk
        period, group = min(chunks, BANK_CHUNKS), max(1, BANK_CHUNKS // chunks)
        chunk, inside = tirx.floordiv(at, integer(self.chunk)), tirx.floormod(at, integer(self.chunk))
        by = tirx.floordiv(line, integer(group))
        if not self.loads_matrices:
            by = by * 2  # eight lanes read two chunks of each of four lines
        turned = tirx.floormod(chunk + by, integer(period))
        if chunks > period:
            turned = tirx.floordiv(chunk, integer(period)) * integer(period) + turned
        return line * integer(self.line) + turned * integer(self.chunk) + inside

    def _offset_in_pairs(self, line: ir.Expr, at: ir.Expr) -> ir.Expr:
        """Pairs of lines, which lie side by side in the banks, are rotated by a number that differs for four
        neighbours, for eight of which each is the second, and with their lines for four, each the fourth."""
        pair, side = tirx.floordiv(line, integer(2)), tirx.floormod(line, integer(2))
        chunk, inside = tirx.floordiv(at, integer(self.chunk)), tirx.floormod(at, integer(self.chunk))
        half = integer(BANK_CHUNKS // 2)
        by = tirx.floormod(pair + tirx.floordiv(pair, half), half)
        by = by + tirx.floormod(tirx.floordiv(pair, integer(BANK_CHUNKS)), integer(2)) * half
        turned = tirx.floormod(side * half + chunk + by, integer(BANK_CHUNKS))
        return (pair * integer(BANK_CHUNKS) + turned) * integer(self.chunk) + inside

    @property
    def can_be_copied(self) -> bool:
        """Whether asynchronous copies move it: they round nothing, move no single element of 16 bits, and
        write zeros where an element does not exist."""
        return (
            self.item_bytes < 4
            and not self.rounds
            and self.width * self.item_bytes in COPY_BYTES
            and not self.element.otherwise
        )

    def _element_of_piece(
        self, turn: ir.Var, start: ir.Expr, number: ir.Expr, thread: ir.Var
    ) -> tuple[dict[ir.Var, ir.Expr], list[ir.Expr]]:
        """The first element of a thread's piece `turn` of slice `number`, of positions from `start` on; and
        what has to hold for it to be there."""
        known = sym.Analyzer()
        known.bind(turn, ir.Range.from_min_extent(integer(0), integer(self.pieces)))
        known.bind(thread, ir.Range.from_min_extent(integer(0), integer(self.threads)))
        places = [known.simplify(place) for place in self.piece(turn, thread)]
        position, depth = places if self.along_depth else places[::-1]
        point = {self.position: start + position, self.slice: number, self.depth_in_slice: depth}
        if self.in_pieces:
            unit = known.simplify(tirx.floordiv(depth, integer(self.unit)))
            point[self.slice] = number * integer(self.step // self.unit) + unit
            point[self.depth_in_slice] = integer(0)
        conditions = [substitute(condition, point) for condition in self.element.conditions]
        conditions += self.has_piece(turn, thread)
        if self.positions.extent % self.extent:
            conditions.append(start + position < integer(self.positions.extent))
        if self.depth.extent % self.step:
            conditions.append(number * integer(self.step) + depth < integer(self.depth.extent))
        return point, conditions

    def copy(
        self, shared: ir.Var, stage: ir.Expr, start: ir.Expr, number: ir.Expr, thread: ir.Var
    ) -> tirx.Stmt:
        """Begin to copy a thread's pieces of slice `number`, of positions from `start` on, to shared memory;
        zeros behind the end of either axis."""
        turn = tirx.Var("turn", "int64")
        point, conditions = self._element_of_piece(turn, start, number, thread)

        def one(piece: ir.Expr) -> tirx.Stmt:
            source, *guards = (substitute(e, {turn: piece}) for e in (first, *conditions))
            line, at = self.piece(piece, thread)
            to = tirx.BufferLoad(shared, [stage * integer(self.elements) + self.offset(line, at)])
            exists = tirx.all(*guards) if guards else None
            copy = copied(to, source, self.width * self.item_bytes, exists)
            return either(self.has_piece(piece, thread), copy, None)

        first = substitute(self.element.load, point)
        return unrolled(self.pieces, one)

    def load(self, registers: ir.Var, start: ir.Expr, number: ir.Expr, thread: ir.Var) -> tirx.Stmt:
        """Load the same into registers."""
        turn = tirx.Var("turn", "int64")
        point, conditions = self._element_of_piece(turn, start, number, thread)

        def loaded(piece: ir.Expr) -> tirx.Stmt:
            def element(lane: ir.Expr) -> tirx.Stmt:
                at = self.depth_in_slice if self.along_depth else self.position
                value = substitute(self.element.load, {**point, at: point[at] + lane})
                place = piece * integer(self.width) + lane
                return tirx.BufferStore(registers, substitute(value, {turn: piece}), [place])

            return vectorized(self.width, element)

        def missing(piece: ir.Expr) -> tirx.Stmt:
            return self.without_element(registers, piece * integer(self.width))

        def one(piece: ir.Expr) -> tirx.Stmt:
            own = [substitute(c, {turn: piece}) for c in conditions if uses(c, turn)]
            return either(own, loaded(piece), missing(piece))

        # one branch for all pieces where it can be, so that their loads are issued one after the other
        common = [condition for condition in conditions if not uses(condition, turn)]
        return either(common, unrolled(self.pieces, one), unrolled(self.pieces, missing))

    def without_element(self, registers: ir.Var, first: ir.Expr) -> tirx.Stmt:
        """Store what stands for zero to registers, in the place of a load."""
        value = tirx.const(self.element.otherwise, self.dtype)
        # of more than four bytes TVM writes a vector that no compiler takes
        each = unrolled if self.item_bytes == 1 else vectorized
        return each(self.width, lambda lane: tirx.BufferStore(registers, value, [first + lane]))

    def join(self, registers: ir.Var, pairs: ir.Var) -> tirx.Stmt:
        """Join each two elements that `load` loaded to one register; the elements of `pairs` have 16 bits."""

        def one(number: ir.Expr) -> tirx.Stmt:
            at = [number * integer(2)]
            return joined(tirx.BufferLoad(pairs, at), tirx.BufferLoad(registers, at), rounds=self.rounds)

        return unrolled(self.elements // self.threads // 2, one)

    def store(self, registers: ir.Var, shared: ir.Var, stage: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        """Store to shared memory what `load` loaded, or `join` joined."""

        def one(number: ir.Expr) -> tirx.Stmt:
            stored = either(self.has_piece(number, thread), piece(number), None)
            if self.item_bytes < 4:
                return stored
            first = number * integer(self.width)
            elements = unrolled(self.width, lambda lane: rounded(tirx.BufferLoad(registers, [first + lane])))
            return tirx.SeqStmt([elements, stored])

        def piece(number: ir.Expr) -> tirx.Stmt:
            line, at = self.piece(number, thread)
            first = stage * integer(self.elements) + self.offset(line, at)

            def element(lane: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(registers, [number * integer(self.width) + lane])
                return tirx.BufferStore(shared, value, [first + lane])

            return vectorized(self.width, element)

        return unrolled(self.pieces, one)

    def fragments(
        self, registers: ir.Var, number: ir.Expr, shared: ir.Var, stage: ir.Expr, positions: Positions,
        depth: ir.Expr, lane: ir.Expr, *, depth_first: bool,
    ) -> tirx.Stmt:  # fmt: skip
        """Load 16 `positions` of two chunks from `depth` on: four matrices of eight positions and a chunk, of
        which the second is the next along the depth if `depth_first`, else along the positions."""
        if not self.loads_matrices:
            return self._gathered(registers, number, shared, stage, positions, depth, lane, depth_first)
        inner, outer = (
            tirx.floormod(tirx.floordiv(lane, integer(8)), integer(2)),
            tirx.floordiv(lane, integer(16)),
        )
        row = tirx.floormod(lane, integer(8))
        along, across = (inner, outer) if depth_first else (outer, inner)
        depth = depth + along * self.chunk
        if self.along_depth:
            line, at = positions(across, row), depth
        else:
            line, at = depth + row, positions(across, integer(0))
        address, first = stage * integer(self.elements) + self.offset(line, at), number * integer(4)
        loaded = load_matrices(
            tirx.BufferLoad(registers, [first]),
            tirx.BufferLoad(shared, [address]),
            transposed=not self.along_depth,
        )
        return tirx.SeqStmt([loaded, made_unsigned(registers, first, 4)]) if self.adds_128 else loaded

    @property
    def loads_matrices(self) -> bool:
        """Whether `ldmatrix` does, which transposes elements of 16 bits alone."""
        return self.along_depth or self.item_bytes == 2

    def _gathered(
        self, registers: ir.Var, number: ir.Expr, shared: ir.Var, stage: ir.Expr, positions: Positions,
        depth: ir.Expr, lane: ir.Expr, depth_first: bool,
    ) -> tirx.Stmt:  # fmt: skip
        """The same, each lane its own elements of 32 bits."""
        row = tirx.floordiv(lane, integer(4))
        step = depth + tirx.floormod(lane, integer(4))

        def one(matrix: ir.Expr) -> tirx.Stmt:
            inner, outer = tirx.floormod(matrix, integer(2)), tirx.floordiv(matrix, integer(2))
            along, across = (inner, outer) if depth_first else (outer, inner)
            at = self.offset(step + along * 4, positions(across, row))
            value = tirx.BufferLoad(shared, [stage * integer(self.elements) + at])
            bits = tirx.reinterpret("uint32", value)
            return tirx.BufferStore(registers, bits, [number * integer(4) + matrix])

        return unrolled(4, one)


def in_order(corner: ir.Expr) -> Positions:
    """Rows that lie one behind the other from `corner` on, eight of each matrix."""
    return lambda across, row: corner + across * 8 + row


def widest_load(element: Element, variable: ir.Var, extent: int, most: int) -> int:
    """Elements that a load along an axis of `extent` positions, named by `variable`, can have at most."""
    return widest_piece(lambda width: element, variable, extent, extent, most)


def widest_piece(named: Callable[[int], Element], variable: ir.Var, extent: int, step: int, most: int) -> int:
    """Elements that a piece along the depth can have at most, where `named` names elements, by `variable`, by
    their places in pieces of so many."""
    fits = (w for w in (16, 8, 4, 2) if w <= most and extent % w == 0 and step % w == 0)
    return next((w for w in fits if steps_by_one(named(w), variable, w)), 1)


def either(conditions: Sequence[ir.Expr], then: tirx.Stmt, otherwise: tirx.Stmt | None) -> tirx.Stmt:
    """One of two statements, or the first one alone where there are no conditions."""
    return tirx.IfThenElse(tirx.all(*conditions), then, otherwise) if conditions else then


def lane_of(thread: ir.Expr) -> ir.Expr:
    """A thread's number in its warp."""
    return tirx.floormod(thread, integer(WARP))
