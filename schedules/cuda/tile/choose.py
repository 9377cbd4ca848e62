"""The tile of a product, and over how many blocks its depth is split: what is estimated to be fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hybridc.gpu_model.architecture import architecture
from hybridc.gpu_model.chip import MEMORY_CYCLES, bandwidth_us, chip_of
from hybridc.gpu_model.fast import estimate_fast
from hybridc.machine import Processor
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES, WARP
from hybridc.schedules.cuda.tile.cost import estimated_us, fragment_cycles, memory_bytes, sum_work
from hybridc.schedules.cuda.tile.group import STEPS, Slices, slices_of
from hybridc.schedules.cuda.tile.plan import Plan, plan_of, tiles_of, with_tile
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.shape import Tile

SIDES = (4, 8, 16, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Of tiles: powers of two, and those between that leave less of a tile empty at the sizes that networks
have, such as 49, 196 and 197 positions."""
THREADS = (64, 256)
"""Fewest and most of a group. With more, nvcc has too few registers for 8 x 8 results of a thread and what is
on its way."""
MOST_SPREAD = 8
"""Of the sides of a tile: a longer one loads more for each multiply-add than a smaller square would."""
NARROW = 8
"""A side of which a product may have no more, as of the output channels of a group: any other may be long."""


def _tiles() -> tuple[Tile, ...]:
    """From 8 x 8 results a thread, 16 multiply-adds for each read of shared memory, to what small results
    need to be spread over many threads. Of equal estimates the first is taken: square ones first."""
    found = [
        Tile(rows, columns, down, across)
        for down, across in ((8, 8), (8, 4), (4, 8), (4, 4))
        for rows in SIDES
        for columns in SIDES
        if rows % down == columns % across == 0 and _is_compact(rows, columns)
    ]
    fitting = [t for t in found if t.threads % WARP == 0 and THREADS[0] <= t.threads <= THREADS[1]]
    return tuple(sorted(fitting, key=lambda t: (-t.accumulators, abs(t.rows - t.columns), -t.rows)))


def _is_compact(rows: int, columns: int) -> bool:
    shorter, longer = sorted((rows, columns))
    return shorter <= NARROW or longer <= MOST_SPREAD * shorter


TILES = _tiles()
GROUPS = (1, 2, 4, 8)
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
MOST_UNROLLED = 640
"""Multiply-adds of a thread in a slice of more steps: the nearest cache of instructions, of 16 bytes each,
has 12 KiB (Jia et al., arXiv 1804.06826)."""
MOST_STAGED = 24
"""Registers of a thread for what is on its way to shared memory, in a slice of more steps: of 36 beside 32
results and their fragments ptxas keeps some in local memory on sm_75."""
LEAST_SLICES = 4
"""Of a group: the pipeline of fewer is mostly its beginning and its end."""


def choose(product: Product, processor: Processor) -> Plan:
    """The plan with the least estimated time on a GPU."""
    depths = tuple(dict.fromkeys(slices_of(product.depth, steps) for steps in STEPS))
    firsts = [plan_of(product, TILES[0], slices) for slices in depths]
    clock_ghz = chip_of(processor).clock_ghz
    of_parts = {parts: _times_of_parts(product, parts, processor) for parts in PARTS}
    chosen, least = firsts[0], math.inf
    for bound, number, turns, tile, groups, parts in _candidates(product, depths, processor):
        if bound >= least:
            break
        # in the same operations as the estimate, which rounding then keeps from being less
        memory_us, added_us = of_parts[parts]
        latency_us = (1.0 + turns) * MEMORY_CYCLES / clock_ghz / 1e3
        if max(memory_us, latency_us) + added_us >= least:
            continue
        plan = with_tile(firsts[number], replace(tile, groups=groups, parts=parts))
        if plan.shared_bytes <= MAX_SHARED_BYTES and (us := estimated_us(plan, processor)) < least:
            chosen, least = plan, us
    return chosen


def _times_of_parts(product: Product, parts: int, processor: Processor) -> tuple[float, float]:
    """Microseconds that memory takes, and those of adding the parts up."""
    added_us = 0.0
    if parts > 1:
        added_us = processor.next_launch_us + estimate_fast(sum_work(product.results, parts), processor).us
    return bandwidth_us(memory_bytes(product, parts), processor), added_us


def _candidates(
    product: Product, depths: Sequence[Slices], processor: Processor
) -> list[tuple[float, int, int, Tile, int, int]]:
    """Microseconds that the multiply-adds and fragments of a tile take at least by `estimated_us`, the least
    first; which of the `depths` is the tile's, and how many slices a group has; the tile, its groups and its
    parts."""
    chip = chip_of(processor)
    pipes = architecture(chip.architecture).fp32_pipes
    cycle_us = 1e-3 / chip.clock_ghz
    found = []
    for number, slices in enumerate(depths):
        for tile in TILES:
            staged = slices.steps * (tile.rows + tile.columns)
            unrolled, threads = tile.accumulators * slices.steps, tile.threads
            if number and (unrolled > MOST_UNROLLED or staged > MOST_STAGED * threads):
                continue
            down, across = tiles_of(product, tile)
            tiles = product.batch.size * down * across
            step = (tile.accumulators / (2 * pipes) + fragment_cycles(tile)) * threads / WARP
            for groups in GROUPS:
                if groups * threads > THREADS[1]:
                    break
                for parts in PARTS:
                    turns = -(-slices.count // (parts * groups))
                    if groups * parts > 1 and turns < LEAST_SLICES:
                        break  # more parts have fewer
                    cycles = -(-tiles * parts // chip.multiprocessors) * turns * groups * slices.steps * step
                    us = cycles * cycle_us + (processor.next_launch_us if parts > 1 else 0.0)
                    found.append((us, number, turns, tile, groups, parts))
    return sorted(found, key=lambda candidate: candidate[0])
