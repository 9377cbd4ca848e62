"""How Winograd's convolutions along one axis are cut into tiles, blocks and tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridc.schedules.cpu.conv1d.plan import RUN_COST, SPARE_REGISTERS, TILE_COST, BlockPlan, is_one_line
from hybridc.schedules.cpu.conv1d.winograd.bilinear import Bilinear, Matrix, algorithms
from hybridc.schedules.cpu.conv2d.read import Convolution
from hybridc.schedules.cpu.core.sharing import task_slots
from hybridc.schedules.cpu.core.strided_copy import LARGEST_STRIDE
from hybridc.targets import Isa

_BLOCK_TILES = (1, 2, 3, 4)
_FEWEST_CHANNELS = 16
"""Sums of fewer products take less time than their transforms."""
_SHUFFLE_COST = 2.0
"""Time of a shuffle in vector multiply-adds: one begins in a cycle, and two of those."""
_REFILL_COST = 0.5
"""What a vector of the input costs more when it comes from the second-level cache."""
_MOST_TILES = 8
_MOST_PRODUCTS = 32
"""Transforms of more are long code, and their sums leave the first-level cache."""


@dataclass(frozen=True, slots=True)
class WinogradConv1dPlan(BlockPlan):
    """Of products: vectors of tiles of neighbouring outputs."""

    algorithm: Bilinear

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        tile = f"{self.rows}x{self.vectors} vectors"
        return f"{self.algorithm.name} {tile}, {self.tiles} tiles, {self.parts} parts"

    @property
    def lanes(self) -> int:
        """Tiles of outputs in a vector."""
        return self.isa.lanes()

    @property
    def places(self) -> int:
        """Tiles of outputs of a micro-kernel."""
        return self.vectors * self.lanes

    @property
    def tile_columns(self) -> int:
        """Output positions of a micro-kernel."""
        return self.places * self.algorithm.outputs

    @property
    def phases(self) -> int:
        """Remainders of a tile's step that it reads: as many copies of every `step`-th element."""
        return min(self.algorithm.step, self.algorithm.inputs)

    @property
    def line(self) -> int:
        """Elements of a phase that a block reads."""
        return self.tiles * self.places + (self.algorithm.inputs - 1) // self.algorithm.step

    @property
    def transformed_shape(self) -> tuple[int, int, int, int]:
        """Of a block's transformed input: micro-kernels, products, channels, places."""
        return self.tiles, self.algorithm.products, self.conv.group_inputs, self.places

    @property
    def transformed_bytes(self) -> int:
        """Of a task."""
        return 4 * self.tiles * self.algorithm.products * self.conv.group_inputs * self.places

    @property
    def step_cost(self) -> float:
        """Of a channel in a product: loads are half as dear as multiply-adds."""
        sums = self.rows * self.vectors
        loads = 0.5 * (self.rows + self.vectors)
        if 4 * self.conv.group_inputs * self.places > self.isa.l1_bytes // 2:
            loads += _REFILL_COST * self.vectors
        return max(sums, self.isa.sums_in_flight) * (1 + loads / sums)

    @property
    def waste(self) -> float:
        """Predicted time of all micro-kernels' steps, for the multiply-adds that direct sums need."""
        return self.row_blocks * self.all_tiles * self.algorithm.products * self.step_cost

    @property
    def cost(self) -> float:
        """Predicted time in vector multiply-adds of all threads together, idle ones counted."""
        algorithm, conv = self.algorithm, self.conv
        # products are stored and loaded, combined, put in order and stored
        back: float = 2 * algorithm.products + _entries(algorithm.to_outputs)
        back += algorithm.outputs * (1 + _SHUFFLE_COST * (algorithm.outputs - 1))
        steps = algorithm.products * (conv.group_inputs * self.step_cost + TILE_COST)
        tile = steps + self.rows * self.vectors * back
        # every element is put into its phase, then phases are combined
        there: float = algorithm.step * (1 + _SHUFFLE_COST * (algorithm.step - 1))
        there += _entries(algorithm.of_inputs) + 2 * algorithm.products
        tiles = self.part_blocks * self.tiles * self.all_tiles / (self.tiles * self.blocks)
        task = tiles * tile + conv.group_inputs * self.tiles * self.vectors * there
        task += RUN_COST * (self.part_blocks * self.rows + conv.group_inputs)
        return task_slots(self.tasks, self.threads) * task


def least_cost(conv: Convolution, isa: Isa, threads: int) -> float | None:
    """Predicted time of the best plan in vector multiply-adds of all threads together; None without one."""
    return min((plan.cost for plan in plans_of(conv, isa, threads)), default=None)


def plans_of(conv: Convolution, isa: Isa, threads: int) -> Iterator[WinogradConv1dPlan]:
    """Blocks and parts for the tiles of each algorithm that waste least."""
    axis = conv.width
    if not is_one_line(conv) or axis.taps < 2 or conv.group_inputs < _FEWEST_CHANNELS:
        return
    for algorithm in algorithms(axis.taps, axis.stride, axis.dilation):
        if algorithm.step > LARGEST_STRIDE or algorithm.products > _MOST_PRODUCTS:
            continue
        found = sorted(_tiles(conv, algorithm, isa, threads), key=lambda tile: tile.waste)[:_MOST_TILES]
        for tile in found:
            for tiles, parts in itertools.product(_BLOCK_TILES, {1, 2, 4, tile.row_blocks}):
                plan = replace(tile, tiles=tiles, parts=parts)
                # what is left of the second-level cache is for weights, outputs and another thread
                fits = plan.transformed_bytes <= isa.l2_bytes // 2 or tiles == 1
                if tile.row_blocks % parts == 0 and fits and tiles <= plan.all_tiles:
                    yield plan


def _tiles(conv: Convolution, algorithm: Bilinear, isa: Isa, threads: int) -> Iterator[WinogradConv1dPlan]:
    """Sums and one vector of the input for each column fit into registers."""
    registers = isa.vector_registers - SPARE_REGISTERS[isa.vector_registers]
    for rows in range(1, min(conv.group_outputs, 16) + 1):
        whole = conv.groups == 1 or conv.group_outputs % rows == 0
        for vectors in range(1, 5):
            if whole and rows * vectors + vectors <= registers:
                yield WinogradConv1dPlan(conv, isa, threads, rows, vectors, 1, 1, algorithm)


def _entries(matrix: Matrix) -> int:
    """Multiplications and additions of a vector by it."""
    return sum(1 for row in matrix for value in row if value)
