"""Reductions of long rows to few results, several in a function: statistics and gradients of BatchNorm."""

from __future__ import annotations

import math

from tvm import s_tir
from tvm.s_tir.dlight.analysis import SBlockInfo

from hybridc.schedules.cuda.core.launch import BLOCK_THREADS, cuda_target, finish
from hybridc.schedules.cuda.core.loops import inline_all, launch_alone
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

LONG_ROW = 1 << 8
"""Elements from which on a block of threads shares a row."""


@schedule_rule(family="reduction")
def long_reductions(request: Request) -> Scheduled | None:
    """Accepts functions of several reductions, one of which has long rows, that no other rule takes.

    A launch for each block: of a long row each thread sums up its share, neighbours read neighbouring
    elements, and what they have meets in shared memory. Results between launches are in the workspace.
    """
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if not blocks or not any(_is_long(info) for info in blocks):
        return None
    try:
        for info in blocks:
            if _is_long(info):
                _share_rows(schedule, info)
            else:
                launch_alone(schedule, info)
    except s_tir.schedule.ScheduleError:
        return None
    return finish(schedule, long_reductions.__name__, cuda_target(request.target))


def _is_long(info: SBlockInfo) -> bool:
    """Whether it reduces rows worth sharing, with the axes of the result in front."""
    kinds = info.dom_kind()
    ordered = kinds == "S" * kinds.count("S") + "R" * kinds.count("R")
    return ordered and math.prod(int(i.dom) for i in info.iters if i.kind == "R") >= LONG_ROW


def _share_rows(schedule: s_tir.Schedule, info: SBlockInfo) -> None:
    block, kinds = info.block_rv, info.dom_kind()
    loops = list(schedule.get_loops(block))
    if "S" not in kinds:
        loops.insert(0, schedule.add_unit_loop(loops[0]))
    rows = schedule.fuse(*loops[: max(kinds.count("S"), 1)])
    reduced = schedule.fuse(*loops[max(kinds.count("S"), 1) :])
    # threads inside: neighbours read neighbouring elements
    _, thread = schedule.split(reduced, factors=[None, BLOCK_THREADS])
    schedule.bind(rows, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
