"""Copies of every n-th element, a vector at a time."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer, loop, sequence
from hybridc.schedules.cpu.core.shuffles import picked

LARGEST_STRIDE = 8
"""A vector of every n-th element takes n - 1 shuffles: of more, loads one by one are no slower."""


def take_apart(
    stride: int,
    phases: int,
    columns: int,
    lanes: int,
    read: Callable[[ir.Expr], ir.Expr],
    write: Callable[[ir.Expr, ir.Expr, ir.Expr], tirx.Stmt],
) -> tirx.Stmt:
    """`write(phase, x, read(x * stride + phase))` for the first `phases` phases and `columns` values of x.

    `read` and `write` take float32, one by one or vectors, at an index or a ramp. Elements before
    `columns * stride` are read, whether a phase that is asked for has them or not.
    """
    vectors = columns // lanes if stride <= LARGEST_STRIDE else 0

    def vector(i: ir.Expr) -> tirx.Stmt:
        first = i * integer(lanes)
        start, statements, whole = first * integer(stride), list[tirx.Stmt](), list[ir.Expr]()
        for v in range(stride):
            statements.append(tirx.Bind(var := tirx.Var("v", f"float32x{lanes}"), read(
                tirx.Ramp(start + integer(v * lanes), integer(1), lanes))))  # fmt: skip
            whole.append(var)
        for phase in range(phases):
            places = [divmod(lane * stride + phase, lanes) for lane in range(lanes)]
            at = tirx.Ramp(first, integer(1), lanes)
            statements.append(write(integer(phase), at, picked(whole, places)))
        return sequence(statements)

    def rest(phase: ir.Expr) -> tirx.Stmt:
        def element(i: ir.Expr) -> tirx.Stmt:
            x = i + integer(vectors * lanes)
            return write(phase, x, read(x * integer(stride) + phase))

        return loop(columns - vectors * lanes, element)

    parts = [loop(vectors, vector)] if vectors else []
    if columns % lanes or not vectors:
        parts.append(loop(phases, rest))
    return sequence(parts)
