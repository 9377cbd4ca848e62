"""Tiles of products on tensor cores, and the ways to compute a product in them."""

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
PRODUCTS = 256
"""Multiply-adds of a multiprocessor in a cycle: those of a GeForce since Ampere, with float32 sums."""
_MOST_PARTS = 16


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
