"""Estimated time of a product on tensor cores: what its launches do, counted in closed form.

The counts follow `hybridc/gpu_model/tir.py`, as those of `cuda/tile/cost.py` do.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial

from hybridc.gpu_model.architecture import PARTITIONS, architecture
from hybridc.gpu_model.chip import (
    L2_BYTES_PER_CYCLE,
    MEMORY_CYCLES,
    bandwidth_us,
    chip_of,
    tensor_rates,
)
from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.gpu_model.memory import LINE, SECTOR
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES, WARP
from hybridc.schedules.cuda.tensor_core.gathered import WORD, Gathered
from hybridc.schedules.cuda.tensor_core.instructions import INT8, TF32
from hybridc.schedules.cuda.tensor_core.operands import operand
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct
from hybridc.schedules.cuda.tensor_core.staging import Operand
from hybridc.schedules.cuda.tensor_core.tile import Way, ways
from hybridc.schedules.cuda.tile.cost import sum_work

_OWN_REGISTERS = 32
"""Of a thread, beside what it keeps of arrays, as in `tir.py`."""
_ACCESS_INSTRUCTIONS = 3
"""Of an access, with the arithmetic of its address, as in `tir.py`."""
_TRANSPOSITION = 8
"""Instructions that transpose 4x4 bytes."""
_FLOAT_WEIGHTS = {TF32: 2.0, INT8: 0.0}
"""Of multiply-adds that do not take the time of 16-bit floats."""
_LEAST_LSU_CYCLES = 2
_WORD = 4
_COPIES_PAY = 0.9
"""Of the estimated time without asynchronous copies, below which they are taken. What they gain surely is the
waits of few blocks; of the instructions that they save, which is a tenth at most, estimates from machine code
see nothing on large grids, and up to 7 % lost."""
_INTEGER_COPIES_PAY = 1.0
"""The same of integers: without copies a thread of the largest tiles has barely enough registers."""
_OVERLAPPED = 0.5
"""Of the second of the units that a way keeps busy longest, the share of the time that adds to the first's,
where many blocks take turns."""
_SECOND_LAUNCH_US = 3.5
"""What adding parts up takes beside the work of the launch that does it.

By these two, the ways that are chosen of 313 for 22 products of BERT, ViT, ResNet-50 and others take 4 %
longer on an RTX 3090 than the fastest of each, by the model from machine code; by `estimate_fast`, which has
nothing overlap and launches cost less, 9 %."""
STAGES = (2, 3, 4)
"""Of asynchronous copies: with more, what is left of a wait is less than what shared memory keeps out."""


def fastest_way(product: MatrixProduct, processor: Processor, *, copies: bool = False) -> tuple[Way, float]:
    """The way with the least estimated time, and this time: microseconds of all its launches. `copies` are
    whether the GPU has asynchronous ones."""
    sides = _Sides(product)
    us = partial(_way_us, product, sides, processor)
    plain = ways(product.slices)
    times = {way: us(way) for way in plain}
    best = min(times, key=lambda way: times[way])
    staged = [w for way in plain if copies for w in _staged_ways(product, way, sides)]
    times |= {way: us(way) for way in staged}
    fastest = min(staged, key=lambda way: times[way], default=best)
    pay = _INTEGER_COPIES_PAY if product.dtype == INT8 else _COPIES_PAY
    chosen = fastest if times[fastest] < pay * times[best] else best
    return chosen, times[chosen]


def overlapping_way(product: MatrixProduct, processor: Processor) -> Way:
    """The way without asynchronous copies that should take a product of 16-bit floats the least time on a GPU
    whose tensor cores are slow enough for other units to keep up with them."""
    sides = _Sides(product)

    def us(way: Way) -> float:
        work = main_work(product, way, *sides.of(way))
        added_us = _SECOND_LAUNCH_US + _added_us(product, way, processor) if way.parts > 1 else 0.0
        return _overlapping_us(work, processor) + added_us

    return min(ways(product.slices), key=us)


def _overlapping_us(work: Work, processor: Processor) -> float:
    """Estimated time of a launch whose blocks multiply while others load."""
    chip = chip_of(processor)
    model = architecture(chip.architecture)
    resident = model.occupancy(work.registers, work.shared_bytes, work.threads)
    if not resident:
        return math.inf
    units = (
        work.tensor_multiplies / (tensor_rates(chip).floats * PARTITIONS),
        work.lsu_cycles,
        work.instructions / PARTITIONS,
        work.l2_sectors * SECTOR / L2_BYTES_PER_CYCLE,
    )
    longest, second = sorted(units, reverse=True)[:2]
    busy = longest + _OVERLAPPED * second
    full, rest = divmod(work.blocks, chip.multiprocessors * resident)
    waves = ((full, resident), (1 if rest else 0, ceil_div(rest, chip.multiprocessors)))
    cycles = sum(count * max(blocks * busy, work.rounds * MEMORY_CYCLES + busy) for count, blocks in waves)
    return max(cycles / chip.clock_ghz / 1e3, bandwidth_us(work.memory_bytes, processor))


def estimated_us(product: MatrixProduct, way: Way, processor: Processor) -> float:
    """Estimated microseconds of all launches of a way."""
    return _way_us(product, _Sides(product), processor, way)


def _way_us(product: MatrixProduct, sides: _Sides, processor: Processor, way: Way) -> float:
    main = estimate_fast(main_work(product, way, *sides.of(way)), processor)
    return main.us + _added_us(product, way, processor)


def _added_us(product: MatrixProduct, way: Way, processor: Processor) -> float:
    """Of the launch that adds parts up."""
    if way.parts == 1:
        return 0.0
    return processor.next_launch_us + estimate_fast(sum_work(product.results, way.parts), processor).us


def _staged_ways(product: MatrixProduct, way: Way, sides: _Sides) -> list[Way]:
    """The way with asynchronous copies of all numbers of stages that there is room for, if both operands can
    be copied."""
    if not all(side.can_be_copied for side in sides.of(way)):
        return []
    found = [replace(way, stages=stages) for stages in STAGES]
    return [w for w in found if shared_bytes(product, w) <= MAX_SHARED_BYTES]


class _Sides:
    """How both operands get to registers, by the size of a tile."""

    def __init__(self, product: MatrixProduct) -> None:
        batch = product.batch.at(integer(0))
        self._side = lru_cache(maxsize=None)(  # ways share tiles, and tiles sizes
            lambda name, extent, threads: operand(product, name, batch, extent, threads)
        )

    def of(self, way: Way) -> tuple[Operand, Operand]:
        tile = way.tile
        return self._side("left", tile.rows, tile.threads), self._side("right", tile.columns, tile.threads)


def main_work(product: MatrixProduct, way: Way, left: Operand, right: Operand) -> Work:
    """Of the launch of the tiles."""
    tile, turns = way.tile, product.slices // way.parts
    warps = tile.threads // WARP
    down, across = tile.counts(product.row.extent, product.column.extent)
    copies = [way.stages > 0 and side.can_be_copied for side in (left, right)]
    instructions, lsu, sectors = (0.0, 0.0, 0.0)
    for side, copied, matrices in zip(
        (left, right), copies, (tile.warp_rows // 8, tile.warp_columns // 8), strict=True
    ):
        for count, cycles in (*_staged(side, copied), _fragments(side, matrices)):
            instructions += _ACCESS_INSTRUCTIONS * count * warps
            lsu += count * cycles * warps
        if product.dtype == TF32:
            instructions += side.pieces * side.width * warps  # they are rounded
        if isinstance(side, Gathered) and side.width == WORD:
            instructions += _TRANSPOSITION * side.pieces * side.lines / WORD * warps
        sectors += side.elements * side.memory_bytes / SECTOR
    multiplies = tile.rows * tile.columns * product.steps
    depth_of_one = 2 * left.chunk
    instructions += multiplies / (16 * 8 * depth_of_one)
    results = tile.rows * tile.columns / (2 * WARP)
    kept = 2 * results * WARP / tile.threads + tile.warp_rows / 4 + tile.warp_columns / 4
    loaded = sum(
        side.elements // tile.threads * (_WORD if side.joins else side.item_bytes) // _WORD
        for side, copied in zip((left, right), copies, strict=True)
        if not copied
    )
    # slices whose copies wait at the same time
    ahead = way.stages - 1 if all(copies) else 1
    return Work(
        blocks=down * across * product.batch.extent * way.parts,
        threads=tile.threads,
        registers=min(255, round(_OWN_REGISTERS + 1.5 * (kept + loaded))),
        shared_bytes=shared_bytes(product, way),
        instructions=turns * instructions + _ACCESS_INSTRUCTIONS * results,
        fp32=0.0,
        special=0.0,
        # data sheets give tf32 half the rate of fp16
        tensor_multiplies=turns * multiplies * _FLOAT_WEIGHTS.get(product.dtype, 1.0),
        lsu_cycles=turns * lsu + 8 * results,
        l2_sectors=turns * sectors + tile.rows * tile.columns * _WORD / SECTOR,
        rounds=1.0 + turns / ahead,
        memory_bytes=_memory_bytes(product, way),
        integer_multiplies=turns * multiplies if product.dtype == INT8 else 0.0,
    )


def _staged(side: Operand, copied: bool) -> tuple[tuple[float, float], ...]:
    """Accesses of a warp to a slice, and cycles of each: loads from global memory, and stores to shared; or
    copies, which cost what both do but are one instruction."""
    if isinstance(side, Gathered):
        # a sector of each line, or of one
        lines = WARP * side.width / SECTOR
        loads = side.pieces * side.lines, max(_LEAST_LSU_CYCLES, lines)
        return loads, (side.pieces * side.width, max(_LEAST_LSU_CYCLES, side.lines * side.item_bytes / _WORD))
    width_bytes = side.width * side.memory_bytes
    lines = WARP * side.width / side.line if side.along_depth else WARP * width_bytes / LINE
    wide = max(_LEAST_LSU_CYCLES, width_bytes / _WORD)
    if copied:
        return ((side.pieces, max(wide, lines) + wide),)
    stored = max(_LEAST_LSU_CYCLES, side.width * side.item_bytes / _WORD)
    return (side.pieces, max(wide, lines)), (side.pieces, stored)


def shared_bytes(product: MatrixProduct, way: Way) -> int:
    """Of a block: the slices that it holds at once."""
    return (way.stages or 2) * (way.tile.rows + way.tile.columns) * product.steps * product.item_bytes


def _fragments(side: Operand, matrices: int) -> tuple[float, float]:
    """Accesses of a warp to shared memory for a slice: so many matrices of eight rows, of each chunk."""
    count = matrices * side.step / side.chunk
    # four at a time, a cycle each, or each by itself
    return (count / 4, 4) if side.loads_matrices else (count, _LEAST_LSU_CYCLES)


def _memory_bytes(product: MatrixProduct, way: Way) -> float:
    rows, columns, depth = product.row.extent, product.column.extent, product.depth.extent
    # a window reads each element as often as it has taps, which counts once
    window = depth / product.channels
    left_bytes, right_bytes = (product.memory_bytes(factor) for factor in (product.left, product.right))
    operands = left_bytes * rows * depth + right_bytes * columns * depth / window
    results = (_WORD * way.parts if way.parts > 1 else product.result_bytes) * rows * columns
    return float(product.batch.extent * (operands + results))
