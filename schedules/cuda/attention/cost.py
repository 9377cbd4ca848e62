"""Estimated time of attention on tensor cores: what its launch does, counted in closed form.

The counts follow `hybridc/gpu_model/tir.py`, as those of `cuda/tensor_core/cost.py` do.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hybridc.gpu_model.chip import chip_of
from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.gpu_model.memory import SECTOR
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.attention.operands import pitch_of
from hybridc.schedules.cuda.attention.tensor_core_kernel import COLUMNS, PAD, ROWS, STEP, Way
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES, WARP
from hybridc.schedules.cuda.tensor_core.staging import CHUNK_BYTES

_WARPS = ((4, 1), (2, 2), (2, 1), (1, 4), (1, 2))
"""Of a block, down and across."""
_KEYS = (64, 32, 16)
_ITEM_BYTES = 2
_CHUNK = CHUNK_BYTES // _ITEM_BYTES
_OWN_REGISTERS = 36
"""Of a thread, beside what it keeps of arrays."""
_MOST_REGISTERS = 250
"""As counted here, up to which nothing was seen to spill."""
_ACCESS_INSTRUCTIONS = 3
"""Of an access, with the arithmetic of its address, as in `tir.py`."""
_FRAGMENT_CYCLES = 4
"""Of four matrices from shared memory."""
_FEW_BLOCKS = 2
"""Of a multiprocessor, up to which asynchronous copies pay: by estimates from machine code few blocks take
up to half of the time, as none multiplies while another waits; many take up to a tenth more."""


def ranked_ways(found: AttentionBlocks, processor: Processor, *, copies: bool) -> list[Way]:
    """All ways that registers and shared memory have room for, the one with the least estimated time first.
    `copies` are whether the GPU has asynchronous ones."""
    most = _FEW_BLOCKS * chip_of(processor).multiprocessors

    def with_copies(way: Way) -> Way:
        waits = blocks_of(found, way) <= most and found.columns > way.tile
        return replace(way, copies=copies and waits)

    shapes = (Way(*warps, keys) for warps in _WARPS for keys in _KEYS)
    fitting = [way for way in map(with_copies, shapes) if _fits(found, way)]
    return sorted(fitting, key=lambda way: estimate_fast(work_of_way(found, way), processor).us)


def _fits(found: AttentionBlocks, way: Way) -> bool:
    return shared_bytes(found, way) <= MAX_SHARED_BYTES and _registers(found, way) <= _MOST_REGISTERS


def blocks_of(found: AttentionBlocks, way: Way) -> int:
    """Blocks of threads."""
    return math.prod(found.batch) * ceil_div(found.rows, way.rows)


def shared_bytes(found: AttentionBlocks, way: Way) -> int:
    """Of a block: tiles of keys and values, and sums that warps exchange."""
    depth, width = _sides(found)
    tiles = (2 if way.copies else 1) * way.tile * (pitch_of(depth) + pitch_of(width)) * _ITEM_BYTES
    if way.across == 1:
        return tiles
    return tiles + 4 * way.down * ROWS * (2 * way.across + way.across // 2 * (width + PAD))


def _sides(found: AttentionBlocks) -> tuple[int, int]:
    """Depth and width, padded to those of matrix instructions."""
    return ceil_div(found.depth, STEP) * STEP, ceil_div(found.width, STEP) * STEP


def _pieces(found: AttentionBlocks, way: Way) -> float:
    """Vectors of a tile that a thread copies."""
    return way.tile * sum(_sides(found)) / (_CHUNK * way.threads)


def _registers(found: AttentionBlocks, way: Way) -> int:
    depth, width = _sides(found)
    # what is on its way to shared memory, or scores and fragments
    passing = max(way.keys // 2 + 8, 0 if way.copies else 4 * _pieces(found, way))
    return _OWN_REGISTERS + round(depth / 4 + width / 2 + passing)


def work_of_way(found: AttentionBlocks, way: Way) -> Work:
    """What the launch does."""
    depth, width = _sides(found)
    warps, tiles, pieces = way.threads // WARP, ceil_div(found.columns, way.tile), _pieces(found, way)
    fragments = way.keys // STEP * (depth + width) // STEP
    weights, sums = way.keys / 2, width / 2
    accesses = fragments + 2 * pieces
    # a weight is compared, subtracted, multiplied and added up; sums shrink
    plain, special = 4 * weights + sums, weights
    instructions = _ACCESS_INSTRUCTIONS * accesses + 2 * fragments + plain + special + way.keys // COLUMNS * 2
    lsu = _FRAGMENT_CYCLES * fragments + 2 * _FRAGMENT_CYCLES * pieces
    # pairs of queries and of results, in eight rows each; sums of warps that share queries
    once, exchanged = (depth + width) / 4, width / 2 if way.across > 1 else 0.0
    plain_once = 3 * width / 2 + 16 * way.across if way.across > 1 else width / 2
    own = found.rows * (found.depth + found.width)
    return Work(
        blocks=blocks_of(found, way),
        threads=way.threads,
        registers=min(255, _registers(found, way)),
        shared_bytes=shared_bytes(found, way),
        instructions=warps * (tiles * instructions + _ACCESS_INSTRUCTIONS * (once + exchanged) + plain_once),
        fp32=warps * (tiles * plain + plain_once),
        special=warps * tiles * special,
        tensor_multiplies=float(warps * tiles * fragments * 2 * ROWS * COLUMNS * STEP),
        lsu_cycles=warps * (tiles * lsu + 8 * once + _FRAGMENT_CYCLES * exchanged),
        l2_sectors=tiles * way.tile * (depth + width) * _ITEM_BYTES / SECTOR
        + way.rows * (depth + width) * _ITEM_BYTES / SECTOR,
        rounds=2.0 + tiles,
        memory_bytes=float(
            math.prod(found.batch) * _ITEM_BYTES * (own + found.columns * (found.depth + found.width))
        ),
    )
