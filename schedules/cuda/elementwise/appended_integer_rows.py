"""Rows that are rounded to 8-bit integers as they take their places among those of a cache."""

from __future__ import annotations

import math

from tvm import ir, tirx

from hybridc.appended_rows import MOST_CODE, SCALE_BYTES, is_appended_rows, rounds_rows
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    integer,
    point_of,
    sequence,
    unrolled,
    when,
)
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.warps import combined_by_warp
from hybridc.schedules.cuda.elementwise.appended_rows import Place, appending
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of

_COPIED_BYTES = 4
"""At a time, where the past is copied: rows begin at multiples of no more."""


@schedule_rule(family="elementwise")
def appended_integer_rows(request: Request) -> Scheduled | None:
    """Accepts `appended_integer_rows` of `hybridc/appended_rows.py`, of any depth.

    A warp has a new row: its lanes hold every 32nd number of it, find the greatest magnitude together, and
    write a byte each, so that neighbours write neighbouring ones. The past is copied as `appended_rows` does
    it.
    """
    if not is_appended_rows(request.function) or not rounds_rows(request.function):
        return None
    builder = KernelBuilder(request.function)
    past, new, _, _ = request.function.params
    width = math.gcd(shape_of(past)[-1], _COPIED_BYTES)
    rows = math.prod(shape_of(new)[:-1])

    def written(number: ir.Expr, first: Place) -> tirx.Stmt:
        warp, lane = (op(number, integer(WARP)) for op in (tirx.floordiv, tirx.floormod))
        # all lanes of a warp have the same row
        return when(warp < integer(rows), _row(builder, warp, lane, first))

    function = appending(builder, width, rows * WARP, written)
    return finish_function(function, appended_integer_rows.__name__, cuda_target(request.target))


def _row(builder: KernelBuilder, number: ir.Expr, lane: ir.Expr, first: Place) -> tirx.Stmt:
    """Round a row, by number: integers, and behind them the bytes of their scale."""
    _, new, _, result = builder.original.params
    *rows, depth = shape_of(new)
    b, h, r = point_of(number, rows)
    place, pieces = [b, h, first(b) + r], -(-depth // WARP)
    numbers = builder.registers((pieces,), "float32", "numbers")
    peaks = builder.registers((1,), "float32", "peak")
    zero, most = tirx.FloatImm("float32", 0.0), tirx.FloatImm("float32", float(MOST_CODE))
    peak = tirx.BufferLoad(peaks, [integer(0)])

    def of_lane(piece: ir.Expr) -> ir.Expr:
        return piece * integer(WARP) + lane

    def exists(piece: ir.Expr, body: tirx.Stmt) -> tirx.Stmt:
        return when(of_lane(piece) < integer(depth), body, always=depth % WARP == 0)

    def load(piece: ir.Expr) -> tirx.Stmt:
        value = tirx.BufferLoad(new, [b, h, r, of_lane(piece)])
        value = value if str(new.dtype) == "float32" else tirx.Cast("float32", value)
        held = tirx.BufferLoad(numbers, [piece])
        greater = tirx.BufferStore(peaks, tirx.max(peak, tirx.abs(held)), [integer(0)])
        return exists(piece, sequence([tirx.BufferStore(numbers, value, [piece]), greater]))

    def round_(piece: ir.Expr) -> tirx.Stmt:
        step = tirx.Select(peak > zero, most / peak, zero)
        code = tirx.nearbyint(tirx.BufferLoad(numbers, [piece]) * step).astype("int8")
        return exists(piece, tirx.BufferStore(result, code, [*place, of_lane(piece)]))

    bits = tirx.reinterpret("uint32", peak / most)
    byte = (bits >> (lane * integer(8)).astype("uint32")).astype("int8")
    scale = tirx.BufferStore(result, byte, [*place, integer(depth) + lane])
    return sequence(
        [
            tirx.BufferStore(peaks, zero, [integer(0)]),
            unrolled(pieces, load),
            *combined_by_warp(peaks, tirx.max),
            unrolled(pieces, round_),
            when(lane < integer(SCALE_BYTES), scale),
        ]
    )
