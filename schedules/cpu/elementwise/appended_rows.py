"""Rows that take their places among those of a cache: where it stays in place only they are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import ir, tirx

from hybridc.appended_rows import APPENDED_ROWS
from hybridc.schedules.conversion import converted
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish, read_nest
from hybridc.schedules.cpu.core.places import differ, within
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of


@schedule_rule(family="elementwise")
def appended_rows(request: Request) -> Scheduled | None:
    """Accepts `hybridc/appended_rows.py`: past [batch, heads, positions, depth], new, before and result.

    The past is copied unless the result has its place in memory (`Kernel.may_overwrite`); then the new rows
    are written, rounded where a cache has fewer bits. A task is a row.
    """
    nest = read_nest(request.function)
    if nest is None or [block.annotations.get("operator") for block in nest.blocks] != [APPENDED_ROWS]:
        return None
    _, new, _, result = request.function.params
    lanes = request.target.isa.lanes()

    def placed(target: Sequence[ir.Expr], point: Sequence[ir.Expr]) -> tirx.Stmt:
        return copied_row(result, target, new, point, lanes)

    return finish(appending(request, placed), appended_rows.__name__)


def appending(
    request: Request,
    placed: Callable[[Sequence[ir.Expr], Sequence[ir.Expr]], tirx.Stmt],
    workspace: Sequence[ir.Var] = (),
) -> tirx.PrimFunc:
    """The past is copied unless the result has its place in memory; then `placed` writes each new row, to a
    row of the result, from one of the new ones."""
    past, new, before, result = request.function.params
    lanes, positions, count = request.target.isa.lanes(), shape_of(past)[2], shape_of(new)[2]

    def copied(point: Sequence[ir.Expr]) -> tirx.Stmt:
        return copied_row(result, point, past, point, lanes)

    def written(point: Sequence[ir.Expr]) -> tirx.Stmt:
        b, h, row = point
        first = tirx.BufferLoad(before, [b, *[integer(0)] * 3]).astype("int64")
        # checked where it is fed; so that the last word on the function finds nothing to add
        first = tirx.max(tirx.min(first, integer(positions - count)), integer(0))
        return placed([b, h, first + row], point)

    copy, write = (
        grid(shape_of(rows)[:-1], body, parallel=math.prod(shape_of(rows)) >= PARALLEL_WORK)
        for rows, body in ((past, copied), (new, written))
    )
    body = within(sequence([tirx.IfThenElse(differ(past, result), copy, None), write]))
    return function_of(request.function, request.function.params, [body], list(workspace))


def copied_row(
    to: ir.Var, target: Sequence[ir.Expr], source: ir.Var, point: Sequence[ir.Expr], lanes: int
) -> tirx.Stmt:
    """Copy a row, in vectors and what is left, in the type that it gets."""
    whole, rest = divmod(shape_of(source)[-1], lanes)

    def vector(start: ir.Expr, width: int) -> tirx.Stmt:
        def element(lane: ir.Expr) -> tirx.Stmt:
            value = converted(tirx.BufferLoad(source, [*point, start + lane]), str(to.dtype))
            return tirx.BufferStore(to, value, [*target, start + lane])

        return vectorized(width, element)

    parts = [loop(whole, lambda i: vector(i * integer(lanes), lanes))] if whole else []
    return sequence([*parts, vector(integer(whole * lanes), rest)] if rest else parts)
