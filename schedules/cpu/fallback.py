"""What no other rule takes: correct for every function, fast for none in particular."""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import ScheduleError

from hybridc.schedules.cpu.core.nest import result
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

# as PARALLEL_WORK: below it a parallel region costs more than it saves
PARALLEL_ITERATIONS = 1 << 15


@schedule_rule(family="other")
def fallback(request: Request) -> Scheduled | None:
    """Accepts everything: each block's leading spatial loops become parallel tasks where that is legal.

    Inner loops keep their order, so results are those of the unscheduled function; LLVM vectorises
    them where it can.
    """
    schedule = s_tir.Schedule(request.function)
    for rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        schedule = _parallelized(schedule, rv)
    return result(request, schedule, fallback.__name__)


def _parallelized(schedule: s_tir.Schedule, rv: s_tir.schedule.SBlockRV) -> s_tir.Schedule:
    loops = schedule.get_loops(rv)
    kinds = [int(v.iter_type) for v in schedule.get(rv).iter_vars]
    leading = 0
    while leading < min(len(kinds), len(loops)) and kinds[leading] == 0:
        leading += 1
    iterations = 1
    for loop in loops:
        extent = schedule.get(loop).extent
        # an extent known at run time only counts as large
        iterations *= int(extent) if hasattr(extent, "value") else PARALLEL_ITERATIONS
    if not leading or iterations < PARALLEL_ITERATIONS:
        return schedule
    # a primitive that fails leaves its schedule half changed
    attempt = schedule.copy()
    try:
        attempt.parallel(
            attempt.fuse(*attempt.get_loops(attempt.get_sblock(schedule.get(rv).name_hint))[:leading])
        )
    except ScheduleError:
        return schedule
    return attempt
