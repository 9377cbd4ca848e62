"""Rows that take their places among those of a cache: where it stays in place only they are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

from hybridc.appended_rows import is_appended_rows, rounds_rows
from hybridc.ir.graph import dtype_bits
from hybridc.schedules.conversion import converted
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    point_of,
    sequence,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish_function
from hybridc.schedules.cuda.core.vectors import VECTOR_BITS
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import shape_of

# A cache that stays in place needs none of them, so they must cost little where they have nothing to do.
_COPYING_BLOCKS = 64
"""Blocks that copy the past, at most, where the result has another place."""
_DIFFER = "hybridc_differ"
# Not inlined: the parameters are said not to alias, so a compiler might think that it knows the answer.
_SOURCE = f"""
static __device__ __attribute__((noinline)) int {_DIFFER}(const void* a, const void* b) {{ return a != b; }}
"""


Place = Callable[[ir.Expr], ir.Expr]
"""Where the first new row of a batch has its place."""


@schedule_rule(family="elementwise")
def appended_rows(request: Request) -> Scheduled | None:
    """Accepts `hybridc/appended_rows.py`: past [batch, heads, positions, depth], new, before and result; not
    where rows are rounded to integers.

    A thread writes a vector of the new rows, rounded where a cache has fewer bits. Where the result has
    another place in memory than the past (`Kernel.may_overwrite`), threads copy the other rows, each those
    that are a grid apart.
    """
    if not is_appended_rows(request.function) or rounds_rows(request.function):
        return None
    past, new, _, result = request.function.params
    if str(past.dtype) != str(result.dtype):
        return None
    *rows, depth = shape_of(new)
    width = math.gcd(depth, VECTOR_BITS // max(dtype_bits(str(p.dtype)) for p in (past, new)))
    added = [*rows, depth // width]

    def written(number: ir.Expr, first: Place) -> tirx.Stmt:
        point = point_of(number, added)
        write = moved(new, result, point, first(point[0]) + point[2], width)
        return when(number < integer(math.prod(added)), write)

    function = appending(KernelBuilder(request.function), width, math.prod(added), written)
    return finish_function(function, appended_rows.__name__, cuda_target(request.target))


def appending(
    builder: KernelBuilder, width: int, threads: int, written: Callable[[ir.Expr, Place], tirx.Stmt]
) -> tirx.PrimFunc:
    """The past is copied, in vectors of `width`, unless the result has its place in memory; `written` is what
    each of so many threads, by number, writes of the new rows. There may be more threads."""
    past, new, before, result = builder.original.params
    *rows, pitch = shape_of(past)
    positions, length, kept = rows[2], shape_of(new)[2], [*rows, pitch // width]
    needed, useful = (-(-count // BLOCK_THREADS) for count in (threads, math.prod(kept)))
    blocks = max(needed, min(_COPYING_BLOCKS, useful))

    def first(b: ir.Expr) -> ir.Expr:
        """The place of the first new row: checked where it is fed, and within the cache all the same."""
        place = tirx.BufferLoad(before, [b, *[integer(0)] * 3]).astype("int64")
        return tirx.max(tirx.min(place, integer(positions - length)), integer(0))

    def copied(number: ir.Expr) -> tirx.Stmt:
        point = point_of(number, kept)
        is_old = tirx.Or(point[2] < first(point[0]), point[2] >= first(point[0]) + integer(length))
        copy = moved(past, result, point, point[2], width)
        return when(tirx.And(number < integer(math.prod(kept)), is_old), copy)

    def of_thread(thread: Threads) -> tirx.Stmt:
        number = thread.block * integer(BLOCK_THREADS) + thread.x
        stride = blocks * BLOCK_THREADS
        turns = -(-math.prod(kept) // stride)
        copy = loop(turns, lambda turn: copied(turn * integer(stride) + number))
        # the likely case first: it is what the model of GPU times looks at
        in_place = tirx.IfThenElse(_differ(past, result).equal(0), tirx.Evaluate(0), copy)
        return sequence([in_place, written(number, first)])

    return builder.function([launch(blocks, BLOCK_THREADS, of_thread)])


def moved(source: ir.Var, result: ir.Var, point: Sequence[ir.Expr], row: ir.Expr, width: int) -> tirx.Stmt:
    """Copy a vector to a row of the result, in the type that it gets; `point` names its source, the last
    number that of a vector in its row."""
    b, h, source_row, vector = point

    def element(lane: ir.Expr) -> tirx.Stmt:
        at = vector * integer(width) + lane
        value = converted(tirx.BufferLoad(source, [b, h, source_row, at]), str(result.dtype))
        return tirx.BufferStore(result, value, [b, h, row, at])

    return vectorized(width, element)


def _differ(a: ir.Var, b: ir.Var) -> ir.Expr:
    """Whether two buffers begin at different places: an int32 that is not 0."""
    starts = [tirx.address_of(tirx.BufferLoad(each, [integer(0)] * len(each.shape))) for each in (a, b)]
    return cuda_func_call(_DIFFER, *starts, source_code=_SOURCE, return_type="int32")
