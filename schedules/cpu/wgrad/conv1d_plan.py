"""How direct weight gradients along one axis are cut into tiles, blocks and tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.sharing import at_least_one_each, task_slots
from hybridc.schedules.cpu.wgrad.read import Slide, WeightGradient
from hybridc.targets import Isa

_BLOCK_VECTORS = (8, 16, 24, 32, 48, 64, 96, 128)
_SPLITS = 16
"""Into which the blocks are cut if there are enough, unless there are more threads."""
_SUM_BYTES = 512 << 10
"""Sums of a split, on average: half of what a core's second-level cache has."""
_SPARE_REGISTERS = 3
_TILE_COST = 16.0
"""What a tile takes beside its multiply-adds and the sums of lanes, in vector multiply-adds."""
_LANE_SUM_COST = 4.0
"""What a sum's lanes take."""
_FAR_COST = 1.15
"""Times longer, where a tile's rows do not stay in the first-level cache."""
_MOST_TILES = 12


@dataclass(frozen=True, slots=True)
class CorrelationOperand:
    """Data or gradient `[N, C, X]` without padding; `channels` of each group."""

    buffer: ir.Var
    channels: int

    @property
    def length(self) -> int:
        """Positions of the signal, without padding."""
        return int(self.buffer.shape[-1])


@dataclass(frozen=True, slots=True)
class Correlation:
    """A weight gradient: rows[m, y] meets shifted[c, y * stride + k * dilation - before]."""

    wgrad: WeightGradient
    rows: CorrelationOperand
    shifted: CorrelationOperand
    slide: Slide
    exchanged: bool
    """Whether rows are of the data; taps are reversed then."""

    def store(self, m: ir.Expr, c: ir.Expr, k: ir.Expr, group: ir.Expr, value: ir.Expr) -> tirx.BufferStore:
        """Write the sum of row m and channel c at tap k, in the order that the weights have."""
        if self.exchanged:
            m, c, k = c, m, integer(self.slide.taps - 1) - k
        outputs = self.wgrad.outputs // self.wgrad.groups
        return self.wgrad.store(group * integer(outputs) + m, c, k, integer(0), value)


@dataclass(frozen=True, slots=True)
class Conv1dWgradPlan:
    """A tile of `rows` x `taps` sums; a block has `vectors` vectors of positions."""

    of: Correlation
    isa: Isa
    threads: int
    rows: int
    taps: int
    vectors: int
    parts: int
    """Ranges of rows that are tasks of their own."""

    @property
    def label(self) -> str:
        """What tells this plan from the others of a function, for a measured search."""
        side = "data" if self.of.exchanged else "gradient"
        tile = f"{self.rows} of {side} x {self.taps} taps"
        return f"{tile}, blocks of {self.vectors} vectors, {self.parts} parts"

    @property
    def lanes(self) -> int:
        """Positions of a vector."""
        return self.isa.lanes()

    @property
    def columns(self) -> int:
        """Positions of a block."""
        return self.vectors * self.lanes

    @property
    def row_blocks(self) -> int:
        """Tiles that cover the rows of a group."""
        return ceil_div(self.of.rows.channels, self.rows)

    @property
    def tap_blocks(self) -> int:
        """Tiles that cover the taps."""
        return ceil_div(self.of.slide.taps, self.taps)

    @property
    def blocks(self) -> int:
        """Of all images."""
        return self.of.wgrad.batches * ceil_div(self.of.slide.positions, self.columns)

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of one split: the sums of a tile one behind the other, filled up to whole vectors."""
        groups, sums = self.of.wgrad.groups, ceil_div(self.rows * self.taps, self.lanes) * self.lanes
        return groups, self.row_blocks, self.of.shifted.channels, self.tap_blocks, sums

    @property
    def tiles(self) -> int:
        """Of a block and a part."""
        return self.row_blocks // self.parts * self.of.shifted.channels * self.tap_blocks

    @property
    def splits(self) -> int:
        """Ranges of blocks that have sums of their own; each is a task, or several."""
        size = 4 * math.prod(self.sums_shape)
        most = at_least_one_each(_SPLITS, self.threads)
        return max(min(most, self.blocks, most * _SUM_BYTES // size), 1)

    @property
    def reach(self) -> int:
        """Columns of a phase that taps read behind a block's own; taps that fill up the last tile, too."""
        return (self.tap_blocks * self.taps - 1) * self.of.slide.dilation // self.of.slide.stride

    @property
    def phases(self) -> int:
        """Remainders of the stride that taps read: as many copies of every `stride`-th position."""
        slide = self.of.slide
        return 1 + max(k * slide.dilation % slide.stride for k in range(self.tap_blocks * self.taps))

    @property
    def copy_bytes(self) -> int:
        """Of what a task copies of a block."""
        shifted = self.of.shifted.channels * self.phases * (self.columns + self.reach)
        return 4 * (shifted + self.row_blocks // self.parts * self.rows * self.columns)

    @property
    def step_cost(self) -> float:
        """Of one vector of positions of a tile: loads are half as dear as multiply-adds."""
        sums = self.rows * self.taps
        # fewer sums than multiply-adds in flight wait for their own results
        return max(sums, self.isa.sums_in_flight) * (1 + 0.5 * (self.rows + self.taps) / sums)

    @property
    def waste(self) -> float:
        """Predicted time of all tiles' steps over that of the multiply-adds."""
        needed = self.of.rows.channels * self.of.slide.taps
        return self.row_blocks * self.tap_blocks * self.step_cost / needed

    @property
    def cost(self) -> float:
        """Predicted time in vector multiply-adds of all threads together, idle ones counted."""
        sums = self.rows * self.taps
        # 4 bytes each: rows and the shifted operand of a tile, in the first-level cache
        near = 4 * (self.rows * self.columns + self.columns + self.reach) <= self.isa.l1_bytes
        tile = (
            self.vectors * self.step_cost * (1.0 if near else _FAR_COST) + _LANE_SUM_COST * sums + _TILE_COST
        )
        block = self.tiles * tile + self.copy_bytes / (2 * self.lanes)
        tasks, groups = self.splits * self.parts * self.of.wgrad.groups, self.of.wgrad.groups
        share = self.blocks / self.splits * block
        # sums of all splits are read back a vector at a time, and written one by one
        total = 2 * sums * self.tiles * self.parts * groups * (1 + self.splits / self.lanes)
        return task_slots(tasks, self.threads) * share + total


def direct_cost(wgrad: WeightGradient, isa: Isa, threads: int) -> float:
    """Predicted time of the rule's best plan in vector multiply-adds of all threads together."""
    return min(plan.cost for plan in plans_of(wgrad, isa, threads))


def plans_of(wgrad: WeightGradient, isa: Isa, threads: int) -> Iterator[Conv1dWgradPlan]:
    """Blocks and parts for the tiles that waste least."""
    tiles = [tile for of in _correlations(wgrad) for tile in _tiles(of, isa, threads)]
    for tile in sorted(tiles, key=lambda tile: tile.waste)[:_MOST_TILES]:
        for vectors, parts in itertools.product(_BLOCK_VECTORS, {1, 2, 4, tile.row_blocks}):
            plan = replace(tile, vectors=vectors, parts=parts)
            # the other half of the second-level cache is for sums and what is prefetched
            fits = plan.copy_bytes <= isa.l2_bytes // 2 or vectors == _BLOCK_VECTORS[0]
            if fits and tile.row_blocks % parts == 0:
                yield plan


def _tiles(of: Correlation, isa: Isa, threads: int) -> Iterator[Conv1dWgradPlan]:
    """Sums and one row's operands beside them fit into registers."""
    for rows in range(1, min(of.rows.channels, 16) + 1):
        for taps in range(1, min(of.slide.taps, 16) + 1):
            if rows * taps + taps + _SPARE_REGISTERS <= isa.vector_registers:
                yield Conv1dWgradPlan(of, isa, threads, rows, taps, 1, 1)


def _correlations(wgrad: WeightGradient) -> Iterator[Correlation]:
    slide = wgrad.height
    data = CorrelationOperand(wgrad.data, wgrad.inputs)
    gradient = CorrelationOperand(wgrad.gradient, wgrad.outputs // wgrad.groups)
    yield Correlation(wgrad, gradient, data, slide, False)
    if slide.stride == 1:
        before = (slide.taps - 1) * slide.dilation - slide.before
        turned = replace(slide, positions=data.length, before=before, inputs=gradient.length)
        yield Correlation(wgrad, data, gradient, turned, True)
