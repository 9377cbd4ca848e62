"""Tiles of the steps of a recurrence, and how its weights are packed for them."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.recurrence.cell import Recurrence
from hybridc.recurrence.tensors import Tensors
from hybridc.schedules.cpu.core.micro_kernel import ceil_div, lanes_for
from hybridc.schedules.cpu.core.sharing import task_slots
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request
from hybridc.targets import Isa

PARALLEL_STEP = 1 << 17
"""Multiply-adds of a step below which threads would wait longer for each other than they save."""
MOST_VECTORS = 4
"""Vectors of hidden units of a tile: more sums than hide the latency of a multiply-add gain nothing."""


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Tiles of `rows` rows of the batch times `width` vectors of `lanes` hidden units."""

    rows: int
    width: int
    lanes: int
    hidden: int
    directions: int
    gates: int
    in_phases: bool
    """Gates of one phase are packed apart from those of the other."""
    is_parallel: bool

    @property
    def blocks(self) -> int:
        """Of hidden units."""
        return ceil_div(self.hidden, self.width * self.lanes)

    @property
    def packing(self) -> Packing:
        """[D, G, H, K] to [D, blocks, K, G, width, lanes], with the gates in front of the blocks if there
        are two phases."""
        padded = self.blocks * self.width * self.lanes
        full = (self.directions, self.gates, padded, self.hidden)
        split = (*full[:2], self.blocks, self.width, self.lanes, self.hidden)
        axes = (0, 1, 2, 5, 3, 4) if self.in_phases else (0, 2, 5, 1, 3, 4)
        return Packing(full, split, axes)


def recurrence_plan(request: Request, own: Recurrence, tensors: Tensors) -> RecurrencePlan:
    """Tiles of the least padded work, weighed by how many sums hide each other's latency."""
    _, batch, directions, gates, hidden = tensors.extents
    isa, phases = request.target.isa, own.phases()
    lanes = lanes_for(isa, hidden)
    widest = max(len(phase.gates) for phase in phases)
    vectors = ceil_div(hidden, lanes)

    def cost(tile: tuple[int, int]) -> float:
        rows, width = tile
        tasks = ceil_div(batch, rows) * ceil_div(vectors, width)
        sums = rows * width * widest
        loads = (rows + width * widest) / sums
        waste = max(1.0, isa.sums_in_flight / sums) * (1.0 + 0.5 * loads)
        shared = task_slots(directions * tasks, request.threads) / (directions * tasks)
        return tasks * rows * width * waste * shared

    rows, width = min(_tiles(isa, batch, vectors, widest), key=cost)
    is_parallel = directions * batch * gates * hidden * hidden >= PARALLEL_STEP
    return RecurrencePlan(rows, width, lanes, hidden, directions, gates, len(phases) > 1, is_parallel)


def _tiles(isa: Isa, batch: int, vectors: int, gates: int) -> list[tuple[int, int]]:
    """Rows and vectors whose sums, weights and a broadcast scalar fit the registers; at least one of each."""
    return [
        (rows, width)
        for rows in range(1, min(batch, 8) + 1)
        for width in range(1, min(vectors, MOST_VECTORS) + 1)
        if (rows, width) == (1, 1) or (rows + 1) * width * gates + 1 <= isa.vector_registers
    ]
