"""How the work of a weight gradient is shared out among tasks and micro-kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, integer
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.wgrad.operands import BlockedOperand
from hybridc.schedules.cpu.wgrad.read import WeightGradient
from hybridc.targets import Isa

PIECE_POSITIONS = 256
"""Whose data and gradient, a block of channels each, stay in a first-level cache for all taps."""
TASKS = 16
"""Into which the work is cut if its size allows, unless there are more threads."""
PARTIAL_BYTES = 512 << 10
"""Sums of a task that shares weights, on average, which are read and written once a piece: half of what a
core's second-level cache has."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The blocks of data that a block of outputs sums over: those in which its groups lie.

    Where groups are narrower than blocks, sums of channels that do not belong together are made, too, and
    left out at the end.
    """

    wgrad: WeightGradient
    data: BlockedOperand
    gradient: BlockedOperand

    @property
    def blocks(self) -> int:
        """At most."""
        wgrad, lanes = self.wgrad, self.gradient.lanes
        if wgrad.groups == 1:
            return self.data.blocks
        group = wgrad.outputs // wgrad.groups

        def reached(first: int) -> int:
            last = min(first + lanes, wgrad.outputs) - 1
            start, end = first // group * wgrad.inputs, (last // group + 1) * wgrad.inputs
            return ceil_div(end, self.data.lanes) - start // self.data.lanes

        return max(map(reached, range(0, wgrad.outputs, lanes)))

    def first(self, block: ir.Expr) -> ir.Expr:
        """Of an output block."""
        if self.wgrad.groups == 1:
            return integer(0)
        channel = self.wgrad.first_channel(block * integer(self.gradient.lanes))
        first = tirx.floordiv(channel, integer(self.data.lanes))
        return tirx.min(first, integer(self.data.blocks - self.blocks))


@dataclass(frozen=True, slots=True)
class ConvWgradPlan:
    """How the positions and output channels are shared out."""

    vectors: int
    """Output blocks of a micro-kernel."""
    images: int
    """Of a piece that takes whole images."""
    rows: int
    """Of a piece, at most."""
    splits: int
    """Ranges of pieces."""
    parts: int
    """Ranges of output channels."""


def plan_of(
    wgrad: WeightGradient, data: BlockedOperand, gradient: BlockedOperand, isa: Isa, threads: int
) -> ConvWgradPlan:
    """Groups have output blocks one by one: each may read other data."""
    tasks = at_least_one_each(TASKS, threads)
    # sums of an input block's lanes and the gradient's vector, for each vector; one register broadcasts data
    fitting = (isa.vector_registers - 1) // (data.lanes + 1) if wgrad.groups == 1 else 1
    vectors = max(
        v for v in range(1, gradient.blocks + 1) if gradient.blocks % v == 0 and v <= max(fitting, 1)
    )
    lines, columns = wgrad.height.positions, wgrad.width.positions
    # whole lines; of small images several together
    rows = min(max(PIECE_POSITIONS // columns, 1), lines)
    most = PIECE_POSITIONS // (lines * columns) if rows == lines else 1
    images = max(n for n in range(1, wgrad.batches + 1) if wgrad.batches % n == 0 and n <= max(most, 1))
    pieces = wgrad.batches // images * ceil_div(lines, rows)
    reached = Reach(wgrad, data, gradient).blocks
    sum_bytes = 4 * math.prod((gradient.blocks, gradient.lanes, reached, data.lanes))
    sum_bytes *= wgrad.height.taps * wgrad.width.taps
    splits = max(min(tasks, pieces, tasks * PARTIAL_BYTES // sum_bytes), 1)
    groups = gradient.blocks // vectors
    enough = [p for p in range(1, groups + 1) if groups % p == 0 and p * splits >= tasks]
    return ConvWgradPlan(vectors, images, rows, splits, enough[0] if enough else groups)
