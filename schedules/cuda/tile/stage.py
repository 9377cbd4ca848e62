"""How slices of a factor get from global memory through registers into shared memory.

A slice lies in shared memory step by step, the rows (or columns) of a step side by side, so that threads read
theirs in 128 bits. Where global memory is contiguous along the depth, four steps of a row are read at once
and stored one by one; lines then are 4 words longer than the tile, so that these stores hit distinct banks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import loads, substitute
from hybridc.schedules.cuda.core.vectors import first_step
from hybridc.schedules.cuda.tile.access import WIDTH, flat_index, is_wide
from hybridc.schedules.cuda.tile.group import Group, Slices
from hybridc.schedules.shapes import shape_of

_SECTOR = 8
"""Floats that are read together at least."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A factor `value` of the iterators in `group`, of which `threads` load `side` rows or columns."""

    value: ir.Expr
    group: Group
    side: int
    slices: Slices
    threads: int
    along_depth: bool
    """Whether neighbouring threads load neighbouring steps of a row, not neighbouring rows of a step."""
    wide: bool
    """Whether in accesses of 128 bits."""

    @property
    def line(self) -> int:
        """Words of a step in shared memory."""
        return self.side + WIDTH * self.along_depth

    @property
    def words(self) -> int:
        """Of shared memory."""
        return self.slices.steps * self.line

    @property
    def lanes(self) -> int:
        return WIDTH if self.wide else 1

    @property
    def _length(self) -> int:
        """Accesses to what lies side by side: the steps of a row, or the rows of a step."""
        return (self.slices.steps if self.along_depth else self.side) // self.lanes

    @property
    def _count(self) -> int:
        return self.side if self.along_depth else self.slices.steps

    @property
    def _at_once(self) -> int:
        """How many rows, or steps, all threads load together; 0: less than one."""
        return self.threads // self._length

    @property
    def turns(self) -> int:
        """Accesses of a thread to a slice."""
        if self._at_once:
            return -(-self._count // self._at_once)
        return -(-self._count * self._length // self.threads)

    @property
    def registers(self) -> int:
        return self.turns * self.lanes

    def _places(self, thread: ir.Expr, turn: ir.Expr) -> tuple[ir.Expr, ir.Expr, list[ir.Expr]]:
        """The first row and step of a piece, and what has to hold where there may be none.

        Places of different turns are a constant apart, so that one address does for all of them.
        """
        length, guards = integer(self._length), []
        if self._at_once:
            major = turn * integer(self._at_once) + tirx.floordiv(thread, length)
            minor = tirx.floormod(thread, length)
            if self.threads % self._length:
                guards.append(thread < integer(self._at_once * self._length))
        else:
            piece = turn * integer(self.threads) + thread
            major, minor = tirx.floordiv(piece, length), tirx.floormod(piece, length)
        if (self.turns * self.threads) // self._length > self._count:
            guards.append(major < integer(self._count))
        minor = minor * integer(self.lanes)
        return (major, minor, guards) if self.along_depth else (minor, major, guards)

    def load(
        self,
        into: ir.Var,
        thread: ir.Expr,
        first: ir.Expr,
        number: ir.Expr,
        batch: Mapping[ir.Var, ir.Expr],
        exists: ir.Expr | None,
    ) -> tirx.Stmt:
        """A thread's part of slice `number` of rows from `first` on into registers; zero where there is
        none."""

        def turn(at: ir.Expr) -> tirx.Stmt:
            row, step, guards = self._places(thread, at)
            spot = self.group.at(first + row)
            depth = self.slices.at(number, step)
            if exists is not None:
                guards.append(exists)
            if self.group.size % self.side:
                guards.append(first + row < integer(self.group.size))
            if self.slices.has_tail:
                guards.append(self.slices.exists(depth))
            moving = (self.slices.depth if self.along_depth else self.group).axes

            def lane(number: ir.Expr) -> tirx.Stmt:
                point = {**batch, **spot, **depth}
                if self.wide:
                    point[moving[-1]] = point[moving[-1]] + number
                value = substitute(self.value, point)
                if guards:
                    value = tirx.if_then_else(tirx.all(*guards), value, tirx.FloatImm("float32", 0.0))
                return tirx.BufferStore(into, value, [at * integer(self.lanes) + number])

            return vectorized(self.lanes, lane)

        return unrolled(self.turns, turn)

    def store(self, registers: ir.Var, shared: ir.Var, start: ir.Expr, thread: ir.Expr) -> tirx.Stmt:
        """A thread's part of a slice from registers into shared memory from `start` on."""

        def turn(at: ir.Expr) -> tirx.Stmt:
            row, step, guards = self._places(thread, at)

            def lane(number: ir.Expr) -> tirx.Stmt:
                value = tirx.BufferLoad(registers, [at * integer(self.lanes) + number])
                if self.along_depth:
                    place = (step + number) * integer(self.line) + row
                else:
                    place = step * integer(self.line) + row + number
                return tirx.BufferStore(shared, value, [start + place])

            stored = (unrolled if self.along_depth else vectorized)(self.lanes, lane)
            return tirx.IfThenElse(tirx.all(*guards), stored, None) if guards else stored

        return unrolled(self.turns, turn)


def stage(value: ir.Expr, group: Group, slices: Slices, batch: Group) -> Stage:
    """The way of a factor that takes the fewest accesses, for a tile yet to be chosen."""
    depth = slices.depth
    axes = [*group.axes, *depth.axes, *batch.axes]
    found = sorted(loads(value), key=lambda load: -_elements(load.source))
    unknown = Stage(value, group, WIDTH, slices, 1, along_depth=False, wide=False)
    if not found:
        return unknown
    flat = flat_index(found[0].source, found[0].indices)
    by_row, by_step = (abs(first_step(flat, g.axes[-1], axes)) for g in (group, depth))
    along_depth = bool(by_step) and (not by_row or (by_row > by_step and by_row >= _SECTOR))
    # what is computed on the way is read one by one
    plain = isinstance(value, ir.TensorLoad)
    if along_depth:
        # slices end with the innermost axis, where one of several is not a multiple of four as their product
        fits = slices.is_plain and slices.steps % WIDTH == 0 and depth.extents[-1] % WIDTH == 0
        wide = plain and fits and is_wide(flat, depth, (group, batch))
    else:
        wide = plain and is_wide(flat, group, (depth, batch))
    return replace(unknown, along_depth=along_depth, wide=wide)


def _elements(buffer: ir.Var) -> int:
    total = 1
    for extent in shape_of(buffer):
        total *= extent
    return total
