"""Depthwise convolution and the 1x1 convolution behind it, of blocked activations, as one kernel.

A task computes some rows of the depthwise result into a buffer that stays in its second-level cache, and the
1x1 convolution reads them from there: the tensor between is most of what the two kernels move (Qararyah et
al., "Fusing depthwise and pointwise convolutions for efficient inference on GPUs", ICPP workshops 2024). Both
halves are the code of the separate kernels: `depthwise.py` fills the buffer that `conv2d_blocked.py`
otherwise copies its input into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import blocked_tasks, weight_packing
from hybridc.schedules.cpu.conv2d_blocked.depthwise import (
    DepthwiseTile,
    Rows,
    depthwise_instructions,
    depthwise_rows,
    rank_depthwise_tiles,
)
from hybridc.schedules.cpu.conv2d_blocked.plan import (
    MEMORY_BYTES,
    TASK_SHARE,
    BlockedConvPlan,
    group_count,
    predicted_cycles,
    rank_plans,
)
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution, read_blocked_convolution
from hybridc.schedules.cpu.conv2d_blocked.task import Pass, declare_buffers
from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop
from hybridc.schedules.cpu.core.nest import finish, loads, read_nest
from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.core.sharing import imbalance
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule
from hybridc.targets import Isa

MINIMUM_GAIN = 0.025
"""Predicted share of the time below which two kernels stay two."""
KEPT_SHARE = 8
"""A result of this fraction of the second-level cache is still there when the next kernel reads it."""


@dataclass(frozen=True, slots=True)
class Separable:
    """Two convolutions, of which the second reads nothing but the first one's result."""

    depthwise: BlockedConvolution
    pointwise: BlockedConvolution

    def rows(self, plan: BlockedConvPlan) -> int:
        """Of the depthwise result, in a task."""
        return self.depthwise.height.outputs // plan.parts

    def tile(self, plan: BlockedConvPlan) -> DepthwiseTile:
        """The best tile of which a task's rows are a multiple."""
        tiles = rank_depthwise_tiles(self.depthwise)
        return next(tile for tile in tiles if self.rows(plan) % tile.rows == 0)

    def plans(self, isa: Isa, threads: int) -> dict[str, BlockedConvPlan]:
        """The best division into tasks for each tile, tiles in the order of predicted time."""
        return rank_plans(
            self.pointwise, isa, threads, lambda plan: _depthwise_cycles(self, plan, isa, threads)
        )


@schedule_rule(family="conv2d")
def separable(request: Request) -> Scheduled | None:
    """Accepts a depthwise convolution and a 1x1 convolution of its result, each with its epilogue.

    Tiling: tasks are bands of rows. A task computes the depthwise result of its rows, for a chunk of blocks
    if their weights of the 1x1 convolution would not stay in cache, then the tiles of the 1x1 convolution,
    which runs through the rows as if they were one line.
    """
    both = read_separable(request)
    if both is None:
        return None
    ranked = both.plans(request.target.isa, request.threads)
    plan = pick(request, ranked)
    position = both.pointwise.weight
    packing = weight_packing(request, both.pointwise, plan)
    weight = packed_weight(request, position, packing, "packed_weight", "float32")
    buffers = declare_buffers(both.pointwise, plan, weight.buffer)
    sums: list[ir.Var] = []
    nest = blocked_tasks(buffers, lambda task, rows: _depthwise(both, task, rows, sums))
    function = function_of(request.function, weight.params, [nest], sums)
    return finish(function, separable.__name__, weight.packings, ranked)


def join(depthwise: BlockedConvolution | None, pointwise: BlockedConvolution | None) -> Separable | None:
    """Both as one, if they are of the right kind. That the second reads the first's result is not checked."""
    if depthwise is None or pointwise is None or not depthwise.depthwise:
        return None
    axes = (pointwise.height, pointwise.width)
    if pointwise.depthwise or pointwise.plain or not pointwise.is_constant:
        return None
    if any(axis.taps > 1 or axis.stride > 1 or axis.inputs != axis.outputs for axis in axes):
        return None
    reads = [load for block in pointwise.contraction.nest.blocks for load in loads(block.value)]
    if sum(load.source.same_as(pointwise.data) for load in reads) > 1:
        return None  # the epilogue too
    return Separable(depthwise, replace(pointwise, computed=True))


def read_separable(request: Request) -> Separable | None:
    """The pair that a function computes, or None; weights have to be constant."""
    nest = read_nest(request.function)
    if nest is None or len(nest.reductions) != 2:
        return None
    (_, second), produced = nest.reductions, {block.buffer: i for i, block in enumerate(nest.blocks)}
    between = [load.source for load in loads(second.value) if load.source in produced]
    between = [buffer for buffer in between if not buffer.same_as(second.buffer)]
    if len(between) != 1:
        return None
    first, rest = _split(request.function, between[0], produced[between[0]] + 1)
    parts = (read_blocked_convolution(replace(request, function=part)) for part in (first, rest))
    both = join(*parts)
    return both if both is not None and both.pointwise.data.same_as(between[0]) else None


def _split(function: tirx.PrimFunc, between: ir.Var, count: int) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    """The first `count` blocks, which give `between`, and the rest, as functions of their own.

    Parameters keep their positions; what takes no part in the computation is never read.
    """
    root = function.body.block
    *inputs, output = function.params
    own = [buffer for buffer in root.alloc_buffers if not buffer.same_as(between)]

    def part(params: list[ir.Var], stages: list[tirx.Stmt]) -> tirx.PrimFunc:
        return function_of(function, params, stages, own)

    stages = list(root.body.seq)
    return part([*inputs, between], stages[:count]), part([*inputs, between, output], stages[count:])


def _depthwise(both: Separable, task: Pass, scratch: ir.Var, sums: list[ir.Var]) -> tirx.Stmt:
    """The depthwise result of a task's rows and of a chunk's blocks."""
    conv, plan = both.depthwise, task.buffers.plan
    tile, count = both.tile(plan), both.rows(plan)
    top, tiles = task.part * integer(count), count // tile.rows

    def tile_rows(block: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        def into(
            image: ir.Expr, channel: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr, total: ir.Expr
        ) -> tirx.BufferStore:
            value = conv.store(image, channel, y, x, lane, total).value
            return tirx.BufferStore(scratch, value, [block, y - top, x, lane])

        y = top + number * integer(tile.rows)
        return depthwise_rows(Rows(conv, tile, task.n, task.block(block), y, into), sums)

    return loop(plan.chunk, lambda block: loop(tiles, lambda number: tile_rows(block, number)))


# ------------------------------------------------------------------------------------------ predictions


def is_faster(both: Separable, isa: Isa, threads: int) -> bool:
    """Whether one kernel is predicted to take less time than two.

    It saves the way of the tensor between them to memory; the way back is in the time of the 1x1 convolution.
    It costs where whole rows do not divide evenly into tiles or among threads, and where neighbouring bands
    read the same rows of the input.
    """
    depthwise, apart = both.depthwise, replace(both.pointwise, computed=False)
    if _bytes(depthwise) <= isa.l2_bytes // KEPT_SHARE:
        return False
    tile = rank_depthwise_tiles(depthwise, threads)[0]
    first = _vectors(depthwise) * _cycles(depthwise, tile, isa, threads)
    ranked = rank_plans(apart, isa, threads).values()
    second = min(predicted_cycles(apart, plan, isa, threads) for plan in ranked)
    plan = next(iter(both.plans(isa, threads).values()))
    together = predicted_cycles(both.pointwise, plan, isa, threads)
    together += _depthwise_cycles(both, plan, isa, threads)
    return together < (1 - MINIMUM_GAIN) * (first + _bytes(depthwise) / MEMORY_BYTES + second)


def _depthwise_cycles(both: Separable, plan: BlockedConvPlan, isa: Isa, threads: int) -> float:
    """Of all tasks. Those with other output channels of the same rows would compute these again."""
    conv = both.depthwise
    if plan.groups < group_count(both.pointwise, plan):
        return math.inf
    tasks = conv.batches * plan.parts
    scratch_bytes = _bytes(conv) * plan.chunk // (tasks * conv.output_blocks)
    to_memory = 0.0 if scratch_bytes <= isa.l2_bytes // TASK_SHARE else 2 * _bytes(conv) / MEMORY_BYTES
    return (_vectors(conv) * _cycles(conv, both.tile(plan), isa) + to_memory) * imbalance(tasks, threads)


def _vectors(conv: BlockedConvolution) -> int:
    """Vectors of a depthwise result."""
    return conv.batches * conv.output_blocks * conv.height.outputs * conv.width.outputs


def _bytes(conv: BlockedConvolution) -> int:
    """Of a depthwise result."""
    return 4 * _vectors(conv) * conv.output_lanes


def _cycles(conv: BlockedConvolution, tile: DepthwiseTile, isa: Isa, threads: int = 1) -> float:
    """For a vector of a depthwise result."""
    return depthwise_instructions(conv, tile, threads) / isa.fma_ports
