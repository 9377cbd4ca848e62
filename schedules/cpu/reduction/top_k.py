"""The first elements of rows in sorted order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, s_tir, tirx

from hybridc.schedules.annotation import TOP_K
from hybridc.schedules.cpu.core.micro_kernel import (
    INDEX,
    PARALLEL_WORK,
    Point,
    function_of,
    grid,
    integer,
    loop,
    sequence,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="reduction")
def top_k(request: Request) -> Scheduled | None:
    """Accepts what `passes/canonicalize/cumsum_topk.py` writes: indices of the first k elements of an axis.

    A task is a row. It keeps the k first of the elements so far in order, and inserts what precedes the last
    of them: a comparison for each element, and k steps for each that is inserted, which are about
    k * log(n / k) of random data. Ranking each element among all, as the function says it, takes n * n.
    """
    function = request.function
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(rv) for rv in schedule.get_child_blocks(schedule.get_sblock("root"))]
    if len(blocks) != 2 or str(blocks[1].annotations.get("operator", "")) != TOP_K:
        return None
    data, places = function.params
    if 0 in (int(e) for buffer in (data, places) for e in buffer.shape):
        return None
    noted = blocks[1].annotations
    body, buffers = _rows(data, places, int(noted["axis"]), largest=bool(noted["largest"]))
    return finish(function_of(function, [data, places], [body], buffers), top_k.__name__)


def _rows(data: ir.Var, places: ir.Var, axis: int, *, largest: bool) -> tuple[tirx.Stmt, list[ir.Var]]:
    dtype, shape = str(data.dtype), [int(e) for e in data.shape]
    extent, k = shape[axis], int(places.shape[axis])
    best = tirx.decl_buffer((k,), dtype, "best")
    found = tirx.decl_buffer((k,), "int64", "found")
    place = tirx.decl_buffer((1,), "int64", "place")
    one, zero = integer(1), integer(0)
    inserted = tirx.BufferLoad(place, [zero])

    def precedes(a: ir.Expr, b: ir.Expr) -> ir.Expr:
        better, (more, less) = (a > b, (a, b)) if largest else (a < b, (b, a))
        if "float" not in dtype:
            return better
        return tirx.any(better, tirx.all(tirx.isnan(more), tirx.Not(tirx.isnan(less))))

    def row(point: Point) -> tirx.Stmt:
        def at(i: ir.Expr) -> Sequence[ir.Expr]:
            return [*point[:axis], i, *point[axis:]]

        def insert(i: ir.Expr, value: ir.Expr) -> tirx.Stmt:
            filled = tirx.min(i, integer(k))

            def count(j: ir.Expr) -> tirx.Stmt:
                # of equal elements the first in the row stays in front
                behind = precedes(value, tirx.BufferLoad(best, [j]))
                return tirx.BufferStore(place, inserted + tirx.Select(behind, zero, one), [zero])

            last = tirx.min(filled, integer(k - 1))

            def move(t: ir.Expr) -> tirx.Stmt:
                to, source = last - t, last - t - one
                return sequence(
                    [
                        tirx.BufferStore(best, tirx.BufferLoad(best, [source]), [to]),
                        tirx.BufferStore(found, tirx.BufferLoad(found, [source]), [to]),
                    ]
                )

            return sequence(
                [
                    tirx.BufferStore(place, zero, [zero]),
                    loop(filled, count),
                    loop(last - inserted, move),
                    tirx.BufferStore(best, value, [inserted]),
                    tirx.BufferStore(found, i, [inserted]),
                ]
            )

        def element(i: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(data, at(i))
            is_first = precedes(value, tirx.BufferLoad(best, [integer(k - 1)]))
            return tirx.IfThenElse(tirx.any(i < integer(k), is_first), insert(i, value), None)

        def begin(j: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(best, tirx.BufferLoad(data, at(zero)), [j])

        def write(j: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(places, tirx.BufferLoad(found, [j]), at(j))

        return sequence([loop(k, begin), loop(extent, element), loop(k, write)])

    others = [e for i, e in enumerate(shape) if i != axis]
    body = grid(others, row, parallel=math.prod(shape) >= PARALLEL_WORK)
    if not isinstance(body, tirx.For):  # what belongs to no loop would be allocated outside the function
        body = tirx.For(tirx.Var("i", INDEX), zero, one, tirx.ForKind.SERIAL, body)
    return body, [best, found, place]
