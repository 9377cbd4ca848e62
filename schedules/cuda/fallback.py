"""Whatever no other rule takes: right for every function that has no call to the host."""

from __future__ import annotations

from tvm import s_tir

from hybridc.schedules.cuda.launch import cuda_target, finish
from hybridc.schedules.cuda.loops import inline_all, launch_alone
from hybridc.schedules.registry import Request, Scheduled


def fallback(request: Request) -> Scheduled | None:
    """Accepts everything: a launch for each block, with results between launches in the workspace."""
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if not blocks:
        return None
    for info in blocks:
        launch_alone(schedule, info)
    return finish(schedule, "fallback", cuda_target(request.target))
