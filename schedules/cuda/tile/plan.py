"""How a product is computed: its tile, its slices, and how both factors are staged."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        return tiles_of(self.product, self.tile)

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


def tiles_of(product: Product, tile: Tile) -> tuple[int, int]:
    """How many tiles a product has down and across."""
    return -(-product.rows.size // tile.rows), -(-product.columns.size // tile.columns)


def plan_of(product: Product, tile: Tile, slices: Slices) -> Plan:
    """The plan for a tile."""
    return with_tile(Plan(product, tile, slices, *_stages(product, slices)), tile)


def _stages(product: Product, slices: Slices) -> tuple[Stage, Stage]:
    """Of both factors, whatever the tile is: all have sides of whole quads."""
    sides = ((product.left, product.rows), (product.right, product.columns))
    left, right = (stage(value, group, slices, product.batch) for value, group in sides)
    return left, right


def with_tile(plan: Plan, tile: Tile) -> Plan:
    """The same for another tile: what does not depend on it, which takes TVM some time, is not read again."""
    left = replace(plan.left, side=tile.rows, threads=tile.threads)
    right = replace(plan.right, side=tile.columns, threads=tile.threads)
    return replace(plan, tile=tile, left=left, right=right)
