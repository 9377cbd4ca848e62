"""The tile of a product, and over how many blocks its depth is split: what is estimated to be fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridc.machine import Processor
from hybridc.schedules.cuda.core.launch import MAX_SHARED_BYTES
from hybridc.schedules.cuda.tile.cost import estimated_us
from hybridc.schedules.cuda.tile.group import slices_of
from hybridc.schedules.cuda.tile.plan import Plan, plan_of
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
GROUPS = (1, 2, 4, 8)
PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
LEAST_SLICES = 4
"""Of a group: the pipeline of fewer is mostly its beginning and its end."""
MOST_THREADS = 256
"""Of a block: with more, nvcc has too few registers for 8 x 8 results of a thread and what is on its way."""


def choose(product: Product, processor: Processor) -> Plan:
    """The plan with the least estimated time on a GPU."""
    return min(_candidates(product), key=lambda plan: estimated_us(plan, processor))


def _candidates(product: Product) -> Iterator[Plan]:
    slices = slices_of(product.depth)
    for tile in TILES:
        whole = plan_of(product, tile, slices)
        for groups in GROUPS:
            for parts in PARTS:
                plan = replace(whole, tile=replace(tile, groups=groups, parts=parts))
                if groups * parts == 1 or _may_share(plan):
                    yield plan


def _may_share(plan: Plan) -> bool:
    """Whether blocks of so many groups are possible, and each has enough slices."""
    threads = plan.tile.groups * plan.tile.threads
    small = threads <= MOST_THREADS and plan.shared_bytes <= MAX_SHARED_BYTES
    return small and plan.turns >= LEAST_SLICES
