"""Tasks of a convolution along one axis: blocks of the output, for ranges of output channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.plan import BlockPlan
from hybridc.schedules.cpu.core.micro_kernel import PARALLEL_WORK, Point, grid, integer, loop


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """A task: a block of an image's and a group's output, for a range of its output channels."""

    n: ir.Expr
    g: ir.Expr
    part: ir.Expr
    number: ir.Expr


def block_tasks(
    plan: BlockPlan,
    fill: Callable[[OutputBlock], tirx.Stmt],
    tile: Callable[[OutputBlock, ir.Expr, ir.Expr], tirx.Stmt],
) -> tirx.Stmt:
    """A task fills its scratch memory with what it reads; `tile(block, row_block, number)` are micro-kernels,
    output channels outside."""
    conv = plan.conv

    def task(point: Point) -> tirx.Stmt:
        block = OutputBlock(*point)
        count = tirx.min(integer(plan.all_tiles) - block.number * integer(plan.tiles), integer(plan.tiles))
        even = plan.all_tiles % plan.tiles == 0
        tiles = loop(
            plan.part_blocks,
            lambda b: loop(plan.tiles if even else count, lambda i: tile(block, b, i)),
        )
        return tirx.SeqStmt([fill(block), tiles])

    tasks = (conv.batches, conv.groups, plan.parts, plan.blocks)
    return grid(tasks, task, parallel=conv.multiply_adds >= PARALLEL_WORK)
