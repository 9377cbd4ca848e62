"""Element-wise functions, and those that only move data: a thread for each output element."""

from __future__ import annotations

from tvm import s_tir

from hybridc.schedules.cuda.core.launch import cuda_target, finish
from hybridc.schedules.cuda.core.loops import inline_all, is_single_store, launch_alone
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="elementwise")
def elementwise(request: Request) -> Scheduled | None:
    """Accepts functions without a reduction: arithmetic, concat, split, slice, gather, resize, transpose.

    Everything is inlined into the outputs. They are bound by memory: neighbouring threads write
    neighbouring elements, and nothing is staged.
    """
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if not blocks or not all(info.is_injective() and is_single_store(schedule, info) for info in blocks):
        return None
    for info in blocks:
        launch_alone(schedule, info)
    return finish(schedule, "elementwise", cuda_target(request.target))
