"""From a budget to the best plan for it, such that more memory never makes a plan slower.

Plans are searched at fixed budgets, the grid points, which depend on graph and machine but not on the budget
asked for. From the lowest grid point up, each search begins with what the point below found and with the
simple ways that other systems use, and its result is taken only if it is no slower. Between two grid points
lie finer ones, close to each other: searches go from one to the next up to the budget asked for, and take
what is faster, but nothing faster than the plan of the grid point above. So a budget gets the best plan
that is found up to it, or the fastest split in two that it has room for, and no larger one a slower plan.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from hybridc.ir import Copy
from hybridc.passes.planner.bounds.bound import resident_bytes_bound, simple_time_bound_us, time_bound
from hybridc.passes.planner.emit.materialize import SHORT, PlacedPlan, materialize, repacked
from hybridc.passes.planner.model.context import OCTAVES, POINTS_PER_OCTAVE, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES, Problem
from hybridc.passes.planner.model.rematerialize import with_recompute_slots, with_repeats
from hybridc.passes.planner.model.structure import runs_again
from hybridc.passes.planner.search.policies import layer_splits
from hybridc.passes.planner.search.search import SearchResult, improve, search

_STEP = 1.03
"""Ratio of neighbouring finer points: so much of a budget may be left unused."""
_FINE = 0.5
"""Effort of a finer point: a share of a grid point's."""
_FLAT = 1.001
"""So little time is not worth searching for between two grid points."""
# Near their smallest budgets cut-up networks lost up to a third of the time found, waiting for bytes: with
# less memory for the search the packed plan is faster. The smallest step comes first, since what is taken
# from the memory is lost where packing would have left no hole.
_PACKING_SHARES = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7)
"""Shares of the memory to search with where what is found for all of it cannot be packed into it, or only by
steps that wait for bytes: packing leaves holes."""
_WAITS = 1.005
"""So much slower than simulated a packed plan may be."""
# Four times SHORT: at 0.3 packing took most of a short compilation, for plans no faster.
_PACKING = 0.02
"""Share of the usual effort for packing the plan of a grid point."""
_TIGHTENING = 0.05
"""The same for the arenas of a plan that may be replaced at the next grid point."""
# The larger, the more plans have to be packed for each budget. What packing gains beyond it is given up, so
# that more memory is never slower.
_TIED = 0.005
"""Share of its time that a plan may gain by being packed: what is closer to the best may overtake it."""
_NARROWED = 0.2
"""Effort of searches with less memory, which begin with what was found: a share of a grid point's."""
# A trade of time for bytes on the link: plans within 0.1 % of each other count as equally fast.
_HARDLY_SLOWER = 1.001
"""So much time may be given up for fewer copies."""
_MARGIN = 1.02
"""The top point has a little more than all bytes that are ever live, so that packing does not fail there."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A split in two, and the problem of making it."""

    us: float
    """If memory were ample."""
    problem: Problem
    decisions: Decisions


class _Found(NamedTuple):
    """What is best at a grid point."""

    budget_bytes: int
    placed: PlacedPlan


@dataclass(frozen=True, slots=True)
class _PointSearch:
    """What a search at one grid point starts from."""

    context: PlanningContext
    problem: Problem
    """With the budget of the point."""
    below: PlacedPlan
    """The best plan of the points below."""
    evaluations: int
    above: PlacedPlan | None = None
    """That of the grid point above, for a finer point, which begins with it, too."""

    @property
    def packing(self) -> float:
        return _PACKING if self.above is None else SHORT


def plan_all_budgets(
    context: PlanningContext,
    budgets: Sequence[int],
    smallest: PlacedPlan,
    *,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PlacedPlan, ...]:
    """The best plan for each budget, in bytes.

    Requires: `smallest` is a plan for the smallest budget that can be met, and fits all of them; it is given
    back, too, if the host has too little memory for whatever is found.
    Ensures: arenas as tight as can be; never slower with a larger budget, all else equal; the same for a
    budget whatever others are asked for. `report` hears of each grid point: (done, total).
    """
    problem = replace(context.problem, host_bytes=context.host_bytes)
    evaluations = context.effort.evaluations(problem.kernel_count)
    wide = with_repeats(problem)
    again = runs_again(wide)
    decisions = with_recompute_slots(wide, smallest.problem, smallest.decisions)
    best = repacked(context, replace(smallest, problem=wide, decisions=decisions), _TIGHTENING)
    bound_us = _time_bounds(problem, budgets, again, best.makespan_us)
    most_bytes = max(budgets)
    points = grid_points(problem, smallest.gpu_bytes)
    # one more than needed: the finer points below it refer to its plan
    points = points[: bisect_right(points, most_bytes) + 1]
    history = [_Found(0, best)]
    for number, point_bytes in enumerate(points):
        report(number, len(points))
        if best.makespan_us <= bound_us[most_bytes] and best.fits_host(context.host_bytes):
            break  # no point above can be faster
        point = replace(wide, budget_bytes=point_bytes)
        found = _best_at(_PointSearch(context, point, best, evaluations))
        if found is not best:
            # before it is compared: it may become faster, too
            best = repacked(context, found, _TIGHTENING)
        history.append(_Found(point_bytes, best))
    tight = _all_repacked(context, history, budgets)
    splits = _timed_splits(problem, [p for p in points if p <= most_bytes])
    chosen = []
    for b in budgets:
        refined = _refined(context, wide, history, tight[b], b, int(evaluations * _FINE))
        chosen.append(replace(_faster_split(context, refined, splits, b), bound_us=bound_us[b]))
    return tuple(chosen)


def _refined(
    context: PlanningContext,
    problem: Problem,
    history: Sequence[_Found],
    tight: PlacedPlan,
    budget_bytes: int,
    evaluations: int,
) -> PlacedPlan:
    """What finer points up to the budget make of the best plan of the grid points, `tight`.

    Nothing is faster than the plan of the grid point above, which all larger budgets can have: a faster one
    is not taken. Where no point was searched above, what was found cannot be bettered.
    """
    position = bisect_right([found.budget_bytes for found in history], budget_bytes)
    if position == len(history):
        return tight
    below, above = history[position - 1], history[position].placed
    if not above.fits_host(context.host_bytes):
        return tight
    best = below.placed
    for point_bytes in _finer_points(max(below.budget_bytes, below.placed.gpu_bytes), history[position]):
        if point_bytes > budget_bytes or tight.makespan_us <= above.makespan_us * _FLAT:
            break
        point = replace(problem, budget_bytes=point_bytes)
        found = _best_at(_PointSearch(context, point, best, evaluations, above))
        if found is best:
            continue
        placed = _repacked_once(context, found)
        if placed.makespan_us >= above.makespan_us:
            best = found
            tight = min(tight, placed, key=lambda p: p.makespan_us)
    return tight


def _finer_points(first_bytes: int, above: _Found) -> list[int]:
    """Budgets in bytes between two, at equal ratios of `_STEP` at most; `first_bytes` is not among them."""
    if not 0 < first_bytes < above.budget_bytes:
        return []
    count = math.ceil(math.log(above.budget_bytes / first_bytes) / math.log(_STEP))
    return [int(first_bytes * (above.budget_bytes / first_bytes) ** (n / count)) for n in range(1, count)]


def _time_bounds(
    problem: Problem, budgets: Iterable[int], again: Collection[int], known_us: float
) -> dict[int, float]:
    """What no plan for a budget is faster than; `known_us` is the time of one that fits them all."""
    simple_us = simple_time_bound_us(problem)
    if known_us <= simple_us:
        return dict.fromkeys(budgets, simple_us)  # a linear programme could not prove more
    return {b: time_bound(replace(problem, budget_bytes=b), again=again).bound_us for b in budgets}


def _all_repacked(
    context: PlanningContext, history: Sequence[_Found], budgets: Sequence[int]
) -> dict[int, PlacedPlan]:
    """For each budget the fastest of the plans that were best up to it, in arenas as tight as can be.

    A plan may become faster when it is packed, so that the one before may overtake the best. More memory
    gives no slower plan all the same: packing gains `_TIED` at most, and all that are as close are packed.
    """
    host_bytes = context.host_bytes
    packed: dict[int, PlacedPlan] = {}  # by identity: plans have no hash that is quick
    found: dict[int, PlacedPlan] = {}
    for b in budgets:
        plans = {id(each.placed): each.placed for each in history if each.budget_bytes <= b}
        known = list(plans.values())
        best = known[-1]
        close = [
            p
            for p in known
            if p.makespan_us * (1 - _TIED) < best.makespan_us
            and (p.fits_host(host_bytes) or not best.fits_host(host_bytes))
        ]
        for placed in (*close, best):
            if id(placed) not in packed:
                packed[id(placed)] = _repacked_once(context, placed)
        # the latest of equals: it was found with the most memory
        found[b] = min((packed[id(p)] for p in reversed((*close, best))), key=lambda p: p.makespan_us)
    return found


def _repacked_once(context: PlanningContext, placed: PlacedPlan) -> PlacedPlan:
    tight = repacked(context, placed)
    return tight if tight.makespan_us >= placed.makespan_us * (1 - _TIED) else placed


def _timed_splits(problem: Problem, budgets: Iterable[int]) -> list[_Split]:
    """Splits in two, each once with room for all fetches ahead and once with the least memory that it needs.

    The fastest first. Which kernels are too large for the GPU depends on the memory: splits are made for
    that of each grid point.
    """
    ample = Core(replace(problem, budget_bytes=UNLIMITED_BYTES))
    none = Core(replace(problem, budget_bytes=-1))  # infeasible: `measure` tells the least bytes
    splits = dict.fromkeys(split for b in budgets for split in layer_splits(replace(problem, budget_bytes=b)))
    found: list[_Split] = []
    for split in splits:
        us, peak_bytes = ample.measure(split)
        needed = {peak_bytes, none.measure(split)[1]} if us < math.inf else set()
        found += [_Split(us, replace(problem, budget_bytes=b), split) for b in sorted(needed, reverse=True)]
    return sorted(found, key=attrgetter("us"))


def _faster_split(
    context: PlanningContext, best: PlacedPlan, splits: Sequence[_Split], budget_bytes: int
) -> PlacedPlan:
    """A split in two where it fits and is faster: between two grid points one more kernel may find room.

    A split has two plans, whatever the budget, so that time falls with the budget here, too.
    """
    host_bytes = context.host_bytes
    for split in splits:
        best_us = best.makespan_us if best.fits_host(host_bytes) else math.inf
        if split.us >= best_us:
            break  # they are sorted, and with less memory none is faster than with ample
        if (
            split.problem.budget_bytes <= budget_bytes
            and Core(split.problem).makespan_us(split.decisions) < best_us
        ):
            placed = repacked(context, materialize(context, split.problem, split.decisions))
            if placed.fits(budget_bytes, host_bytes) and placed.makespan_us < best_us:
                best = placed
    return best


def grid_points(problem: Problem, smallest_bytes: int) -> list[int]:
    """The budgets in bytes that plans are searched for, rising from the least possible to all memory.

    A little more than all that is ever live on the GPU, the smallest, and between them equal ratios. The
    problem's own budget does not matter.
    """
    largest_bytes = resident_bytes_bound(problem)
    steps = range(1, OCTAVES * POINTS_PER_OCTAVE)
    between = (int(largest_bytes * 2 ** (-i / POINTS_PER_OCTAVE)) for i in steps)
    points = {smallest_bytes, *between, int(largest_bytes * _MARGIN)}
    return sorted(b for b in points if b >= smallest_bytes)


def _best_at(point: _PointSearch) -> PlacedPlan:
    """A faster plan than that of the point below; or that."""
    known = (point.below, point.above) if point.above else (point.below,)
    found = search(point.problem, point.evaluations, starts=[placed.decisions for placed in known])
    return _best_packed(point, found)


def _best_packed(point: _PointSearch, found: SearchResult | None) -> PlacedPlan:
    """The fastest plan of what was found, searched again with less memory where that helps packing."""
    problem, below, host_bytes = point.problem, point.below, point.context.host_bytes
    if found is None or _is_no_better(found, below, host_bytes):
        return below
    known_us, narrowed, best = found.fastest_start_us, problem, below
    for share in (*_PACKING_SHARES, None):
        placed = _materialized(point, narrowed, found)
        if placed.fits(problem.budget_bytes, host_bytes):
            best = _better(best, placed, known_us, host_bytes)
            if placed.makespan_us <= _WAITS * found.makespan_us:
                break
        if share is None:
            break
        narrowed = _with_less(narrowed, problem, share, placed)
        found = _narrowed(narrowed, found, point.evaluations)
        if found is None or (best is not below and found.makespan_us >= best.makespan_us):
            break
    return best


def _narrowed(problem: Problem, found: SearchResult, evaluations: int) -> SearchResult | None:
    """What a short search makes of what was found for more memory; None if it cannot be repaired."""
    start = Core(problem).repaired(found.decisions)
    return None if start is None else improve(problem, [start], int(evaluations * _NARROWED))


def _is_no_better(found: SearchResult, below: PlacedPlan, host_bytes: int | None) -> bool:
    """Whether a plan, once packed, could not replace that of the point below, since it is hardly faster."""
    if not below.fits_host(host_bytes):
        return False
    return below.makespan_us <= min(found.makespan_us * _HARDLY_SLOWER, found.fastest_start_us)


def _with_less(narrowed: Problem, problem: Problem, share: float, placed: PlacedPlan) -> Problem:
    """With a share of the GPU's memory, and on the host with less by what the plan exceeds it by."""
    gpu_bytes = int(problem.budget_bytes * share)
    if narrowed.host_bytes is None or problem.host_bytes is None:
        return replace(narrowed, budget_bytes=gpu_bytes)
    host_bytes = narrowed.host_bytes - max(0, placed.host_bytes - problem.host_bytes)
    return replace(narrowed, budget_bytes=gpu_bytes, host_bytes=host_bytes)


def _materialized(point: _PointSearch, problem: Problem, found: SearchResult) -> PlacedPlan:
    """What was found for `problem`, with fewer copies if that takes hardly more time, packed, too."""
    most_bytes = point.problem.budget_bytes
    limit_us = max(
        found.makespan_us,
        min(found.makespan_us * _HARDLY_SLOWER, found.fastest_start_us, point.below.makespan_us),
    )

    def packed(decisions: Decisions) -> PlacedPlan:
        return materialize(
            point.context, problem, decisions, packing=point.packing, capacity_bytes=most_bytes
        )

    tidy = Core(problem).tidied(found.decisions, limit_us)[0]
    placed = packed(tidy)
    if tidy == found.decisions or (placed.gpu_bytes <= most_bytes and placed.makespan_us <= limit_us):
        return placed
    untidied = packed(found.decisions)
    return min(untidied, placed, key=lambda p: (p.gpu_bytes > most_bytes, p.makespan_us))


def _better(one: PlacedPlan, other: PlacedPlan, known_us: float, host_bytes: int | None) -> PlacedPlan:
    """The other one if it is faster, or as fast and copies less; a little faster is not worth copies.

    Both are meant to be no slower than `known_us`, the time of simple ways. The other one fits the host.
    """
    if not one.fits_host(host_bytes):
        return other
    if other.makespan_us > one.makespan_us:
        return one
    is_faster = other.makespan_us * _HARDLY_SLOWER < one.makespan_us or one.makespan_us > known_us
    return other if is_faster or _copied_bytes(other) <= _copied_bytes(one) else one


def _copied_bytes(placed: PlacedPlan) -> int:
    size_bytes = dict(zip(placed.problem.tensor_names, placed.problem.size_bytes, strict=True))
    return sum(size_bytes[step.tensor] for step in placed.listed if isinstance(step, Copy))
