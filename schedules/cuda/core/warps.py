"""Results that the threads of a warp or block combine, and all of them then have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx
from tvm.tirx.op import tvm_warp_shuffle_xor

from hybridc.schedules.cuda.core.kernel import KernelBuilder, Threads, integer, loop, sequence, when
from hybridc.schedules.cuda.core.launch import WARP

Combine = Callable[[ir.Expr, ir.Expr], ir.Expr]
_WHOLE_WARP = tirx.const(0xFFFFFFFF, "uint32")


def combined_by_lanes(
    place: ir.Var, index: ir.Expr, combine: Combine, distances: Sequence[int]
) -> list[tirx.Stmt]:
    """Give lanes whose numbers differ in the bits `distances` what all of them have in `place[index]`, in an
    order that is always the same."""
    statements: list[tirx.Stmt] = []
    for distance in distances:
        own = tirx.BufferLoad(place, [index])
        lane_mask, warp = tirx.const(distance, "int32"), tirx.const(WARP, "int32")
        other = tvm_warp_shuffle_xor(_WHOLE_WARP, own, lane_mask, warp, warp)
        statements.append(tirx.BufferStore(place, combine(own, other), [index]))
    return statements


def combined_by_warp(place: ir.Var, combine: Combine) -> list[tirx.Stmt]:
    """Give every lane what all lanes of its warp have in `place[0]`."""
    return combined_by_lanes(place, integer(0), combine, (16, 8, 4, 2, 1))


def combined_by_block(
    builder: KernelBuilder, place: ir.Var, combine: Combine, thread: Threads, threads: int
) -> list[tirx.Stmt]:
    """The same among all warps of a block of one dimension."""
    within = combined_by_warp(place, combine)
    warps = threads // WARP
    if warps == 1:
        return within
    shared = builder.shared((warps,), str(place.dtype), "of_warps")
    own = tirx.BufferLoad(place, [integer(0)])
    is_first = tirx.floormod(thread.x, integer(WARP)).equal(integer(0))
    share = tirx.BufferStore(shared, own, [tirx.floordiv(thread.x, integer(WARP))])
    first = tirx.BufferStore(place, tirx.BufferLoad(shared, [integer(0)]), [integer(0)])

    def add(warp: ir.Expr) -> tirx.Stmt:
        other = tirx.BufferLoad(shared, [warp + integer(1)])
        return tirx.BufferStore(place, combine(own, other), [integer(0)])

    return [*within, when(is_first, share), sequence([first, loop(warps - 1, add)])]
