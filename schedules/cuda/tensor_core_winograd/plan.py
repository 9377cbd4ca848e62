"""How a convolution of 16-bit floats is divided among blocks of threads, and how long that should take."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tile.cost import sum_work
from hybridc.schedules.cuda.winograd.plan import OUTPUTS, POINTS
from hybridc.schedules.cuda.winograd.read import TAPS, Convolution
from hybridc.schedules.packing import Packing
from hybridc.schedules.shapes import index_shape

FRAGMENT = 16
"""Rows, and depth, of a matrix instruction."""
CHANNELS = FRAGMENT
"""Of a slice."""
ROWS, COLUMNS = 64, 32
"""Output channels and tiles of the image of a block. A warp has 16 of both: 128 sums a lane at all points."""
PAIRS = COLUMNS // 2
"""Tiles are taken in pairs, side by side: two results of a lane, and one word of two numbers."""
WARPS_ACROSS = 2
THREADS = ROWS // FRAGMENT * WARPS_ACROSS * WARP
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LEAST_SLICES = 2
"""Of a part."""
_REGISTERS = 240
"""Of a thread."""
_INSTRUCTIONS = 420
"""Of a warp for a slice, as nvcc makes them."""


@dataclass(frozen=True, slots=True)
class TensorCorePlan:
    """How a convolution is computed."""

    conv: Convolution
    parts: int = 1
    """Blocks that share the channels of a tile; they divide its slices evenly."""

    @property
    def down(self) -> int:
        """Pairs of tiles down an image."""
        return ceil_div(self.conv.height, OUTPUTS)

    @property
    def across(self) -> int:
        return ceil_div(self.conv.width, 2 * OUTPUTS)

    @property
    def pairs(self) -> int:
        """Of all images."""
        return self.conv.images * self.down * self.across

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along the output channels, and along the pairs."""
        return ceil_div(self.conv.outputs, ROWS), ceil_div(self.pairs, PAIRS)

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.parts

    @property
    def turns(self) -> int:
        """Slices of a part."""
        return self.conv.channels // (CHANNELS * self.parts)

    @property
    def packing(self) -> Packing:
        """Weights as fragments: of 16 output channels, 16 channels and each tap 32 lanes' four registers of
        two neighbouring channels."""
        conv = self.conv
        shape = (conv.outputs, conv.channels, TAPS, TAPS)
        # rows are half, number; depths half, pair, side
        split = (conv.outputs // FRAGMENT, 2, 8, conv.channels // FRAGMENT, 2, 4, 2, TAPS, TAPS)
        return Packing(shape, split, (0, 3, 7, 8, 2, 5, 4, 1, 6), vnni_dtype="float16")

    def packed_weights(self) -> ir.Var:
        """The parameter in place of the weights."""
        shape = index_shape(self.packing.packed_shape)
        return tirx.decl_buffer(shape, "int32", "weights_packed", layout=None)


def can_be_planned(conv: Convolution) -> bool:
    """Whether fragments have no tails, so that packed weights take no more bytes."""
    return conv.outputs % FRAGMENT == 0 and conv.channels % FRAGMENT == 0


def choose(conv: Convolution, processor: Processor) -> TensorCorePlan:
    """The plan with the least estimated time on a GPU."""
    slices = conv.channels // CHANNELS
    parts = [p for p in PARTS if p == 1 or (slices % p == 0 and slices // p >= LEAST_SLICES)]
    return min((TensorCorePlan(conv, p) for p in parts), key=lambda plan: estimated_us(plan, processor))


def estimated_us(plan: TensorCorePlan, processor: Processor) -> float:
    """Microseconds of all launches of a plan, with the time between them."""
    us = estimate_fast(work(plan), processor).us
    if plan.parts > 1:
        added = estimate_fast(sum_work(plan.conv.product.results, plan.parts), processor)
        us += processor.next_launch_us + added.us
    return us


def work(plan: TensorCorePlan) -> Work:
    """Of the main launch."""
    conv, warps, taps = plan.conv, THREADS // WARP, TAPS * TAPS
    patch = 4 * 6
    # of fragments of taps, of matrices, of patches, of which a load has four elements, and of their points
    lsu = 4 * taps + 4 * POINTS + 1.25 * patch + 2 * POINTS
    results = ROWS * COLUMNS * OUTPUTS * OUTPUTS
    sectors = (ROWS * CHANNELS * taps * 2 + CHANNELS * PAIRS * patch * 2) / 32
    inputs = conv.images * conv.channels * (conv.height + 2) * (conv.width + 2)
    outputs = conv.images * conv.outputs * conv.height * conv.width
    result_bytes = 4 * plan.parts if plan.parts > 1 else 2
    return Work(
        blocks=plan.blocks,
        threads=THREADS,
        registers=_REGISTERS,
        shared_bytes=2 * POINTS * CHANNELS * COLUMNS * 2,
        instructions=float(warps * plan.turns * _INSTRUCTIONS),
        fp32=0.0,
        special=0.0,
        tensor_multiplies=float(plan.turns * POINTS * ROWS * COLUMNS * CHANNELS),
        lsu_cycles=float(warps * plan.turns * lsu + results / WARP),
        l2_sectors=plan.turns * sectors + results * 2 / 32,
        rounds=1.0 + plan.turns,
        memory_bytes=float(2 * (inputs + conv.outputs * conv.channels * taps) + result_bytes * outputs),
    )
