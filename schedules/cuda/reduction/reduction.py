"""Reductions and what is made of their results: pooling, mean, softmax, normalisation."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo
from tvm.s_tir.dlight.gpu import GeneralReduction, Reduction

from hybridc.schedules.cpu.core.nest import loads, read_nest
from hybridc.schedules.cuda.core.launch import WARP, by_dlight, cuda_target, finish
from hybridc.schedules.cuda.core.loops import extent_of, inline_all, thread_per_result
from hybridc.schedules.cuda.core.vectors import address_of, first_step, size_bytes
from hybridc.schedules.cuda.core.windows import windows_shared
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MANY_RESULTS = 1 << 16
"""With this many results a thread for each already fills a GPU."""


ACROSS = 1 << 14
"""The same where a row's elements do not lie side by side, but those of neighbouring rows do: threads that
share a row would read a sector for each element."""


@schedule_rule(family="reduction")
def reduction(request: Request) -> Scheduled | None:
    """Accepts a chain of reductions over the same rows, with element-wise work before and after.

    Long rows: a block of threads shares a row, keeps its sums in shared memory and computes the
    outputs of the row in the same launch. Short rows (a pooling window), or very many: a thread each, or for
    several windows that overlap.
    """
    schedule = s_tir.Schedule(request.function)
    blocks = inline_all(schedule)
    if not blocks or not any(info.is_reduction() for info in blocks):
        return None
    reductions = [info.name for info in blocks if info.is_reduction()]
    shared = windows_shared(request.function, reductions[0]) if len(reductions) == 1 else None
    if shared is not None:
        return finish(shared, "reduction", cuda_target(request.target))
    # shorter rows would leave threads of a warp idle
    enough = ACROSS if _is_across(request.function) else MANY_RESULTS
    if max(extent_of(info, "R") for info in blocks) >= WARP and _results(blocks) < enough:
        shared = by_dlight((Reduction(), GeneralReduction()), request, "reduction")
        if shared is not None:
            return shared
    if not thread_per_result(schedule, blocks):
        return None
    return finish(schedule, "reduction", cuda_target(request.target))


def _is_across(function: tirx.PrimFunc) -> bool:
    """Whether rows go through memory in steps of a sector or more, beside each other."""
    nest = read_nest(function)
    if nest is None or not nest.reductions:
        return False
    block = nest.reductions[0]
    found = sorted(loads(nest.inlined(block.value)), key=lambda load: -size_bytes(load.source))
    axes = [*block.spatial, *block.reduce]
    if not found or not block.spatial:
        return False
    steps = {v: abs(first_step(address_of(found[0]), v, axes)) for v in axes if block.extents[v] > 1}
    along = min((steps[v] for v in block.reduce if v in steps), default=0)
    return along >= WARP and any(steps.get(v) == 1 for v in block.spatial)


def _results(blocks: list[SBlockInfo]) -> int:
    return max(extent_of(info, "S") for info in blocks if info.is_reduction())
