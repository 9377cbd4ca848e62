"""The keys that a block of queries has to look at: up to the last one that a mask lets one of them see.

A decoder's cache has room for more positions than it holds, and of a prompt each query sees what stands
before it. What a mask hides weighs exactly zero, unless a query sees no key at all: then all may weigh the
same.

    of each row of the mask, a warp at a time: whether it sees any key, mostly one of the first
    from the last keys on, until one is seen: all rows of the warp
    the greatest of the block

So a mask that hides nothing costs two looks at each row, and keys that were looked at in vain cost no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, tirx

from hybridc.schedules.cpu.core.attention import AttentionBlocks
from hybridc.schedules.cpu.core.micro_kernel import ceil_div
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    loop,
    sequence,
    unrolled,
)
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.core.warps import combined_by_block, combined_by_warp

_LOOKS = 4
"""Keys that a lane looks at before the warp says what it has seen."""
_WORTH_KEYS = 256
"""By machine code, looking at the first and the last takes 3 % of attention to 512, to 128 up to 20."""


def tiles_of_seen_keys(
    builder: KernelBuilder,
    found: AttentionBlocks,
    block: tuple[Sequence[ir.Expr], ir.Expr, int],
    keys: int,
    thread: Threads,
    threads: int,
) -> tuple[list[tirx.Stmt], int | ir.Expr]:
    """What finds how many tiles of so many keys a block has to go through, and that number.

    `block` is its batch, its first query and how many it has, of which some may not exist; it has `threads`
    in one dimension. All tiles, and nothing to find, where no mask hides keys.
    """
    tiles, mask = ceil_div(found.columns, keys), found.hiding_mask
    if mask is None or found.columns < _WORTH_KEYS:
        return [], tiles
    batch, first, count = block
    warps, chunk = threads // WARP, _LOOKS * WARP
    chunks = ceil_div(found.columns, chunk)
    count = min(count, found.lines(mask)[-1])
    warp, lane = (op(thread.x, integer(WARP)) for op in (tirx.floordiv, tirx.floormod))
    names = "last_seen", "own_last_seen", "sees_none"
    last, own, unseen = (builder.registers((1,), "int32", name) for name in names)
    at, none = [integer(0)], tirx.const(0, "int32")
    nothing = tirx.Evaluate(0)
    is_found = tirx.BufferLoad(last, at) > none

    def look(row: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """At some keys of a row, by the number of the warp's rows."""
        query = tirx.min(first + row * integer(warps) + warp, integer(found.rows - 1))

        def key(turn: ir.Expr) -> tirx.Stmt:
            place = number * integer(chunk) + turn * integer(WARP) + lane
            known = tirx.min(place, integer(found.columns - 1))
            hides = found.hides(mask, (*batch, query, known))
            behind = tirx.Select(hides, none, known.astype("int32") + tirx.const(1, "int32"))
            return tirx.BufferStore(last, tirx.max(tirx.BufferLoad(last, at), behind), at)

        return unrolled(_LOOKS, key)

    def in_warp(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
        return sequence([*statements, *combined_by_warp(last, tirx.max)])

    def unless_found(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
        # the likely case first: it is what the model of GPU times looks at
        return tirx.IfThenElse(is_found, nothing, in_warp(statements))

    def sees(row: ir.Expr) -> tirx.Stmt:
        def further(number: ir.Expr) -> tirx.Stmt:
            return unless_found([look(row, number + integer(1))])

        others = [loop(chunks - 1, further)] if chunks > 1 else []
        missed = tirx.BufferStore(unseen, tirx.const(1, "int32"), at)
        start = tirx.BufferStore(last, none, at)
        return sequence(
            [start, in_warp([look(row, integer(0))]), *others, tirx.IfThenElse(is_found, nothing, missed)]
        )

    def back(turn: ir.Expr) -> tirx.Stmt:
        number = integer(chunks - 1) - turn
        return unless_found([loop(ceil_div(count, warps), lambda row: look(row, number))])

    every = tirx.const(found.columns, "int32")
    sees_none = tirx.BufferLoad(unseen, at) > none
    statements = [
        tirx.BufferStore(unseen, none, at),
        loop(ceil_div(count, warps), sees),
        tirx.BufferStore(last, tirx.Select(sees_none, every, none), at),
        loop(chunks, back),
        tirx.BufferStore(own, tirx.BufferLoad(last, at), at),
        *combined_by_block(builder, last, tirx.max, thread, threads),
    ]
    # the warp's own changes nothing, but what reads machine code does not know what shared memory holds
    behind = tirx.max(tirx.BufferLoad(last, at), tirx.BufferLoad(own, at)).astype("int64")
    return statements, tirx.min(tirx.floordiv(behind + integer(keys - 1), integer(keys)), integer(tiles))
