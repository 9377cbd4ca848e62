"""Caches on the GPU: how many of them, and a plan of what is left of the memory beside them.

The search plans with all caches on the host (`model/caches.py`). A number of them on the GPU, those that are
needed first, takes their bytes for the whole run and has all that touches them run there. What that does to
the rest of the plan only a search tells, so a short one weighs each number, and the best is searched for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Run
from hybridc.passes.planner.emit.materialize import PlacedPlan, repacked, without_copies
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.model.caches import CacheGroup, cache_groups
from hybridc.passes.planner.model.context import PlanningContext, Unheard
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.other_ways import layer_split
from hybridc.passes.planner.search.partition import partition, problem_bound_us, rough_time_us

# Each costs a short search. Layers are alike, so the time changes little from one number to the next.
_SHARES = 8
"""Numbers of caches that are weighed, evenly spaced, beside none."""
# A search takes seconds, and short ones differ by as much as this.
_LEAST_GAIN = 0.01
"""Share of the time that caches on the GPU must save, by the short searches."""
# Buffers of the whole run leave holes in the arena.
_PACKING_SHARES = (1.0, 0.95, 0.85)
"""Of the memory beside the caches, with which a plan is searched for until it fits."""
_SEARCHES = 3
"""Numbers of caches, the best by the short searches, of which one that fits is looked for."""


def with_gpu_caches(
    context: PlanningContext, pins: Pins, placed: PlacedPlan, budget_bytes: int
) -> PlacedPlan:
    """The faster one of a plan with all caches on the host, and one with some of them on the GPU.

    `pins` are the user's alone. Ensures: no cache is copied in a run, unless pins have it on the GPU, and
    there is no room for it. Without pins it is no slower than a split in whole layers.
    """
    found = _searched(context, pins, placed, budget_bytes)
    split = None if pins else layer_split(replace(context, pins=NO_PINS), budget_bytes)
    return found if split is None or split.makespan_us >= found.makespan_us else split


def _searched(context: PlanningContext, pins: Pins, placed: PlacedPlan, budget_bytes: int) -> PlacedPlan:
    groups = _gpu_groups(context, pins)
    if not groups:
        return placed
    forced = sum(Device.CPU not in each.devices(context.graph, pins) for each in groups)
    counts = {forced + round((len(groups) - forced) * part / _SHARES) for part in range(_SHARES + 1)}
    trials = {count: _beside(context, groups[:count], budget_bytes) for count in counts}
    times_us = {n: rough_time_us(*trial) if trial[1] > 0 else math.inf for n, trial in trials.items()}
    for count in sorted(counts, key=lambda n: (times_us[n], n))[:_SEARCHES]:
        if not count or times_us[count] >= (1 - _LEAST_GAIN) * times_us.get(0, math.inf):
            break  # with none of them on the GPU it is the plan that there is
        found = next(_placed(context, groups[:count], *trials[count], budget_bytes), None)
        if found is not None:
            # where pins want some of them there, the plan that there is copies these in each run
            is_faster = forced or found.makespan_us < placed.makespan_us
            return found if is_faster and found.fits_host(context.host_bytes) else placed
    return placed


def cache_bound_us(context: PlanningContext, pins: Pins, budget_bytes: int) -> float:
    """What no plan is faster than, wherever the caches lie that the user's pins do not bind to a device.

    A cache on the GPU holds its bytes throughout. Those that pins have there may be copied in each run if
    there is no room: they are taken to hold nothing.
    """
    graph, groups = context.graph, _gpu_groups(context, pins)
    names = {name for each in groups for name in each.names}
    free = replace(context, graph=without_bytes(graph, names), pins=pins)
    return problem_bound_us(_with_caches(free.problem, graph, groups, pins), budget_bytes)


def _with_caches(problem: Problem, graph: Graph, groups: Sequence[CacheGroup], pins: Pins) -> Problem:
    """With a weight that stays for the caches of each group that may lie on either device.

    Requires: the problem is of the graph, in which the caches themselves have no bytes.
    """
    either = [each for each in groups if Device.CPU in each.devices(graph, pins)]
    first, inputs = len(problem.tensor_names), list(problem.inputs)
    for number, group in enumerate(either, first):
        users = {graph.kernels[position].name for position in group.kernels}
        for place, name in enumerate(problem.kernel_names):
            if name in users:
                inputs[place] = (*inputs[place], number)
    sizes = [each.size_bytes(graph) for each in either]
    # nothing copies them, and at the rate of the fastest copy they say nothing new of the link
    rates = [size / us for size, us in zip(problem.size_bytes, problem.h2d_us, strict=True) if size and us]
    copy_us = [size / max(rates, default=1.0) for size in sizes]
    return replace(
        problem,
        tensor_names=(*problem.tensor_names, *(f"caches with {each.pairs[0][0]}" for each in either)),
        inputs=tuple(inputs),
        size_bytes=(*problem.size_bytes, *sizes),
        h2d_us=(*problem.h2d_us, *copy_us),
        d2h_us=(*problem.d2h_us, *copy_us),
        is_weight=(*problem.is_weight, *(True for _ in either)),
        wanted_on_host=(*problem.wanted_on_host, *(False for _ in either)),
        stays=frozenset(range(first, first + len(either))),
    )


def _gpu_groups(context: PlanningContext, pins: Pins) -> list[CacheGroup]:
    """The caches that may be on the GPU, those first that have to, then the last ones.

    A run then begins with attention on the CPU, beside which weights are fetched for the rest.
    """
    found = [(each, each.devices(context.graph, pins)) for each in cache_groups(context.graph)]
    possible = [(each, where) for each, where in found if Device.GPU in where]
    return [each for each, _ in sorted(reversed(possible), key=lambda pair: Device.CPU in pair[1])]


def _beside(
    context: PlanningContext, groups: Sequence[CacheGroup], budget_bytes: int
) -> tuple[PlanningContext, int]:
    """What is planned with these caches on the GPU, and in how many bytes.

    Without their bytes caches cost nothing to copy, so that the search plans as if they were there.
    """
    graph, names = context.graph, {name for each in groups for name in each.names}
    pins = {**context.pins, **{k: d for each in groups for k, d in each.pins(graph, Device.GPU).items()}}
    beside = replace(context, graph=without_bytes(graph, names), pins=pins, watch=Unheard(context.watch))
    return beside, budget_bytes - sum(each.size_bytes(graph) for each in groups)


def _placed(
    context: PlanningContext,
    groups: Sequence[CacheGroup],
    beside: PlanningContext,
    left_bytes: int,
    budget_bytes: int,
) -> Iterator[PlacedPlan]:
    """Plans with these caches on the GPU that fit the budget."""
    names = {name for each in groups for name in each.names}
    for share in _PACKING_SHARES:
        with suppress(PlanError):  # no room beside the caches
            [found] = partition(beside, (int(left_bytes * share),))
            if not _changes_each_once(context.graph, found, groups):
                continue
            kept = without_copies(context, found, names, budget_bytes)
            if kept.gpu_bytes <= budget_bytes:
                yield repacked(context, kept, context.effort.packing)


def _changes_each_once(graph: Graph, placed: PlacedPlan, groups: Sequence[CacheGroup]) -> bool:
    """Whether what replaces rows of these caches runs once: the second time their old values are gone."""
    runs = Counter(step.kernel for step in placed.listed if isinstance(step, Run))
    return all(runs[graph.kernels[graph.producer[new]].name] == 1 for each in groups for _, new in each.pairs)
