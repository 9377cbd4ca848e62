"""The tile of a block of threads, and which part of it each thread has."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tile.access import WIDTH


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `columns` results, of which each thread has `down` x `across` in registers.

    A thread's rows are groups of four, `rows / (down / 4)` apart, as its columns are: neighbouring threads
    then read neighbouring 16 bytes of shared memory, which no bank has to give twice.
    """

    rows: int
    columns: int
    down: int
    across: int
    groups: int = 1
    """Of threads in a block, which share the depth: each has accumulators for the whole tile."""
    parts: int = 1
    """Blocks that share the depth of a tile."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}/{self.down}x{self.across}/{self.groups}x{self.parts}"

    @property
    def threads(self) -> int:
        """Of a group."""
        return self.rows // self.down * (self.columns // self.across)

    @property
    def accumulators(self) -> int:
        return self.down * self.across

    def place(self, thread: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
        """Where a thread stands in the grid of threads: row, column.

        A warp is 4 x 8 of them, or 8 x 4, where that divides the grid, else those that follow each other
        along its shorter side: what a warp reads of either factor then takes two turns of the banks at most.
        """
        rows, columns = self.rows // self.down, self.columns // self.across
        wide = 8 if columns % 8 == 0 else 4
        if columns % wide or rows % (WARP // wide):
            along = integer(min(rows, columns))
            inner, outer = tirx.floormod(thread, along), tirx.floordiv(thread, along)
            return (inner, outer) if rows < columns else (outer, inner)
        lane, warp = tirx.floormod(thread, integer(WARP)), tirx.floordiv(thread, integer(WARP))
        warps = integer(columns // wide)
        row = tirx.floordiv(warp, warps) * integer(WARP // wide) + tirx.floordiv(lane, integer(wide))
        return row, tirx.floormod(warp, warps) * integer(wide) + tirx.floormod(lane, integer(wide))

    def row(self, place: ir.Expr, quad: ir.Expr) -> ir.Expr:
        """The first row of one of a thread's groups."""
        return quad * integer(self.rows * WIDTH // self.down) + place * integer(WIDTH)

    def column(self, place: ir.Expr, quad: ir.Expr) -> ir.Expr:
        """The first column of one of a thread's groups."""
        return quad * integer(self.columns * WIDTH // self.across) + place * integer(WIDTH)
