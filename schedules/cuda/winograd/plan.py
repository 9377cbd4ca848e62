"""The tile of a block of threads, and how long a launch of such blocks should take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.cost import sum_work
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.cuda.winograd.read import TAPS, Convolution

OUTPUTS = 2
"""Of a tile of the image, along each axis."""
SIDE = OUTPUTS + TAPS - 1
POINTS = SIDE * SIDE
"""At which both factors are evaluated: so many products replace 36."""
POINTS_OF_THREAD = 2
CHANNELS = 8
"""Of a slice: the largest tile then takes all of the 48 KiB of shared memory."""
PLANES = (Tile(64, 32, 8, 8), Tile(32, 32, 8, 4))
"""Output channels by tiles of the image, at each point: the first has 128 sums in a thread's registers, and a
block of it has a multiprocessor for itself; of the second there are two."""
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LEAST_SLICES = 4
"""Of a part: the pipeline of fewer is mostly its beginning and its end."""
PITCH = WIDTH
"""Words between rows of products that threads exchange: eight threads' vectors then lie in different
banks."""
_OWN_REGISTERS = 45
"""Of a thread for addresses, conditions and loops."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a convolution is computed."""

    conv: Convolution
    plane: Tile
    """Of one point."""
    parts: int = 1
    """Blocks that share the channels of a tile."""

    @property
    def threads(self) -> int:
        return self.plane.threads * POINTS // POINTS_OF_THREAD

    @property
    def down(self) -> int:
        """Tiles of the image down."""
        return ceil_div(self.conv.height, OUTPUTS)

    @property
    def across(self) -> int:
        return ceil_div(self.conv.width, OUTPUTS)

    @property
    def tiles(self) -> int:
        """Of all images."""
        return self.conv.images * self.down * self.across

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along the output channels, and along the tiles."""
        return ceil_div(self.conv.outputs, self.plane.rows), ceil_div(self.tiles, self.plane.columns)

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.parts

    @property
    def turns(self) -> int:
        """Slices of a part."""
        return ceil_div(self.conv.channels, CHANNELS * self.parts)

    @property
    def patches(self) -> int:
        """Patches of the images that a thread transforms of a slice."""
        return self.plane.columns * CHANNELS // self.threads

    @property
    def filters(self) -> int:
        """Neighbouring output channels whose taps a thread transforms of a slice."""
        return self.plane.rows * CHANNELS // self.threads

    @property
    def round_rows(self) -> int:
        """Output channels whose products threads exchange at a time."""
        return self.plane.rows * WIDTH // self.plane.down

    @property
    def round_columns(self) -> int:
        """Tiles of the image of which they do."""
        return self.plane.columns * WIDTH // self.plane.across

    @property
    def shared_floats(self) -> int:
        """First of both factors of a slice, at last of products."""
        slices = POINTS * CHANNELS * (self.plane.rows + self.plane.columns)
        return max(slices, POINTS * self.round_rows * (self.round_columns + PITCH))


def choose(conv: Convolution, processor: Processor) -> Plan:
    """The plan with the least estimated time on a GPU."""
    return min(_candidates(conv), key=lambda plan: estimated_us(plan, processor))


def _candidates(conv: Convolution) -> Iterator[Plan]:
    for plane in PLANES:
        for parts in PARTS:
            plan = Plan(conv, plane, parts)
            if parts == 1 or plan.turns >= LEAST_SLICES:
                yield plan


def estimated_us(plan: Plan, processor: Processor) -> float:
    """Microseconds of all launches of a plan, with the time between them."""
    us = estimate_fast(_work(plan), processor).us
    if plan.parts > 1:
        added = estimate_fast(sum_work(plan.conv.product.results, plan.parts), processor)
        us += processor.next_launch_us + added.us
    return us


def _work(plan: Plan) -> Work:
    conv, plane, warps = plan.conv, plan.plane, plan.threads // WARP
    multiplies = CHANNELS * POINTS_OF_THREAD * plane.accumulators
    # additions of both transforms: 32 of a patch, 28 of a filter
    adds = 32 * plan.patches + 28 * plan.filters
    fragments = CHANNELS * POINTS_OF_THREAD * (plane.down + plane.across) / WIDTH
    patch_reads, filter_reads = POINTS * plan.patches, TAPS * TAPS
    stores = POINTS * (plan.patches + 1)
    accesses = fragments + patch_reads + filter_reads + stores
    # neighbouring patches are two columns apart: a warp's elements lie in three lines
    lsu = 2 * fragments + 3 * patch_reads + 2 * filter_reads + 2 * stores
    results = POINTS_OF_THREAD * plane.accumulators / POINTS * OUTPUTS * OUTPUTS
    exchanged = 2 * POINTS_OF_THREAD * plane.accumulators
    per_slice = multiplies + adds + 1.5 * accesses
    # each row of patches of a warp is 64 columns and two more
    sectors = CHANNELS * (plane.columns * SIDE * 2.5 + plane.rows * TAPS * TAPS) * 4 / 32
    outputs = conv.images * conv.outputs * conv.height * conv.width
    inputs = conv.images * conv.channels * (conv.height + 2) * (conv.width + 2)
    return Work(
        blocks=plan.blocks,
        threads=plan.threads,
        registers=min(255, POINTS_OF_THREAD * plane.accumulators + plane.down + plane.across
                      + POINTS * plan.patches + TAPS * TAPS * plan.filters + _OWN_REGISTERS),
        shared_bytes=4 * plan.shared_floats,
        instructions=warps * (plan.turns * per_slice + 2 * exchanged),
        fp32=float(warps * plan.turns * (multiplies + adds)),
        special=0.0,
        tensor_multiplies=0.0,
        lsu_cycles=warps * (plan.turns * lsu + 2 * exchanged),
        l2_sectors=plan.turns * sectors + warps * results * WARP * 4 / 32,
        rounds=1.0 + plan.turns,
        memory_bytes=4.0 * (inputs + conv.outputs * conv.channels * TAPS * TAPS + plan.parts * outputs),
    )  # fmt: skip
