"""Rows that are rounded to 8-bit integers as they take their places among those of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import ir, tirx

from hybridc.appended_rows import MOST_CODE, SCALE_BYTES, is_appended_rows, rounds_rows
from hybridc.schedules.conversion import converted
from hybridc.schedules.cpu.attention.attention import across
from hybridc.schedules.cpu.core.micro_kernel import integer, loop, sequence, vectorized
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.elementwise.appended_rows import appending
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of


@schedule_rule(family="elementwise")
def appended_integer_rows(request: Request) -> Scheduled | None:
    """Accepts `appended_integer_rows` of `hybridc/appended_rows.py`.

    The past is copied unless the result has its place in memory (`Kernel.may_overwrite`); then the new rows
    are written. A task is a row: its greatest magnitude, in lanes, then its integers and its scale.
    """
    if not is_appended_rows(request.function) or not rounds_rows(request.function):
        return None
    _, new, _, result = request.function.params
    lanes = math.gcd(shape_of(new)[-1], request.target.isa.lanes())
    peaks = tirx.decl_buffer((lanes,), "float32", "peaks")
    steps = tirx.decl_buffer((1,), "float32", "steps")

    def placed(target: Sequence[ir.Expr], point: Sequence[ir.Expr]) -> tirx.Stmt:
        return _row(result, target, new, point, peaks, steps)

    return finish(appending(request, placed, [peaks, steps]), appended_integer_rows.__name__)


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

    def loaded(at: ir.Expr) -> ir.Expr:
        return converted(tirx.BufferLoad(source, [*point, at]), "float32")

    def start(lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(peaks, zero, [lane])

    def compare(at: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        magnitude = tirx.abs(loaded(at))
        return tirx.BufferStore(peaks, tirx.max(tirx.BufferLoad(peaks, [lane]), magnitude), [lane])

    def round_(at: ir.Expr, _: ir.Expr) -> tirx.Stmt:
        number = loaded(at) * tirx.BufferLoad(steps, [integer(0)])
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
