"""Estimated time of a plan: what its launches do, counted in closed form, for `estimate_fast`.

The counts follow `hybridc/gpu_model/tir.py`, which takes a lowered function and tens of milliseconds; a
candidate takes some microseconds here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybridc.gpu_model.architecture import PARTITIONS, architecture
from hybridc.gpu_model.chip import CLOCK, chip_of
from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.machine import Processor
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, WARP
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.plan import Plan
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.cuda.tile.stage import Stage

_SECTOR = 32
_OWN_REGISTERS = 30
"""Of a thread for addresses and loops, beside what `_registers` counts: what nvcc takes for 8 x 8 tiles."""
_LEAST_LSU_CYCLES = 2
"""Of any access of a warp, as in `tir.py`."""
_ADDRESS_INSTRUCTIONS = 2
"""Of an access: nvcc keeps addresses that grow by a constant."""


@dataclass(frozen=True, slots=True)
class _Accesses:
    """Of a block to one slice."""

    count: float = 0.0
    """Instructions of warps."""
    lsu_cycles: float = 0.0
    sectors: float = 0.0

    def __add__(self, other: _Accesses) -> _Accesses:
        return _Accesses(
            self.count + other.count, self.lsu_cycles + other.lsu_cycles, self.sectors + other.sectors
        )


def estimated_us(plan: Plan, processor: Processor) -> float:
    """Microseconds of all launches of a plan, with the time between them."""
    us = estimate_fast(_as_sustained(_main_work(plan), processor), processor).us
    if plan.tile.parts > 1:
        added = estimate_fast(sum_work(plan.product.results, plan.tile.parts), processor)
        us += processor.next_launch_us + added.us
    return us


def _as_sustained(work: Work, processor: Processor) -> Work:
    """With what the closed form leaves out of the estimate from machine code, where it decides between tiles.

    Arithmetic takes the time of the partition of a multiprocessor that has most warps: of a block of five,
    one has two. Where little of shared memory is read beside it, the clock falls.
    """
    chip, warps = chip_of(processor), work.threads // WARP
    model = architecture(chip.architecture)
    resident = model.occupancy(work.registers, work.shared_bytes, work.threads)
    if not resident:
        return work
    full, rest = divmod(work.blocks, chip.multiprocessors * resident)
    last = -(-rest // chip.multiprocessors)
    # partitions even out among the blocks of a wave, of which the last has few
    busy = full * resident * _idle_share(resident * warps) + last * _idle_share(max(last, 1) * warps)
    share = busy / (full * resident + last)
    if warps > PARTITIONS:
        share = max(share, (1 + _idle_share(warps)) / 2)
    fp32 = share * work.fp32
    least_lsu = (1 / CLOCK.share(1.0, 1.0) - 1) * fp32 * WARP / (16 * model.fp32_pipes * PARTITIONS)
    return replace(
        work, fp32=fp32, instructions=share * work.instructions, lsu_cycles=max(work.lsu_cycles, least_lsu)
    )


def _idle_share(warps: int) -> float:
    """Warps that would be there if each partition had as many as the fullest, over those there are."""
    return -(-warps // PARTITIONS) * PARTITIONS / warps


def _main_work(plan: Plan) -> Work:
    tile, steps = plan.tile, plan.slices.steps
    warps, turns = tile.threads // WARP, tile.groups * plan.turns
    slice_accesses = _staging(plan.left) + _staging(plan.right) + _fragments(plan)
    # each group but the first gives its sums to the first
    exchanges = 2 * (tile.groups - 1) * tile.accumulators / WIDTH * warps
    fp32 = float(turns * steps * tile.accumulators * warps)
    results = tile.accumulators / WIDTH * warps
    return Work(
        blocks=plan.blocks,
        threads=tile.groups * tile.threads,
        registers=_registers(plan),
        shared_bytes=plan.shared_bytes,
        instructions=fp32 + exchanges + turns * (1 + _ADDRESS_INSTRUCTIONS) * slice_accesses.count,
        fp32=fp32,
        special=0.0,
        tensor_multiplies=0.0,
        lsu_cycles=turns * slice_accesses.lsu_cycles + (results + exchanges) * WIDTH,
        l2_sectors=turns * slice_accesses.sectors + results * WARP * WIDTH * 4 / _SECTOR,
        rounds=1.0 + plan.turns,
        memory_bytes=memory_bytes(plan.product, plan.tile.parts),
    )


def sum_work(results: int, parts: int) -> Work:
    """Of the launch that adds parts up: bound by what it reads."""
    blocks = -(-results // (WIDTH * BLOCK_THREADS))
    warps = BLOCK_THREADS // WARP
    accesses = (parts + 1) * warps
    return Work(
        blocks=blocks,
        threads=BLOCK_THREADS,
        registers=_OWN_REGISTERS + WIDTH * 4,
        shared_bytes=0,
        instructions=float((1 + _ADDRESS_INSTRUCTIONS + WIDTH) * accesses),
        fp32=float(WIDTH * parts * warps),
        special=0.0,
        tensor_multiplies=0.0,
        lsu_cycles=float(WIDTH * accesses),
        l2_sectors=accesses * WARP * WIDTH * 4 / _SECTOR,
        rounds=2.0,
        memory_bytes=4.0 * results * (parts + 1),
    )


def memory_bytes(product: Product, parts: int) -> float:
    """Of the main launch, between L2 and memory."""
    rows, columns, depth = product.rows.size, product.columns.size, product.depth.size
    # a window reads each element as often as it has taps, which counts once
    window = math.prod(product.depth.extents[1:]) if len(product.depth.axes) > 1 else 1
    results = rows * columns * (parts if parts > 1 else 1)
    return 4.0 * product.batch.size * (rows * depth + columns * depth / window + results)


def _staging(stage: Stage) -> _Accesses:
    """Reads of global memory, and stores into shared memory."""
    warps = stage.threads / WARP
    accesses = stage.turns * warps
    words = stage.side * stage.slices.steps
    if stage.wide:
        lines = WIDTH if not stage.along_depth else WARP // (stage.slices.steps // WIDTH)
        sectors = words * 4 / _SECTOR
    elif stage.along_depth:
        lines = -(-WARP // stage.slices.steps)
        sectors = stage.side * (1 + (stage.slices.steps - 1) * 4 / _SECTOR)
    else:
        lines, sectors = _LEAST_LSU_CYCLES, words * 4 / _SECTOR * 1.25
    reads = _Accesses(accesses, accesses * max(lines, _LEAST_LSU_CYCLES), sectors)
    stores = accesses * (stage.lanes if stage.along_depth else 1)
    cycles = WIDTH if stage.wide and not stage.along_depth else _LEAST_LSU_CYCLES
    return reads + _Accesses(stores, stores * cycles)


def fragment_cycles(tile: Tile) -> float:
    """Of the load/store unit, for what a warp reads of shared memory for a step's multiply-adds."""
    return (tile.down + tile.across) / WIDTH * _LEAST_LSU_CYCLES


def _fragments(plan: Plan) -> _Accesses:
    """Reads of shared memory for the multiply-adds."""
    warps = plan.slices.steps * plan.tile.threads / WARP
    return _Accesses(warps * (plan.tile.down + plan.tile.across) / WIDTH, warps * fragment_cycles(plan.tile))


def _registers(plan: Plan) -> int:
    tile = plan.tile
    kept = tile.accumulators + tile.down + tile.across + plan.left.registers + plan.right.registers
    return min(255, kept + _OWN_REGISTERS)
