"""Rows that are rounded to 8-bit integers as they take their places among those of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import ir, tirx

from hybridc.appended_rows import MOST_CODE, SCALE_BYTES, is_appended_rows
from hybridc.schedules.cpu.attention.attention import across
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.places import differ, within
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of


@schedule_rule(family="elementwise")
def appended_integer_rows(request: Request) -> Scheduled | None:
    """Accepts `appended_integer_rows` of `hybridc/appended_rows.py`.

    The past is copied unless the result has its place in memory (`Kernel.may_overwrite`); then the new rows
    are written. A task is a row: its greatest magnitude, in lanes, then its integers and its scale.
    """
    if not is_appended_rows(request.function) or str(request.function.params[0].dtype) != "int8":
        return None
    past, new, before, result = request.function.params
    batch, heads, positions, width = shape_of(past)
    length, depth = shape_of(new)[2:]
    lanes = math.gcd(depth, request.target.isa.lanes())
    peaks = tirx.decl_buffer((lanes,), "float32", "peaks")
    steps = tirx.decl_buffer((1,), "float32", "steps")

    def copied(point: Sequence[ir.Expr]) -> tirx.Stmt:
        return loop(
            width, lambda j: tirx.BufferStore(result, tirx.BufferLoad(past, [*point, j]), [*point, j])
        )

    def placed(point: Sequence[ir.Expr]) -> tirx.Stmt:
        b, h, row = point
        first = tirx.BufferLoad(before, [b, *[integer(0)] * 3]).astype("int64")
        # checked where it is fed; so that the last word on the function finds nothing to add
        first = tirx.max(tirx.min(first, integer(positions - length)), integer(0))
        return _row(result, [b, h, first + row], new, point, peaks, steps)

    copy = grid((batch, heads, positions), copied, parallel=math.prod(shape_of(past)) >= PARALLEL_WORK)
    write = grid((batch, heads, length), placed, parallel=batch * heads * length * depth >= PARALLEL_WORK)
    body = within(sequence([tirx.IfThenElse(differ(past, result), copy, None), write]))
    function = function_of(request.function, request.function.params, [body], [peaks, steps])
    return finish(function, appended_integer_rows.__name__)


def _row(
    to: ir.Var,
    target: Sequence[ir.Expr],
    source: ir.Var,
    point: Sequence[ir.Expr],
    peaks: ir.Var,
    steps: ir.Var,
) -> tirx.Stmt:
    """Round a row: integers, and behind them the bytes of their scale."""
    depth, lanes = shape_of(source)[-1], int(peaks.shape[0])
    zero, most = tirx.FloatImm("float32", 0.0), tirx.FloatImm("float32", float(MOST_CODE))
    statements: list[tirx.Stmt] = []

    def named(value: ir.Expr) -> ir.Var:
        statements.append(tirx.Bind(var := tirx.Var("t", str(value.ty.dtype)), value))
        return var

    def start(lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(peaks, zero, [lane])

    def compare(at: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        magnitude = tirx.abs(tirx.BufferLoad(source, [*point, at]))
        return tirx.BufferStore(peaks, tirx.max(tirx.BufferLoad(peaks, [lane]), magnitude), [lane])

    def round_(at: ir.Expr, _: ir.Expr) -> tirx.Stmt:
        number = tirx.BufferLoad(source, [*point, at]) * tirx.BufferLoad(steps, [integer(0)])
        return tirx.BufferStore(to, tirx.nearbyint(number).astype("int8"), [*target, at])

    def each(body: Callable[[ir.Expr, ir.Expr], tirx.Stmt]) -> tirx.Stmt:
        def vector(number: ir.Expr) -> tirx.Stmt:
            return vectorized(lanes, lambda lane: body(number * integer(lanes) + lane, lane))

        return loop(depth // lanes, vector)

    every = tirx.Ramp(integer(0), integer(1), lanes) if lanes > 1 else integer(0)
    peak = named(across(tirx.BufferLoad(peaks, [every]), lanes, tirx.max, named))
    scale = tirx.reinterpret(f"int8x{SCALE_BYTES}", peak / most)
    place = tirx.Ramp(integer(depth), integer(1), SCALE_BYTES)
    return sequence(
        [
            vectorized(lanes, start),
            each(compare),
            *statements,
            tirx.BufferStore(steps, tirx.Select(peak > zero, most / peak, zero), [integer(0)]),
            each(round_),
            tirx.BufferStore(to, scale, [*target, place]),
        ]
    )
