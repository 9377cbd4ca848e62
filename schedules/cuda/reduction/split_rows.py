"""Reductions of few long rows, which blocks of threads share."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.dlight.analysis import SBlockInfo

from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish
from hybridc.schedules.cuda.core.loops import bind, extent_of, inline_all
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

BLOCKS = 512
"""That keep every multiprocessor of a GPU busy."""
LEAST_PART = 1 << 12
"""Elements of a part of a row: 16 of each thread of a block."""


@schedule_rule(family="reduction")
def split_rows(request: Request) -> Scheduled | None:
    """Accepts one reduction of long rows to few results, and element-wise work behind it.

    Two launches: a block of threads reduces each part of a row, neighbours read neighbouring elements; then a
    thread reduces a row's parts, in their order, so that no run differs.
    """
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if not blocks or not blocks[0].is_reduction() or len(blocks) > 2:
        return None
    kinds = blocks[0].dom_kind()
    results, length = (extent_of(blocks[0], kind) for kind in "SR")
    # what is made of a row's elements would read it again
    if any(not info.is_injective() or extent_of(info, "S") != results for info in blocks[1:]):
        return None
    parts = min(BLOCKS // results, length // LEAST_PART)
    if parts < 2 or kinds != "S" * kinds.count("S") + "R" * kinds.count("R"):
        return None
    made = attempt(split_rows.__name__, lambda: _split(schedule, blocks, kinds.count("S"), parts))
    return finish(schedule, split_rows.__name__, cuda_target(request.target)) if made else None


def _split(schedule: s_tir.Schedule, blocks: list[SBlockInfo], spatial: int, parts: int) -> bool:
    sums = blocks[0].block_rv
    if not spatial:
        schedule.add_unit_loop(schedule.get_loops(sums)[0])
    axes = max(spatial, 1)
    part, _ = schedule.split(schedule.fuse(*schedule.get_loops(sums)[axes:]), [parts, None])
    partial = schedule.rfactor(part, 0)

    *outer, rest = schedule.get_loops(partial)
    _, thread = schedule.split(rest, [None, BLOCK_THREADS])
    schedule.bind(schedule.fuse(*outer), "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")

    *outer, part = schedule.get_loops(sums)
    result = bind(schedule, outer)
    for info in blocks[1:]:
        schedule.set_scope(sums, 0, "local")
        schedule.reverse_compute_at(info.block_rv, result, preserve_unit_loops=True)
    schedule.decompose_reduction(sums, part)
    return True
