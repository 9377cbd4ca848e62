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
class StepTile:
    """Sums of `rows` rows of the batch times `width` vectors of hidden units, of each of `gates` gates."""

    rows: int
    width: int
    gates: int
    """That are multiplied at once: all of a phase, or one after the other."""

    @property
    def sums(self) -> int:
        return self.rows * self.width * self.gates

    @property
    def loads(self) -> float:
        """Loads per multiply-add."""
        return (self.rows + self.width * self.gates) / self.sums

    @property
    def registers(self) -> int:
        """Of sums, weights and a broadcast scalar."""
        return self.sums + self.width * self.gates + 1


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Tasks of `rows` rows of the batch times `width` vectors of `lanes` hidden units."""

    rows: int
    width: int
    lanes: int
    hidden: int
    directions: int
    gates: int
    gates_apart: bool
    """Each gate's weights are packed by themselves: gates are multiplied one by one, or in phases."""
    one_by_one: bool
    """Gates of a phase are multiplied one after the other."""
    directions_apart: bool
    """All steps of a direction are made before those of the other."""
    is_parallel: bool
    turns: bool
    """Every other step goes through a thread's weights backwards: what a cache that is too small for them
    still has is what the step before read last."""
    shares: int
    """Parts of a step's tasks where it does, one for each thread."""

    @property
    def blocks(self) -> int:
        """Of hidden units."""
        return ceil_div(self.hidden, self.width * self.lanes)

    @property
    def packing(self) -> Packing:
        """[D, G, H, K] to [D, blocks, K, G, width, lanes], or with `gates_apart` to [D, blocks, G, K, width,
        lanes]."""
        padded = self.blocks * self.width * self.lanes
        full = (self.directions, self.gates, padded, self.hidden)
        split = (*full[:2], self.blocks, self.width, self.lanes, self.hidden)
        axes = (0, 2, 1, 5, 3, 4) if self.gates_apart else (0, 2, 5, 1, 3, 4)
        return Packing(full, split, axes)


def recurrence_plan(request: Request, own: Recurrence, tensors: Tensors) -> RecurrencePlan:
    """Tiles of the least padded work, weighed by how many sums hide each other's latency."""
    _, batch, directions, gates, hidden = tensors.extents
    isa, phases = request.target.isa, own.phases()
    lanes = lanes_for(isa, hidden)
    widest = max(len(phase.gates) for phase in phases)
    vectors = ceil_div(hidden, lanes)
    weight_bytes = 4 * gates * hidden * hidden
    # what all threads together keep in the caches that nobody shares with them
    own_caches = request.threads * isa.l2_bytes
    directions_apart = directions * weight_bytes > own_caches
    at_once = 1 if directions_apart else directions

    def cost(tile: StepTile) -> float:
        tasks = ceil_div(batch, tile.rows) * ceil_div(vectors, tile.width)
        waste = max(1.0, isa.sums_in_flight / tile.sums) * (1.0 + 0.5 * tile.loads)
        shared = task_slots(at_once * tasks, request.threads) / (at_once * tasks)
        return tasks * tile.rows * tile.width * waste * shared

    tile = min(_tiles(isa, batch, vectors, widest), key=cost)
    one_by_one = tile.gates < widest
    is_parallel = at_once * batch * gates * hidden * hidden >= PARALLEL_STEP
    return RecurrencePlan(
        tile.rows,
        tile.width,
        lanes,
        hidden,
        directions,
        gates,
        len(phases) > 1 or one_by_one,
        one_by_one,
        directions_apart,
        is_parallel,
        at_once * weight_bytes > own_caches // 2,  # the rest is for what else a step reads
        request.threads if is_parallel else 1,
    )


def _tiles(isa: Isa, batch: int, vectors: int, gates: int) -> list[StepTile]:
    """Tiles that fit the registers; at least one.

    With all gates of an LSTM at once, AVX2's 16 registers hold two rows of one vector, which read three
    operands for four multiply-adds: gates may be multiplied one after the other. A single row uses each
    weight once, as an operand in memory. AVX-512's 32 registers hold enough sums without either.
    """
    few = isa.vector_registers < 32
    tiles = [
        StepTile(rows, width, at_once)
        for at_once in sorted({gates, 1} if few else {gates}, reverse=True)
        for rows in range(1, min(batch, 8) + 1)
        for width in range(1, min(vectors, MOST_VECTORS) + 1)
    ]

    def fits(tile: StepTile) -> bool:
        registers = tile.sums + 2 if few and tile.rows == 1 else tile.registers
        return registers <= isa.vector_registers or (tile.rows, tile.width) == (1, 1)

    return list(filter(fits, tiles))
