"""Tiles of products on tensor cores, and which of them suits a product."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.core.launch import WARP

SLICE_BYTES = 64
"""Of a row or column of an operand in a slice: two matrix instructions deep, and two sectors."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Results of a block of threads, and of each of its warps."""

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int

    @property
    def warps_across(self) -> int:
        return self.columns // self.warp_columns

    def counts(self, rows: int, columns: int) -> tuple[int, int]:
        """Of tiles that cover so many rows and columns."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns)

    @property
    def threads(self) -> int:
        return self.rows // self.warp_rows * self.warps_across * WARP


TILES = (
    Tile(128, 128, 64, 64),
    Tile(128, 64, 64, 32),
    Tile(64, 128, 32, 64),
    Tile(64, 64, 32, 32),
    Tile(64, 32, 32, 16),
    Tile(32, 64, 16, 32),
    Tile(32, 32, 16, 16),
)
"""Four warps each; a larger part of a warp reads fewer fragments for each product."""
MULTIPROCESSORS = 80
"""Of a large GPU: work is divided so that one of this size has some for all of them."""
_RESIDENT = {128 * 128: 2, 128 * 64: 4, 64 * 64: 5, 64 * 32: 8, 32 * 32: 9}
"""Blocks of a tile of so many results that registers leave room for, on a multiprocessor."""
PRODUCTS = 256
"""Multiply-adds of a multiprocessor in a cycle: those of a GeForce since Ampere, with float32 sums."""
_LATENCY = 450
"""Cycles of a slice that more work of the same block does not shorten: it waits for memory, then for shared
memory, then for tensor cores."""
_SECOND_LAUNCH = 8000
"""Cycles: some microseconds to launch it, and for its threads to begin and end."""
_MOST_PARTS = 16
_STEPS = SLICE_BYTES // 2


@dataclass(frozen=True, slots=True)
class Way:
    """A tile, and how many blocks of threads share its depth; they divide its slices evenly."""

    tile: Tile
    parts: int = 1
    stages: int = 0
    """Slices that shared memory holds where they are copied to it asynchronously; 0: they pass registers, and
    it holds two."""


def ways(slices: int) -> list[Way]:
    """All ways to compute a product of so deep slices, whole ones first."""
    parts = [p for p in range(1, min(_MOST_PARTS, slices) + 1) if slices % p == 0]
    return [Way(tile, p) for p in parts for tile in TILES]


def best_way(rows: int, columns: int, slices: int, batches: int) -> Way:
    """The way that should take a product of 16-bit floats the fewest cycles on a GeForce; counted roughly, as
    only their order matters."""

    def cycles(way: Way) -> float:
        tile, down_across = way.tile, way.tile.counts(rows, columns)
        blocks = down_across[0] * down_across[1] * batches * way.parts
        share = ceil_div(blocks, MULTIPROCESSORS)
        resident = min(share, _RESIDENT[tile.rows * tile.columns])
        # operands pass through shared memory once, 128 bytes a cycle, and to registers once for each warp
        operands = _STEPS * (tile.rows + tile.columns + 4 * (tile.warp_rows + tile.warp_columns)) / 64
        work = _STEPS * tile.rows * tile.columns / PRODUCTS + operands
        turns = share / resident * (slices // way.parts)
        time = turns * max(resident * work, _LATENCY + work)
        if way.parts > 1:
            # sums are written and read, some 512 bytes a cycle between all multiprocessors and L2
            time += _SECOND_LAUNCH + 8 * way.parts * rows * columns * batches / 512
        return time

    return min(ways(slices), key=cycles)
