"""Tiles and chunks of attention on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import Tile, ceil_div
from hybridc.schedules.cpu.matmul.kernel import rank_gemm_tiles
from hybridc.schedules.cpu.reduction.softmax import LOG2_E
from hybridc.schedules.rule import Request
from hybridc.targets import Isa

TASK_ROWS = 24
"""Query rows of a task: enough that keys and values are read from L2 seldom, and a multiple of the rows of
most tiles."""
SCORES_SHARE = 3 / 4
"""The scores of a task may take this fraction of L1: they are read again soon."""
PACKED_ROWS = 32
"""Query rows that must share the values to pay for a copy of them."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Tiles of both products, and what a task has at once."""

    scores: Tile
    context: Tile
    rows: int
    """Query rows of a task, a multiple of both tiles'."""
    panels: int
    """Panels of keys."""
    chunk: int
    """Panels of keys of a chunk."""
    packs_values: bool
    width: int
    """Columns of the values, whole vectors."""
    factor: float | None
    """What scores are multiplied by in front of the softmax, if nothing else happens to them."""


def plan_of(request: Request, found: AttentionBlocks) -> AttentionPlan:
    """What suits the processor's vectors, registers and L1, and the threads there are."""
    isa = request.target.isa
    width = ceil_div(found.width, isa.lanes()) * isa.lanes()
    first = rank_gemm_tiles(isa, min(found.rows, TASK_ROWS), found.columns)[0][1]
    # fewer rows where threads would have no task
    shared = ceil_div(math.prod(found.batch) * found.rows, request.threads)
    rows = ceil_div(min(found.rows, TASK_ROWS, max(shared, first.rows)), first.rows) * first.rows
    panels = ceil_div(found.columns, first.columns)
    chunk = max(int(isa.l1_bytes * SCORES_SHARE) // (4 * rows * first.columns), 1)
    return AttentionPlan(
        first,
        _context_tile(isa, rows, width),
        rows,
        panels,
        # chunks of about the same size
        ceil_div(panels, ceil_div(panels, chunk)),
        # a tail of the values' vectors would need conditions in the inner loop
        found.rows >= PACKED_ROWS or width > found.width,
        width,
        _factor(found),
    )


def _context_tile(isa: Isa, rows: int, width: int) -> Tile:
    """The tile of the second product that divides both sides."""
    lanes = isa.lanes()
    vectors = width // lanes
    tiles = (tile for _, tile in rank_gemm_tiles(isa, rows, width) if tile.lanes == lanes)
    dividing = (tile for tile in tiles if rows % tile.rows == 0 and vectors % tile.width == 0)
    return next(dividing, Tile(1, 1, 1, lanes))


def _factor(found: AttentionBlocks) -> float | None:
    """The number by which scores are multiplied, if that is all; such that exponents do not overflow."""
    factor = found.factor_of_scores
    return factor if factor is not None and 0 < factor * LOG2_E <= 1 else None
