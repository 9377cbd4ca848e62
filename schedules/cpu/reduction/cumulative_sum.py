"""Prefix sums along an axis."""

from __future__ import annotations

import math

from tvm import ir, s_tir, tirx

from hybridc.schedules.annotation import CUMULATIVE_SUM
from hybridc.schedules.cpu.core.micro_kernel import (
    INDEX,
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    unflattened,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

_COLUMNS = 256
"""Of a task: their sums stay in the first-level cache, and are enough for vectors."""


@schedule_rule(family="reduction")
def cumulative_sum(request: Request) -> Scheduled | None:
    """Accepts what `passes/canonicalize/cumsum_topk.py` writes: sums of all elements before, or up to, each.

    A task goes along the axis once, for up to `_COLUMNS` of the elements behind it side by side. Blocks of
    about the square root of the axis are summed by themselves, as the function says, so that few roundings
    add up.
    """
    function = request.function
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(rv) for rv in schedule.get_child_blocks(schedule.get_sblock("root"))]
    if len(blocks) != 2 or str(blocks[1].annotations.get("operator", "")) != CUMULATIVE_SUM:
        return None
    data, sums = function.params
    if 0 in (int(e) for e in data.shape):
        return None
    noted = blocks[1].annotations
    axis, block = int(noted["axis"]), int(noted["block"])
    body, buffers = _tasks(data, sums, axis, block, exclusive=bool(noted["exclusive"]))
    return finish(function_of(function, [data, sums], [body], buffers), cumulative_sum.__name__)


def _tasks(
    data: ir.Var, sums: ir.Var, axis: int, block: int, *, exclusive: bool
) -> tuple[tirx.Stmt, list[ir.Var]]:
    shape, dtype = [int(e) for e in data.shape], str(data.dtype)
    outer, extent, inner = shape[:axis], shape[axis], shape[axis + 1 :]
    width = min(math.prod(inner), _COLUMNS)
    before = tirx.decl_buffer((width,), dtype, "before")
    part = tirx.decl_buffer((width,), dtype, "part")
    zero = tirx.const(0, dtype)

    def task(point: Point) -> tirx.Stmt:
        *rows, chunk = point
        first = chunk * integer(width)
        count = width
        if math.prod(inner) % width:
            count = tirx.min(integer(width), integer(math.prod(inner)) - first)

        def clear(j: ir.Expr) -> tirx.Stmt:
            return sequence([tirx.BufferStore(before, zero, [j]), tirx.BufferStore(part, zero, [j])])

        def element(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
            at = [*rows, i, *unflattened(first + j, inner)]
            add = tirx.BufferStore(part, tirx.BufferLoad(part, [j]) + tirx.BufferLoad(data, at), [j])
            write = tirx.BufferStore(sums, tirx.BufferLoad(before, [j]) + tirx.BufferLoad(part, [j]), at)
            return sequence([write, add] if exclusive else [add, write])

        def end(j: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(before, [j]) + tirx.BufferLoad(part, [j])
            return sequence([tirx.BufferStore(before, total, [j]), tirx.BufferStore(part, zero, [j])])

        def one(number: ir.Expr) -> tirx.Stmt:
            begin = number * integer(block)
            length = block if extent % block == 0 else tirx.min(integer(block), integer(extent) - begin)
            steps = loop(length, lambda i: loop(count, lambda j: element(begin + i, j)))
            return sequence([steps, loop(count, end)])

        return sequence([loop(count, clear), loop(ceil_div(extent, block), one)])

    chunks = ceil_div(math.prod(inner), width)
    body = grid((*outer, chunks), task, parallel=math.prod(shape) >= PARALLEL_WORK)
    if not isinstance(body, tirx.For):  # what belongs to no loop would be allocated outside the function
        body = tirx.For(tirx.Var("i", INDEX), integer(0), integer(1), tirx.ForKind.SERIAL, body)
    return body, [before, part]
