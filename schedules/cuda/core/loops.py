"""Loop transformations that several CUDA rules share."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range
from tvm.s_tir.dlight.analysis import SBlockInfo, normalize_prim_func
from tvm.s_tir.dlight.base import try_inline
from tvm.s_tir.schedule import LoopRV, SBlockRV

from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, WARP, reduces_nothing


def inline_all(schedule: s_tir.Schedule) -> list[SBlockInfo] | None:
    """Inline every block that can be, and return what is left; None if a block is not a plain loop nest."""
    blocks = normalize_prim_func(schedule)
    root = getattr(schedule.mod["main"].body, "block", None)
    if blocks and schedule.get(blocks[0].block_rv).same_as(root):
        return None  # statements without blocks of their own
    if blocks is None or reduces_nothing(schedule.mod["main"]):
        return blocks
    return try_inline(schedule, blocks)


def is_single_store(schedule: s_tir.Schedule, info: SBlockInfo) -> bool:
    """Whether a block writes one element an iteration; loops of its own inside a block are opaque."""
    return isinstance(schedule.get(info.block_rv).body, tirx.BufferStore)


def extent(schedule: s_tir.Schedule, loops: list[LoopRV]) -> int:
    """Iterations of a loop nest."""
    return math.prod(int(schedule.get(loop).extent) for loop in loops)


def extent_of(info: SBlockInfo, kind: str) -> int:
    """Iterations of a block's spatial (`S`) or reduction (`R`) axes."""
    return math.prod(int(each.dom) for each in info.iters if each.kind == kind)


def bind(schedule: s_tir.Schedule, loops: list[LoopRV], most: int = BLOCK_THREADS) -> LoopRV:
    """Spread loops over blocks of at most so many threads, neighbouring threads on neighbouring iterations of
    the last.

    Small nests take fewer threads, whole warps. Returns the loop of the threads.
    """
    loop = schedule.fuse(*loops)
    iterations = extent(schedule, [loop])
    # whole warps: a part of one takes as long
    threads = min(most, -(-iterations // WARP) * WARP)
    outer, inner = schedule.split(loop, factors=[None, threads])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return inner


def launched(blocks: int, threads: int, body: Callable[[tirx.Var, tirx.Var], tirx.Stmt]) -> tirx.Stmt:
    """One launch of so many blocks of threads; `body` takes the numbers of the block and of its thread.

    Loops that are to be unrolled become `#pragma unroll`, which keeps the source a twentieth of what
    unrolling in TVM makes of a tile of registers.
    """
    block, thread = tirx.Var("bx", "int64"), tirx.Var("tx", "int64")
    inner = _bound(thread, "threadIdx.x", threads, body(block, thread), {"pragma_unroll_explicit": 0})
    return _bound(block, "blockIdx.x", blocks, inner, {})


def _bound(
    var: tirx.Var, tag: str, extent: int, body: tirx.Stmt, annotations: Mapping[str, object]
) -> tirx.For:
    zero, threads = tirx.const(0, "int64"), tirx.const(extent, "int64")
    index = tirx.IterVar(Range(zero, threads), tirx.Var(tag, "int64"), tirx.IterVar.ThreadIndex, tag)
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(var, zero, threads, kind, body, index, annotations=dict(annotations))


def launch_alone(schedule: s_tir.Schedule, info: SBlockInfo, epilogue: SBlockRV | None = None) -> None:
    """One launch for one block: a thread for each spatial iteration, which reduces by itself.

    The result stays in a register where an `epilogue` uses it up in the same thread.
    """
    block = info.block_rv
    kinds = list(zip(schedule.get_loops(block), info.dom_kind(), strict=False))  # a scalar has no loops
    spatial = [loop for loop, kind in kinds if kind == "S"]
    serial = [loop for loop, kind in kinds if kind != "S"]
    if not spatial:
        # one result: a thread of its own, as every store needs one
        spatial = [schedule.add_unit_loop(serial[0] if serial else block)]
    schedule.reorder(*spatial, *serial)
    thread = bind(schedule, spatial, BLOCK_THREADS if epilogue is None else threads_apart(schedule, spatial))
    if epilogue is not None:
        for index in range(len(schedule.get(block).writes)):
            schedule.set_scope(block, index, "local")
        schedule.reverse_compute_at(epilogue, thread, preserve_unit_loops=True)
    if info.is_reduction() and serial:
        schedule.decompose_reduction(block, serial[0])


def thread_per_result(schedule: s_tir.Schedule, blocks: list[SBlockInfo]) -> bool:
    """One launch for a chain of reductions and what is made of their results.

    A thread owns one element of the reductions' results: it reduces into registers, then computes
    every output that depends on it (one for a convolution, a row for a softmax). Returns False, with
    the schedule in an unknown state, where results are not private to a thread.
    """
    try:
        return _thread_per_result(schedule, blocks)
    except s_tir.schedule.ScheduleError:
        return False


def _thread_per_result(schedule: s_tir.Schedule, blocks: list[SBlockInfo]) -> bool:
    last = blocks[-1]
    if len(blocks) == 1:
        launch_alone(schedule, last)
        return True
    if not last.is_injective():
        return False
    reduced = [write.source for info in blocks[:-1] for write in schedule.get(info.block_rv).writes]
    owned, swept = _split_loops(schedule, last, reduced)
    if not owned:
        return False
    if len(blocks) == 2 and not swept:
        launch_alone(schedule, blocks[0], last.block_rv)
        return True
    schedule.reorder(*owned, *swept)
    thread = bind(schedule, owned, _aligned_threads(schedule, owned))
    return all(_reduce_at(schedule, info, thread) for info in reversed(blocks[:-1]))


def threads_apart(schedule: s_tir.Schedule, loops: list[LoopRV]) -> int:
    """Threads of a block that are not just what some inner loops have together, as those of 16 x 16 results:
    TVM then names the number of the block in the epilogue alone, and no longer sees that both of a thread's
    blocks are of the same result."""
    together = set(itertools.accumulate((extent(schedule, [loop]) for loop in reversed(loops)), operator.mul))
    fitting = (BLOCK_THREADS >> halvings for halvings in range(3))
    return next((threads for threads in fitting if threads not in together), BLOCK_THREADS)


def _aligned_threads(schedule: s_tir.Schedule, loops: list[LoopRV]) -> int:
    """Threads of a block that divide what the innermost loops have together: TVM moves producers into a
    thread only where it can tell the loops of blocks and threads apart."""
    together = 1
    for loop in reversed(loops):
        together *= extent(schedule, [loop])
        if together >= 2 * WARP:
            break
    fitting = (t for t in range(BLOCK_THREADS, 2 * WARP - 1, -WARP) if together % t == 0)
    return next(fitting, BLOCK_THREADS)


def _split_loops(
    schedule: s_tir.Schedule, info: SBlockInfo, reduced: list[tirx.Var]
) -> tuple[list[LoopRV], list[LoopRV]]:
    """Loops of a block that select an element of the `reduced` buffers, and the others."""
    selecting: set[tirx.Var] = set()

    def add(var: tirx.Var) -> None:
        selecting.add(var)

    block = schedule.get(info.block_rv)
    for read in block.reads:
        if any(read.source.same_as(buffer) for buffer in reduced):
            for index in read.region:
                tvm_ffi.structural_walk(index.min, (tirx.Var, add), order="post")
    loops = list(zip(schedule.get_loops(info.block_rv), block.iter_vars, strict=False))  # a scalar has none
    owned = [loop for loop, iterator in loops if iterator.var in selecting]
    swept = [loop for loop, iterator in loops if iterator.var not in selecting]
    return owned, swept


def _reduce_at(schedule: s_tir.Schedule, info: SBlockInfo, thread: LoopRV) -> bool:
    """Move a producer into the thread that needs it; False if a thread would need several elements."""
    block = info.block_rv
    depth = len(schedule.get_loops(block))
    schedule.compute_at(block, thread, preserve_unit_loops=True)
    inner = schedule.get_loops(block)[-depth:]
    kinds = [i.iter_type for i in schedule.get(block).iter_vars]
    serial = [loop for loop, kind in zip(inner, kinds, strict=True) if kind == tirx.IterVar.CommReduce]
    spatial = [loop for loop, kind in zip(inner, kinds, strict=True) if kind == tirx.IterVar.DataPar]
    if len(serial) + len(spatial) != len(kinds) or extent(schedule, spatial) != 1:
        return False
    for index in range(len(schedule.get(block).writes)):
        schedule.set_scope(block, index, "local")
    if serial:
        schedule.reorder(*spatial, *serial)
        schedule.decompose_reduction(block, serial[0])
    return True
