"""Tiles of products on tensor cores, and which of them suits a product."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.core.launch import WARP

DEPTH = 32
"""Of a slice: two matrix instructions deep, and 64 bytes of a row, two sectors."""


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
"""Of a large GPU: tiles are chosen so that one of this size has work for all of them."""


def best_tile(rows: int, columns: int, batches: int) -> Tile:
    """The tile with which the busiest multiprocessor has the least to do, in units of matrix instructions.

    Beside these, which take time in proportion to padded results, a block moves slices of its operands in
    proportion to its sides.
    """

    def cost(tile: Tile) -> float:
        blocks = ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns) * batches
        share = ceil_div(blocks, MULTIPROCESSORS)
        # a step of the depth is bound by operands where sides are short: 16 elements cost about as much as
        # the products of 16 x 32 results
        work = tile.rows * tile.columns + 16 * (tile.rows + tile.columns)
        return float(share * work)

    return min(TILES, key=cost)
