"""How direct convolutions along one axis are cut into tiles, blocks and tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridc.schedules.cpu.conv2d.read import Convolution
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cpu.core.sharing import task_slots
from hybridc.targets import Isa

SPARE_REGISTERS = {16: 2, 32: 3}
"""For a scalar and what LLVM needs beside sums and one vector of the input for each column, by registers."""
_BLOCK_TILES = (1, 2, 3, 4, 6, 8, 12, 16)
TILE_COST = 24.0
"""What a tile takes beside its multiply-adds and stores, in vector multiply-adds."""
RUN_COST = 16.0
"""What beginning a line of a block takes, of the input or of the output: pages and cache lines again."""
_PAGE_FLOATS = 1024
"""Rows of a copy so far apart fall into the same sets of the first-level cache."""
_MOST_TILES = 12


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A micro-kernel of `rows` output channels x `vectors`; a block is `tiles` of them side by side."""

    conv: Convolution
    isa: Isa
    threads: int
    rows: int
    vectors: int
    tiles: int
    parts: int
    """Ranges of output channels that are tasks of their own."""

    @property
    def tile_columns(self) -> int:
        """Output positions of a micro-kernel."""
        raise NotImplementedError

    @property
    def all_tiles(self) -> int:
        """Along the output; those of the last block may be fewer."""
        return ceil_div(self.conv.width.outputs, self.tile_columns)

    @property
    def blocks(self) -> int:
        """Of one image's output in one channel."""
        return ceil_div(self.all_tiles, self.tiles)

    @property
    def row_blocks(self) -> int:
        """Micro-kernels that cover the output channels of a group."""
        return ceil_div(self.conv.group_outputs, self.rows)

    @property
    def part_blocks(self) -> int:
        """Micro-kernels that cover the output channels of a task."""
        return self.row_blocks // self.parts

    @property
    def tasks(self) -> int:
        """Of all images, groups, parts and blocks."""
        return self.conv.batches * self.conv.groups * self.parts * self.blocks


@dataclass(frozen=True, slots=True)
class Conv1dPlan(BlockPlan):
    """Of direct sums: vectors of neighbouring outputs."""

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        return f"{self.rows}x{self.vectors} vectors, {self.tiles} tiles, {self.parts} parts"

    @property
    def lanes(self) -> int:
        """Floats of a vector; half as many for outputs that fill less than half of a vector."""
        narrow = self.conv.width.outputs * 2 <= self.isa.lanes() > 8
        return self.isa.lanes() // 2 if narrow else self.isa.lanes()

    @property
    def tile_columns(self) -> int:
        """Output positions of a micro-kernel."""
        return self.vectors * self.lanes

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.tiles * self.tile_columns

    @property
    def copy_shape(self) -> tuple[int, int, int]:
        """Of what a block reads: channels, phases of the stride, columns."""
        axis = self.conv.width
        pitch = self.columns + axis.reach
        # a vector more, if rows would lie a multiple of a page apart
        return self.conv.group_inputs, axis.phases, pitch + (pitch % _PAGE_FLOATS == 0) * self.lanes

    @property
    def copy_bytes(self) -> int:
        """Of what a task copies."""
        channels, phases, pitch = self.copy_shape
        return 4 * channels * phases * pitch

    @property
    def step_cost(self) -> float:
        """Of an input channel's tap in a tile: loads are half as dear as multiply-adds."""
        sums = self.rows * self.vectors
        # fewer sums than multiply-adds in flight wait for their own results
        return max(sums, self.isa.sums_in_flight) * (1 + 0.5 * (self.rows + self.vectors) / sums)

    @property
    def waste(self) -> float:
        """Predicted time of all tiles' steps over that of the multiply-adds."""
        needed = self.conv.group_outputs * self.conv.width.outputs / self.lanes
        return self.row_blocks * self.all_tiles * self.step_cost / needed

    @property
    def cost(self) -> float:
        """Predicted time in vector multiply-adds of all threads together, idle ones counted."""
        sums = self.rows * self.vectors
        steps = self.conv.group_inputs * self.conv.width.taps
        tiles = self.part_blocks * self.tiles * self.all_tiles / (self.tiles * self.blocks)
        # a sum is cleared and stored; half a vector is copied in the time of a multiply-add
        task = tiles * (steps * self.step_cost + 2 * sums + TILE_COST) + self.copy_bytes / (2 * self.lanes)
        task += RUN_COST * (self.part_blocks * self.rows + self.conv.group_inputs * self.conv.width.phases)
        return task_slots(self.tasks, self.threads) * task


def is_one_line(conv: Convolution) -> bool:
    """Whether the convolution has one spatial axis: images are one line high, and so is the kernel."""
    height = conv.height
    return height.outputs == height.taps == height.padded == 1


def direct_cost(conv: Convolution, isa: Isa, threads: int) -> float:
    """Predicted time of the rule's best plan in vector multiply-adds of all threads together."""
    return min(plan.cost for plan in plans_of(conv, isa, threads))


def plans_of(conv: Convolution, isa: Isa, threads: int) -> Iterator[Conv1dPlan]:
    """Blocks and parts for the tiles that waste least."""
    for tile in sorted(_tiles(conv, isa, threads), key=lambda tile: tile.waste)[:_MOST_TILES]:
        for tiles, parts in itertools.product(_BLOCK_TILES, {1, 2, 4, tile.row_blocks}):
            plan = replace(tile, tiles=tiles, parts=parts)
            # what is left of the second-level cache is for weights, outputs, prefetches and another thread
            fits = plan.copy_bytes <= isa.l2_bytes // 4 or tiles == 1
            if tile.row_blocks % parts == 0 and fits and tiles <= plan.all_tiles:
                yield plan


def _tiles(conv: Convolution, isa: Isa, threads: int) -> Iterator[Conv1dPlan]:
    """Sums and one vector of the input for each column fit into registers."""
    registers = isa.vector_registers - SPARE_REGISTERS[isa.vector_registers]
    for rows in range(1, min(conv.group_outputs, 16) + 1):
        whole = conv.groups == 1 or conv.group_outputs % rows == 0
        for vectors in range(1, 17):
            if whole and rows * vectors + vectors <= registers:
                yield Conv1dPlan(conv, isa, threads, rows, vectors, 1, 1)
