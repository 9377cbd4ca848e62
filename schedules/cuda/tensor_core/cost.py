"""Estimated time of a product on tensor cores: what its launches do, counted in closed form.

The counts follow `hybridc/gpu_model/tir.py`, as those of `cuda/tile/cost.py` do.
"""

from __future__ import annotations

from functools import lru_cache

from hybridc.gpu_model.fast import Work, estimate_fast
from hybridc.gpu_model.memory import LINE, SECTOR
from hybridc.machine import Processor
from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import TF32
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct
from hybridc.schedules.cuda.tensor_core.staging import Operand, operand
from hybridc.schedules.cuda.tensor_core.tile import Way, ways
from hybridc.schedules.cuda.tile.cost import sum_work

_OWN_REGISTERS = 32
"""Of a thread, beside what it keeps of arrays, as in `tir.py`."""
_ACCESS_INSTRUCTIONS = 3
"""Of an access, with the arithmetic of its address, as in `tir.py`."""
_LEAST_LSU_CYCLES = 2
_WORD = 4


def fastest_way(product: MatrixProduct, processor: Processor) -> tuple[Way, float]:
    """The way with the least estimated time, and this time: microseconds of all its launches."""
    sides = _Sides(product)

    def us(way: Way) -> float:
        found = estimate_fast(main_work(product, way, *sides.of(way)), processor).us
        if way.parts > 1:
            added = estimate_fast(sum_work(product.results, way.parts), processor)
            found += processor.launch_us + added.us
        return found

    times = {way: us(way) for way in ways(product.slices)}
    best = min(times, key=lambda way: times[way])
    return best, times[best]


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
    instructions, lsu, sectors = (0.0, 0.0, 0.0)
    for side, matrices in ((left, tile.warp_rows // 8), (right, tile.warp_columns // 8)):
        for count, cycles in (*_staged(side), _fragments(side, matrices)):
            instructions += _ACCESS_INSTRUCTIONS * count * warps
            lsu += count * cycles * warps
        if product.dtype == TF32:
            instructions += side.pieces * side.width * warps  # they are rounded
        sectors += side.elements * side.item_bytes / SECTOR
    multiplies = tile.rows * tile.columns * product.steps
    depth_of_one = 2 * left.chunk
    instructions += multiplies / (16 * 8 * depth_of_one)
    results = tile.rows * tile.columns / (2 * WARP)
    kept = 2 * results * WARP / tile.threads + tile.warp_rows / 4 + tile.warp_columns / 4
    loaded = sum(side.pieces * side.width * side.item_bytes // _WORD for side in (left, right))
    return Work(
        blocks=down * across * product.batch.extent * way.parts,
        threads=tile.threads,
        registers=min(255, round(_OWN_REGISTERS + 1.5 * (kept + loaded))),
        shared_bytes=2 * sum(side.elements * side.item_bytes for side in (left, right)),
        instructions=turns * instructions + _ACCESS_INSTRUCTIONS * results,
        fp32=0.0,
        special=0.0,
        # data sheets give tf32 half the rate of fp16
        tensor_multiplies=turns * multiplies * (2.0 if product.dtype == TF32 else 1.0),
        lsu_cycles=turns * lsu + 8 * results,
        l2_sectors=turns * sectors + tile.rows * tile.columns * _WORD / SECTOR,
        rounds=1.0 + turns,
        memory_bytes=_memory_bytes(product, way),
    )


def _staged(side: Operand) -> tuple[tuple[float, float], ...]:
    """Accesses of a warp to a slice, and cycles of each: loads from global memory, and stores to shared."""
    width_bytes = side.width * side.item_bytes
    lines = WARP * side.width / side.line if side.along_depth else WARP * width_bytes / LINE
    wide = max(_LEAST_LSU_CYCLES, width_bytes / _WORD)
    return (side.pieces, max(wide, lines)), (side.pieces, wide)


def _fragments(side: Operand, matrices: int) -> tuple[float, float]:
    """Accesses of a warp to shared memory for a slice: so many matrices of eight rows, of each chunk."""
    count = matrices * side.step / side.chunk
    # four at a time, a cycle each, or each by itself
    return (count / 4, 4) if side.loads_matrices else (count, _LEAST_LSU_CYCLES)


def _memory_bytes(product: MatrixProduct, way: Way) -> float:
    rows, columns, depth = product.row.extent, product.column.extent, product.depth.extent
    # a window reads each element as often as it has taps, which counts once
    window = depth / product.channels
    operands = product.item_bytes * (rows * depth + columns * depth / window)
    results = (_WORD * way.parts if way.parts > 1 else product.item_bytes) * rows * columns
    return float(product.batch.extent * (operands + results))
