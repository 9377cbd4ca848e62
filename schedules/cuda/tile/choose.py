"""The tile of a product, and over how many blocks its depth is split: what is estimated to be fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridc.machine import Processor
from hybridc.schedules.cuda.tile.cost import estimated_us
from hybridc.schedules.cuda.tile.group import slices_of
from hybridc.schedules.cuda.tile.kernel import Plan, plan_of
from hybridc.schedules.cuda.tile.read import Product
from hybridc.schedules.cuda.tile.shape import Tile

TILES = (
    Tile(128, 128, 8, 8),
    Tile(128, 64, 8, 8),
    Tile(64, 128, 8, 8),
    Tile(64, 64, 8, 8),
    Tile(32, 128, 8, 8),
    Tile(128, 32, 8, 8),
    Tile(64, 64, 8, 4),
    Tile(64, 32, 8, 4),
    Tile(32, 64, 4, 8),
    Tile(32, 32, 4, 4),
    Tile(16, 64, 4, 4),
    Tile(64, 16, 4, 4),
    Tile(16, 128, 4, 8),
    Tile(128, 16, 8, 4),
)
"""From 8 x 8 results a thread, 16 multiply-adds for each read of shared memory, to what small results need to
be spread over many threads. Of equal estimates the first is taken."""
LEAST_SLICES = 4
"""Of a part: the pipeline of fewer is mostly its beginning and its end."""
MOST_PARTS = 32


def choose(product: Product, processor: Processor) -> Plan:
    """The plan with the least estimated time on a GPU."""
    return min(_candidates(product), key=lambda plan: estimated_us(plan, processor))


def _candidates(product: Product) -> Iterator[Plan]:
    slices = slices_of(product.depth)
    for tile in TILES:
        yield (whole := plan_of(product, tile, slices))
        parts = 2
        while parts <= min(MOST_PARTS, slices.count // LEAST_SLICES):
            # as many parts as have the same number of slices
            length = -(-slices.count // parts)
            even = -(-slices.count // length)
            yield replace(whole, tile=replace(tile, parts=even))
            parts += parts // 2
