"""Rows that stay as they are: nothing is done where a result has taken the place of its operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.checks import CHECKS
from hybridc.schedules.cpu.core.micro_kernel import (
    INDEX,
    PARALLEL_WORK,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish, read_nest, substitute, uses
from hybridc.schedules.cpu.core.places import differ, within
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of


@schedule_rule(family="elementwise")
def kept_rows(request: Request) -> Scheduled | None:
    """Accepts `where(mask, x, other)` whose mask is the same along the last axis, which fills a vector.

    So is a cache of keys and values of a decoder's step, of which a few rows are new. Rows of x are copied
    unless the result has x's place in memory (`Kernel.may_overwrite`); of the others a vector at a time is
    computed. Tasks are all axes but the last two.
    """
    nest = read_nest(request.function)
    if nest is None or nest.reductions or CHECKS in (request.function.attrs or {}):
        return None
    *inner, last = nest.blocks
    if nest.parameter(last.buffer) is None or any(nest.parameter(b.buffer) is not None for b in inner):
        return None
    shape, lanes = shape_of(last.buffer), request.target.isa.lanes()
    if len(shape) < 2 or 0 in shape or shape[-1] < lanes:
        return None
    point = [tirx.Var(f"i{axis}", INDEX) for axis in range(len(shape))]
    choice = nest.inlined(last.value_at(point))
    if not isinstance(choice, tirx.Select) or uses(choice.condition, point[-1]):
        return None
    kept = choice.true_value
    if not isinstance(kept, ir.TensorLoad) or nest.parameter(kept.source) is None:
        return None
    if shape_of(kept.source) != shape or str(kept.source.dtype) != str(last.buffer.dtype):
        return None
    if not all(index.same_as(at) for index, at in zip(kept.indices, point, strict=True)):
        return None
    body = within(_rows(_Rows(last.buffer, point, choice), lanes))
    return finish(function_of(request.function, request.function.params, [body], []), kept_rows.__name__)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a result, and what its element at a point is."""

    result: ir.Var
    point: Sequence[ir.Var]
    choice: tirx.Select

    def written(self, outer: Sequence[ir.Expr], value: ir.Expr, lanes: int) -> tirx.Stmt:
        """A row, in vectors and what is left."""
        whole, rest = divmod(shape_of(self.result)[-1], lanes)

        def vector(start: ir.Expr, width: int) -> tirx.Stmt:
            def element(lane: ir.Expr) -> tirx.Stmt:
                place = [*outer, start + lane]
                return tirx.BufferStore(self.result, self.at(place, value), place)

            return vectorized(width, element)

        parts = [loop(whole, lambda i: vector(i * integer(lanes), lanes))]
        return sequence([*parts, vector(integer(whole * lanes), rest)] if rest else parts)

    def at(self, place: Sequence[ir.Expr], expr: ir.Expr) -> ir.Expr:
        return substitute(expr, dict(zip(self.point, place, strict=True)))


def _rows(rows: _Rows, lanes: int) -> tirx.Stmt:
    shape, choice = shape_of(rows.result), rows.choice
    is_apart = tirx.Var("is_apart", "bool")

    def row(outer: Sequence[ir.Expr]) -> tirx.Stmt:
        copy = rows.written(outer, choice.true_value, lanes)
        copied = tirx.IfThenElse(is_apart, copy, None)
        other = rows.written(outer, choice.false_value, lanes)
        return tirx.IfThenElse(rows.at([*outer, integer(0)], choice.condition), copied, other)

    def task(outer: Sequence[ir.Expr]) -> tirx.Stmt:
        return loop(shape[-2], lambda i: row([*outer, i]))

    body = grid(shape[:-2], task, parallel=math.prod(shape) >= PARALLEL_WORK)
    return sequence([tirx.Bind(is_apart, differ(choice.true_value.source, rows.result)), body])
