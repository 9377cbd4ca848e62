"""How a product is computed: its tile, its slices, and how both factors are staged."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.schedules.cuda.tile.group import Slices
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.shape import Tile
from hybridc.schedules.cuda.tile.stage import Stage, stage


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product is computed."""

    product: Product
    tile: Tile
    slices: Slices
    left: Stage
    right: Stage

    @property
    def tiles(self) -> tuple[int, int]:
        """Down and across."""
        rows, columns = self.product.rows.size, self.product.columns.size
        return -(-rows // self.tile.rows), -(-columns // self.tile.columns)

    @property
    def turns(self) -> int:
        """Slices that each group of each part has."""
        return -(-self.slices.count // (self.tile.parts * self.tile.groups))

    @property
    def blocks(self) -> int:
        down, across = self.tiles
        return self.product.batch.size * self.tile.parts * down * across

    @property
    def shared_bytes(self) -> int:
        exchanged = self.tile.rows * self.tile.columns if self.tile.groups > 1 else 0
        return 4 * (self.tile.groups * (self.left.words + self.right.words) + exchanged)


def plan_of(product: Product, tile: Tile, slices: Slices) -> Plan:
    """The plan for a tile."""
    left = stage(product.left, product.rows, tile.rows, slices, tile.threads, product.batch)
    right = stage(product.right, product.columns, tile.columns, slices, tile.threads, product.batch)
    return Plan(product, tile, slices, left, right)
