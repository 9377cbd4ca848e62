"""Plans, the proof that they keep what they promise, and the functions that they run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hybridc.ir import Plan
from hybridc.ir.verify import verify
from hybridc.machines.verify_times import verify_times
from hybridc.passes.lower.lower import lower
from hybridc.passes.phases import (
    LoweredNetwork,
    PlannedNetwork,
    TiledNetwork,
)
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plans, plans_so_far
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES
from hybridc.passes.planner.robust import make_robust_plans
from hybridc.passes.planner.tighten_bound import with_tight_bound
from hybridc.passes.stages.searches import remembered_search, watched
from hybridc.progress import Progress


def plan_network(c: TiledNetwork, progress: Progress) -> PlannedNetwork:
    """The fastest plan for each budget. Raises PlanError HC201 or HC203 as `make_plans` does."""
    watch = c.job.watch
    if watch is not None and not watch.budgets:
        watch.begin((UNLIMITED_BYTES,), c.job.host_arena_bytes)
    make = make_robust_plans if c.job.options.robust else make_plans

    def search() -> tuple[tuple[Tiling, Plan], ...]:
        return remembered_search(
            c.job.cache,
            partial(make, report=progress.kernels, watch=watch),
            c.tilings,
            c.machine,
            c.budgets,
            c.job.devices,
            effort=Effort(c.job.options.plan_seconds),
            host_bytes=c.job.host_arena_bytes,
        )

    found = watched(watch, search, lambda watch: plans_so_far(watch, c.machine))
    chosen, plans = zip(*found, strict=True)
    planning = None if watch is None else watch.time()
    return PlannedNetwork(c.whole, c.tilings, c.all_gpu_peak_bytes, chosen, plans, planning)


def verify_network(c: PlannedNetwork, _: Progress) -> PlannedNetwork:
    """Raise PlanError HC210 to HC222 if a plan breaks what it promises."""
    for graph, plan in zip(c.graphs, c.plans, strict=True):
        verify(graph, plan)
        verify_times(graph, plan, c.machine)
    return c


def tighten_bounds(c: PlannedNetwork, seconds: float) -> PlannedNetwork:
    """With the best bounds on the times of its plans that `seconds` of a nominal machine find for each."""
    pairs = zip(c.chosen, c.plans, strict=True)
    return replace(c, plans=tuple(with_tight_bound(t, c.machine, plan, seconds) for t, plan in pairs))


def lower_network(c: PlannedNetwork, _: Progress) -> LoweredNetwork:
    """Collect the functions that the plans run, and bind the plans to them. Raises InternalError HC911."""
    lowered = lower(c.graphs, c.plans, c.library.scheduled, c.job.options.target)
    return LoweredNetwork(c.whole, c.tilings, c.all_gpu_peak_bytes, c.chosen, c.plans, c.planning, lowered)
