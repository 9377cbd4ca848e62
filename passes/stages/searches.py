"""Searches of the planner: from the cache where it has them, and ended by a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hybridc.compile_cache import Cache, content_of, remembered
from hybridc.errors import PlanError
from hybridc.machine import Machine
from hybridc.native import can_build
from hybridc.passes.phases import Job
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.other_ways import layer_split
from hybridc.passes.planner.search.partition import first_plans
from hybridc.passes.planner.watch import Stop, Watch

T = TypeVar("T")


def search_first_plans(job: Job, tiling: Tiling, machine: Machine, budgets: Sequence[int]) -> None:
    """Let the watch have plans of a tiling, unless every budget has one."""
    watch = job.watch
    if watch is None or watch.is_complete:
        return
    context = tiling.context(machine, Effort(), job.host_arena_bytes)
    with suppress(PlanError):  # it does not fit, but another may
        for placed in remembered_search(job.cache, first_plans, context, tuple(budgets)):
            watch.found(context, placed)
    if tiling.graph.caches and not tiling.pins:  # those above have all caches on the host
        for placed in filter(None, (layer_split(context, b) for b in budgets)):
            watch.found(context, placed)


def watched(watch: Watch | None, search: Callable[[], T], so_far: Callable[[Watch], T]) -> T:
    """What a search finds, or if the watch has ended it or does, what there is so far."""
    if watch is None:
        return search()
    try:
        with watch.searching():
            watch.check()
            return search()
    except Stop:
        return so_far(watch)


def remembered_search(cache: Cache, search: Callable[..., T], *problem: Any, **wishes: Any) -> T:
    """What a search of the planner finds, or what it found in this problem before."""

    def parts() -> Iterator[str]:
        # without g++ it evaluates far fewer plans
        yield content_of((getattr(search, "func", search).__name__, problem, wishes, can_build()))

    return remembered(cache, lambda: search(*problem, **wishes), parts())
