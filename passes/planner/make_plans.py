"""From graphs of a network, a machine and budgets to plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hybridc.errors import PlanError
from hybridc.ir import Arena, Buffer, Device, Graph, Plan, Step
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.planner.bounds.bound import ROUNDING
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.emit.materialize import PlacedPlan
from hybridc.passes.planner.emit.resident_states import gpu_users, with_gpu_resident_states, without_bytes
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.gpu_caches import cache_bound_us, with_gpu_caches
from hybridc.passes.planner.model.context import UNWATCHED, Effort, PlanningContext, Watcher
from hybridc.passes.planner.model.cost import step_times_us
from hybridc.passes.planner.model.order import renewing_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES
from hybridc.passes.planner.search.partition import (
    MOST_GRID_KERNELS,
    is_searched_briefly,
    least_bytes,
    on_cpu,
    partition,
    time_bound_us,
)
from hybridc.passes.planner.search.search import MOST_ROUNDED_KERNELS
from hybridc.passes.planner.side_by_side import side_by_side_plan
from hybridc.passes.planner.watch import Watch

Report = Callable[[int, int], None]
"""Hears how far a search has come: (done, total) budgets."""


def make_plan(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    devices: Sequence[Device],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
) -> Plan:
    """`make_plans` of one graph for one budget in bytes; None means no limit."""
    budgets = () if budget_bytes is None else (budget_bytes,)
    [(_, plan)] = make_plans((Tiling(graph, pins),), machine, budgets, devices, effort=effort)
    return plan


def make_plans(
    tilings: Sequence[Tiling],
    machine: Machine,
    budgets: Sequence[int],
    devices: Sequence[Device],
    *,
    effort: Effort | None = None,
    host_bytes: int | None = None,
    report: Report = lambda done, total: None,
    watch: Watch | None = None,
) -> tuple[tuple[Tiling, Plan], ...]:
    """The fastest plan for each of several budgets, and the way the network is cut up for it.

    `devices` are those of a target: `(CPU,)` or `(GPU, CPU)`. A budget limits the GPU's arena, its weights
    included, in bytes; without budgets there is one plan, which has no limit. Plans
    for a GPU whose host arena exceeds `host_bytes` are made only if no other is found. What `watch` ends by
    `Stop` has its plans in `plans_so_far`. Effort is spent on several searches, one after the other, of which
    the best plan is taken.
    Ensures: never slower with more effort from two seconds on, of graphs that are not searched briefly;
    the same for a budget whatever others are asked for, and never slower for a larger one, if the
    tilings are from `choose_tilings`. Raises PlanError HC201 if a kernel has code for none of the devices,
    HC203 if nothing fits a budget, with the smallest that can be met.
    """
    effort = effort or Effort()
    whole, sides = tilings[0], [tiling for tiling in tilings if tiling.second]
    tilings = [tiling for tiling in tilings if not tiling.second]
    if Device.GPU not in devices:
        placed = on_cpu(whole.graph, machine)
        return tuple((whole, _plan_of(whole.graph, machine, None, placed)) for _ in budgets or (None,))
    watcher = watch or UNWATCHED
    if not budgets:
        unlimited = []
        for tiling in tilings:
            context = tiling.context(machine, effort, host_bytes, watcher)
            (placed,) = partition(context, (UNLIMITED_BYTES,), report=report)
            unlimited.append(_with_states(_Candidate(tiling, context, placed), UNLIMITED_BYTES))
        first = min(unlimited, key=lambda c: c.rank)
        return ((first.tiling, _plan_of(first.tiling.graph, machine, None, first.placed)),)
    bounds = _Bounds(tuple((t, t.context(machine, effort, host_bytes)) for t in tilings))
    if watch is not None and not whole.graph.caches:  # what is searched for has caches on the host
        for b in budgets:
            watch.bounded(b, bounds.least_us(b))
    beside = _side_by_side(sides, machine, budgets, effort, host_bytes, watcher)
    # the search for others takes most of the time
    left = [b for b in budgets if b not in beside or not _is_unbeaten(beside[b], b, bounds)]
    best: dict[int, _Candidate] = {}
    rungs = _rungs(tilings, effort) if left else ()
    for rung in rungs:
        efforts = (effort if _is_brief(t) else rung for t in tilings)
        contexts = [t.context(machine, e, host_bytes, watcher) for t, e in zip(tilings, efforts, strict=True)]
        best = _fastest(tilings, contexts, left, best, bounds, report, is_last=rung is rungs[-1])
    found = _fastest_of_each(budgets, _all_with_states(best), beside)
    return tuple((c.tiling, _plan_of(c.tiling.graph, machine, b, c.placed)) for b, c in found.items())


def _is_brief(tiling: Tiling) -> bool:
    """Whether there is one brief search of a tiling, with all of the effort."""
    return is_searched_briefly(tiling.graph, is_cut_up=tiling.is_cut_up)


def _rungs(tilings: Sequence[Tiling], effort: Effort) -> tuple[Effort, ...]:
    """Efforts of the searches: of large graphs, where a single plan takes long, one search."""
    is_large = any(len(tiling.graph.kernels) > MOST_GRID_KERNELS for tiling in tilings)
    return (effort,) if is_large else effort.rungs


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan that may be the best for a budget."""

    tiling: Tiling
    context: PlanningContext
    placed: PlacedPlan

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Smaller is better: within the host's memory, then fast, then with kernels that are cut up less."""
        is_too_large = not self.placed.fits_host(self.context.host_bytes)
        return is_too_large, self.placed.makespan_us, -self.tiling.limit_bytes


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What no plan of a tiling is faster than, in any of the searches."""

    contexts: tuple[tuple[Tiling, PlanningContext], ...]
    _known_us: dict[tuple[int, int], float] = field(default_factory=dict)

    def least_us(self, budget_bytes: int) -> float:
        """Of the plans of all tilings for a budget."""
        least_us = math.inf
        for number in range(len(self.contexts)):
            least_us = min(least_us, self.time_us(number, budget_bytes, least_us))
        return least_us

    def time_us(self, number: int, budget_bytes: int, enough_us: float) -> float:
        """Of the plans of a tiling, by its number, for a budget. One that takes no time will do if it exceeds
        `enough_us`."""
        tiling, context = self.contexts[number]
        key = number, min(budget_bytes, tiling.last_bytes)
        if key not in self._known_us:
            quick_us = time_bound_us(context, key[1], quick=True)
            # of more it would take longer than the search that it may spare
            is_large = tiling.is_cut_up and len(tiling.graph.kernels) > MOST_ROUNDED_KERNELS
            if is_large or quick_us > enough_us:
                return quick_us
            self._known_us[key] = time_bound_us(context, key[1])
        return self._known_us[key]


def _fastest(
    tilings: Sequence[Tiling],
    contexts: Sequence[PlanningContext],
    budgets: Sequence[int],
    known: Mapping[int, _Candidate],
    bounds: _Bounds,
    report: Report,
    *,
    is_last: bool,
) -> dict[int, _Candidate]:
    """The best for each budget, of those known from an earlier search and those found, if any is.

    What cannot be better, by its bound, is not searched for; where even a brief search takes long there is
    only the last one.
    """
    best = dict(known)
    # where no tiling is for a budget the one that needs least is searched for all the same, if only to say so
    below = [b for b in budgets if b < min(tiling.first_bytes for tiling in tilings)]
    least = min(range(len(tilings)), key=lambda n: least_bytes(contexts[n])) if below else None

    def is_hopeless(number: int, b: int) -> bool:
        if b not in best:
            return False
        bound_us = bounds.time_us(number, b, best[b].placed.makespan_us * (1 + ROUNDING))
        if best[b] is not known.get(b):
            return best[b].rank < (False, bound_us * (1 + ROUNDING))
        if tilings[number] is best[b].tiling:
            bound_us = max(bound_us, best[b].placed.bound_us)  # the exact solver may have proven more
        return best[b].rank <= (False, bound_us * (1 + ROUNDING), -tilings[number].limit_bytes)

    for number in sorted(range(len(tilings)), key=lambda n: (-tilings[n].last_bytes, tilings[n].limit_bytes)):
        tiling, context = tilings[number], contexts[number]
        if _is_brief(tiling) and not is_last:
            continue
        suited = [b for b in budgets if tiling.first_bytes <= b]
        for first_bytes, some in ((tiling.first_bytes, suited), (0, below if number == least else ())):
            wanted = [b for b in some if not is_hopeless(number, b)]
            if not wanted:
                continue
            plans = partition(
                context,
                wanted,
                known_us={b: found.placed.makespan_us for b, found in best.items() if not found.rank[0]},
                first_bytes=first_bytes,
                last_bytes=tiling.last_bytes,
                is_cut_up=tiling.is_cut_up,
                has_bounds=len(tiling.graph.kernels) <= LARGEST_KERNEL_COUNT,  # quick, and may be proven
                report=report,
            )
            for b, placed in zip(wanted, plans, strict=True):
                candidate = _Candidate(tiling, context, placed)
                best[b] = _better(best[b], candidate) if b in best else candidate
    return {b: _bounded(best[b], b) for b in budgets if b in best}


def _better(known: _Candidate, found: _Candidate) -> _Candidate:
    """The better of two, with what either search has proven of the tiling if both are of the same."""
    taken = found if found.rank < known.rank else known
    if known.tiling is not found.tiling:
        return taken
    bound_us = min(max(known.placed.bound_us, found.placed.bound_us), taken.placed.makespan_us)
    return replace(taken, placed=replace(taken.placed, bound_us=bound_us))


def _bounded(candidate: _Candidate, budget_bytes: int) -> _Candidate:
    """With a bound, where nothing has been proven yet."""
    placed = candidate.placed
    if placed.bound_us > 0:
        return candidate
    bound_us = min(time_bound_us(candidate.context, budget_bytes), placed.makespan_us)
    return replace(candidate, placed=replace(placed, bound_us=bound_us))


def _all_with_states(found: dict[int, _Candidate]) -> dict[int, _Candidate]:
    """With states on the GPU between runs where that is faster.

    As they are chosen after the search, a smaller budget's plan may come out faster; it is taken then.
    """
    best: dict[int, _Candidate] = {}
    last: _Candidate | None = None
    for b in sorted(found):
        candidate = _with_states(found[b], b)
        if last is not None and last.rank < candidate.rank:
            bound_us = min(candidate.placed.bound_us, last.placed.makespan_us)
            candidate = replace(last, placed=replace(last.placed, bound_us=bound_us))
        best[b] = last = candidate
    return {b: best[b] for b in found}


def _with_states(candidate: _Candidate, budget_bytes: int) -> _Candidate:
    """The faster one of two: what was found, with states kept on the GPU where there is room; or what is
    found with all of them there, and whatever touches them, in the memory that is left beside them.
    """
    context, placed = candidate.context, candidate.placed
    graph = context.graph
    if not graph.loop_carried or len(graph.kernels) > MOST_GRID_KERNELS:
        return candidate  # of so many kernels placing the buffers again takes minutes
    if graph.caches:
        return _with_caches(candidate, budget_bytes)
    plans = [placed, with_gpu_resident_states(context, placed, budget_bytes)]
    names = {name for pair in graph.loop_carried for name in pair}
    resident_bytes = sum(align(graph.tensor[old].size_bytes) for old, _ in graph.loop_carried)
    # without their bytes states cost nothing to copy, so that the search plans as if they were on the GPU
    without = replace(context, graph=without_bytes(graph, names))
    if resident_bytes < budget_bytes:
        beside = replace(
            without,
            pins=dict.fromkeys(gpu_users(graph, names), Device.GPU) | dict(context.pins),
            order=renewing_order(graph) or context.order,
        )
        with suppress(PlanError):  # no room beside the states
            [found] = partition(beside, (budget_bytes - resident_bytes,))
            kept = with_gpu_resident_states(context, found, budget_bytes)
            if kept is not found:
                plans.append(kept)
    best = min((replace(candidate, placed=p) for p in plans), key=lambda c: c.rank)
    bound_us = min(time_bound_us(without, budget_bytes), placed.bound_us)
    return replace(best, placed=replace(best.placed, bound_us=bound_us))


def _side_by_side(
    sides: Sequence[Tiling],
    machine: Machine,
    budgets: Sequence[int],
    effort: Effort,
    host_bytes: int | None,
    watch: Watcher,
) -> dict[int, _Candidate]:
    """Plans of a network whose large products are in two parts, for budgets that one is found for."""
    found: dict[int, _Candidate] = {}
    for side in sides:
        # without the pins of caches, which may lie anywhere
        context = replace(side.context(machine, effort, host_bytes, watch), pins=NO_PINS)
        for b in budgets:
            placed = side_by_side_plan(context, b)
            if placed is not None:
                watch.found(context, placed)
                candidate = _Candidate(side, context, placed)
                found[b] = min(candidate, found.get(b, candidate), key=lambda c: c.rank)
    return found


def _is_unbeaten(candidate: _Candidate, budget_bytes: int, bounds: _Bounds) -> bool:
    """Whether no plan of another way to cut the network up is faster, by their bounds or by decree."""
    if candidate.tiling.is_required:
        return True
    if bounds.contexts[0][1].graph.caches:
        least_us = min(
            cache_bound_us(context, tiling.pins, budget_bytes) for tiling, context in bounds.contexts
        )
    else:
        least_us = bounds.least_us(budget_bytes)
    return candidate.rank[:2] <= (False, least_us)


def _fastest_of_each(
    budgets: Sequence[int], found: Mapping[int, _Candidate], beside: Mapping[int, _Candidate]
) -> dict[int, _Candidate]:
    """For each budget the fastest of what is found for it, or side by side for a smaller one."""
    best: dict[int, _Candidate] = {}
    last: tuple[_Candidate, ...] = ()
    for b in sorted(budgets):
        candidate = min((*(each[b] for each in (found, beside) if b in each), *last), key=lambda c: c.rank)
        if candidate.tiling.second:
            bound_us = min(cache_bound_us(candidate.context, NO_PINS, b), candidate.placed.makespan_us)
            candidate = replace(candidate, placed=replace(candidate.placed, bound_us=bound_us))
        best[b] = candidate
        # of the others a larger budget's own plan is never slower, and has a bound of its own
        last = (candidate,) if candidate.tiling.second else ()
    return {b: best[b] for b in budgets}


def _with_caches(candidate: _Candidate, budget_bytes: int) -> _Candidate:
    """With some caches on the GPU, if that is faster."""
    context, pins = candidate.context, candidate.tiling.pins
    placed = with_gpu_caches(context, pins, candidate.placed, budget_bytes)
    bound_us = min(cache_bound_us(context, pins, budget_bytes), placed.makespan_us)
    return replace(candidate, placed=replace(placed, bound_us=bound_us))


def plans_so_far(watch: Watch, machine: Machine) -> tuple[tuple[Tiling, Plan], ...]:
    """As `make_plans`, of the best that has been found for the budgets of a watch."""
    found: list[tuple[Tiling, Plan]] = []
    for b in watch.budgets:
        context, placed = watch.best[b]
        tiling = Tiling(context.graph, context.pins, order=context.order)
        # what it has is the simple bound of a short search
        if context.graph.caches:  # which may lie anywhere, unlike those of the search
            bound_us = min(cache_bound_us(context, NO_PINS, b), placed.makespan_us)
        else:
            bound_us = 0.0
        candidate = _bounded(_Candidate(tiling, context, replace(placed, bound_us=bound_us)), b)
        budget_bytes = None if b == UNLIMITED_BYTES else b
        found.append((tiling, _plan_of(context.graph, machine, budget_bytes, candidate.placed)))
    return tuple(found)


def _plan_of(graph: Graph, machine: Machine, budget_bytes: int | None, placed: PlacedPlan) -> Plan:
    plan = assemble(graph, machine, budget_bytes, placed.steps, placed.buffers, placed.arenas)
    return replace(
        plan, step_us=placed.step_us, makespan_us=placed.makespan_us, time_bound_us=placed.bound_us
    )


def assemble(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    steps: tuple[Step, ...],
    buffers: tuple[Buffer, ...],
    arenas: tuple[Arena, ...],
) -> Plan:
    """A plan out of what was decided, with the times that the machine's profile predicts for its steps by
    themselves.

    `budget_bytes` is what is promised of the GPU's arena, None if there is no limit.
    """
    step_us = step_times_us(graph, steps, machine)
    return Plan(steps, buffers, arenas, budget_bytes, step_us, timeline(steps, step_us)[0])
