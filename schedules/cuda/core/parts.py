"""Sums of which several blocks of threads have parts, in one launch.

Each block writes its sums to workspace and counts itself. The last one of a tile adds them up in the order of
the parts, its own as well, so that no run differs from another, whichever block is the last (as the sample
threadFenceReduction of CUDA does). A tile's sums lie side by side, so that no two tiles share a line of L1.
"""

from __future__ import annotations

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

from hybridc.schedules.cpu.core.micro_kernel import integer, loop, unrolled, vectorized

MOST_TILES = 512
"""For which `hybridc/codegen/native/mma.h` has counters: more keep any GPU busy, and parts of them would take
much workspace."""
LAST_OF_PARTS = "last_of_parts"
_HEADER = "#include <hybridc/mma.h>\n"
_WIDTH = 4


def partial_sums(tiles: int, parts: int, threads: int, sums: int) -> ir.Var:
    """The workspace, for so many sums of each thread."""
    return tirx.decl_buffer((integer(tiles * parts * threads * sums),), "float32", "partial", layout=None)


def added_by_the_last(
    sums: ir.Var,
    partial: ir.Var,
    place: tuple[ir.Expr, ir.Expr, int],
    thread: tuple[ir.Expr, int],
    epilogue: tirx.Stmt,
) -> tirx.Stmt:
    """`epilogue` in the last block of a tile, in whose registers `sums` are then those of all parts.

    `place` are the number of the tile, that of the part, and how many parts there are; `thread` are the
    number of a thread and how many a block has. All threads of a block have to come here.
    """
    (tile, part, parts), (own, threads) = place, thread
    size = int(sums.shape[0])

    def at(number: ir.Expr, quad: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        line = (tile * integer(parts) + number) * integer(size // _WIDTH) + quad
        return [(line * integer(threads) + own) * integer(_WIDTH) + lane]

    def stored(quad: ir.Expr) -> tirx.Stmt:
        def one(lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(sums, [quad * integer(_WIDTH) + lane])
            return tirx.BufferStore(partial, value, at(part, quad, lane))

        return vectorized(_WIDTH, one)

    def added(number: ir.Expr) -> tirx.Stmt:
        def add(quad: ir.Expr) -> tirx.Stmt:
            def one(lane: ir.Expr) -> tirx.Stmt:
                spot = [quad * integer(_WIDTH) + lane]
                total = tirx.BufferLoad(sums, spot) + tirx.BufferLoad(partial, at(number, quad, lane))
                return tirx.BufferStore(sums, total, spot)

            return vectorized(_WIDTH, one)

        return unrolled(size // _WIDTH, add)

    def cleared(number: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(sums, tirx.FloatImm("float32", 0.0), [number])

    key = tirx.address_of(tirx.BufferLoad(partial, [tile * integer(parts * size * threads)]))
    is_last = cuda_func_call(
        LAST_OF_PARTS, key, tirx.Cast("int32", tile), tirx.IntImm("int32", parts),
        source_code=_HEADER, return_type="int32",
    )  # fmt: skip
    ending = tirx.SeqStmt([unrolled(size, cleared), loop(parts, added), epilogue])
    return tirx.SeqStmt([
        unrolled(size // _WIDTH, stored),
        tirx.IfThenElse(tirx.EQ(is_last, tirx.IntImm("int32", 1)), ending, None),
    ])  # fmt: skip
