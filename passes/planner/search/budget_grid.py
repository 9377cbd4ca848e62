"""From a budget to the best plan for it, such that more memory never makes a plan slower.

Plans are searched at fixed budgets, the anchors, a factor of 1.4 apart, which depend on nothing. The plan of
an anchor is searched for by itself; it is that of the anchor below where that is faster; and moves of single
decisions better it as long as one does. Between the two anchors that a budget lies in, the interval is halved
again and again, with a search in the middle that begins with the plans of both ends. What it finds is taken
if it is faster than the plan of the lower end, but never said to be faster than that of the upper one, which
all larger budgets can have. In small intervals single moves take the place of the search. So no budget gets a
slower plan than a smaller one, whatever else is asked for; and the effort goes where the budget is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isqrt
from typing import NamedTuple

from hybridc.ir import Copy
from hybridc.passes.planner.bounds.bound import (
    ROUNDING,
    meets,
    resident_bytes_bound,
    simple_time_bound_us,
    time_bound,
)
from hybridc.passes.planner.emit.materialize import (
    PlacedPlan,
    materialize,
    no_faster_than,
    repacked,
    unpacked_us,
)
from hybridc.passes.planner.model.context import PlanningContext, fixed_budgets
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES, Problem
from hybridc.passes.planner.model.rematerialize import with_recompute_slots, with_repeats
from hybridc.passes.planner.model.structure import runs_again
from hybridc.passes.planner.search.baseline_plans import BaselinePlans
from hybridc.passes.planner.search.placed_moves import placed_moves
from hybridc.passes.planner.search.search import SearchResult, improve, refine, search

# Few networks can do with less; each anchor that a budget does not lie next to costs nothing.
_OCTAVES = 10
"""Factors of two in memory that anchors span, from all bytes down."""
_FLAT = 1.0005
"""So little time is not worth searching for within an interval."""
_CLOSE = 1.001
"""Ratio of budgets that count as the same."""
# Near their smallest budgets cut-up networks lost up to a third of the time found, waiting for bytes: with
# less memory for the search the packed plan is faster. The smallest step comes first, since what is taken
# from the memory is lost where packing would have left no hole.
_PACKING_SHARES = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7)
"""Shares of the memory to search with where what is found for all of it cannot be packed into it, or only by
steps that wait for bytes: packing leaves holes."""
_FEW_PACKING_SHARES = (0.9, 0.8, 0.7)
"""The same where each packing takes a second."""
_WAITS = 1.005
"""So much slower than simulated a packed plan may be."""
# What lies between two anchors is never faster than the upper one, so that what is missed there is lost for
# every budget below it. Most of an anchor's time goes into packing.
_ANCHOR_FACTOR = 2
"""How many times the usual effort an anchor gets."""
_WORTH_MOVING = 1.05
"""So much slower a plan for less memory may be that moves are to make a better one of it."""
_LEAST_MOVED = 0.95
"""To no less than this share of its time moves are said to better a plan: they seldom do to 0.97. So nothing
is missed if they are not made of a plan that is that much slower than one of another graph."""
_NARROWED = 0.2
"""Effort of searches with less memory, which begin with what was found: a share of the first one's."""
# A trade of time for bytes on the link: plans within 0.1 % of each other count as equally fast.
_HARDLY_SLOWER = 1.001
"""So much time may be given up for fewer copies."""
_MARGIN = 1.02
"""The top anchor has a little more than all bytes that are ever live, so that packing does not fail there."""


class _Found(NamedTuple):
    """What is best at a budget in bytes."""

    budget_bytes: int
    placed: PlacedPlan


@dataclass(frozen=True, slots=True)
class _PointSearch:
    """What a search at one budget starts from."""

    context: PlanningContext
    problem: Problem
    """With the budget of the point."""
    below: PlacedPlan
    """A plan that fits, to be bettered."""
    evaluations: int
    above: PlacedPlan | None = None
    """In the middle of an interval, the plan of its upper end: nothing faster is of use."""
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """A budget that a plan is wanted for."""

    budget_bytes: int
    known_us: float = inf
    """The time of another plan for it: if none is faster, any will do."""


def plan_all_budgets(
    context: PlanningContext,
    wishes: Sequence[Wish],
    smallest: PlacedPlan,
    *,
    first_bytes: int = 0,
    last_bytes: int = UNLIMITED_BYTES,
    has_bounds: bool = True,
    is_brief: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PlacedPlan, ...]:
    """The best plan for each budget.

    Requires: `smallest` is a plan that fits all of them, and no budget is below `first_bytes`; `smallest` is
    given back, too, if the host has too little memory for whatever is found. `last_bytes` is one of
    `fixed_budgets`; larger budgets get the plan for it.
    Ensures: arenas as tight as can be; never slower with a larger budget, all else equal; the same for a
    budget whatever others are asked for. Without `has_bounds` the bounds of the plans are 0, which takes
    less time. Searches that are `is_brief`, for graphs of which each takes long, make single moves at anchors
    alone, run no kernel again, and leave intervals as wide as a step of the effort. `report` hears of each
    budget: (done, total).
    """
    problem = replace(context.problem, host_bytes=context.host_bytes)
    wide = problem if is_brief else with_repeats(problem)
    decisions = with_recompute_slots(wide, smallest.problem, smallest.decisions)
    start = repacked(context, replace(smallest, problem=wide, decisions=decisions), context.effort.tightening)
    points = anchors(problem, max(first_bytes, smallest.gpu_bytes))
    most_bytes = min(last_bytes, max(wish.budget_bytes for wish in wishes))
    # up to the anchor above all budgets
    baselines = BaselinePlans(context, problem, points[: bisect_right(points, most_bytes) + 1])
    grid = _Grid(context, wide, runs_again(wide), points, start, baselines, is_brief)
    baselines = BaselinePlans(context, problem, [p for p in points if p <= most_bytes])
    chosen = []
    for number, wish in enumerate(wishes):
        report(number, len(wishes))
        if wish.budget_bytes < last_bytes:
            best = grid.best(wish.budget_bytes, wish.known_us)
        else:
            best = grid.last(last_bytes, wish.known_us)
        best = baselines.faster(best, min(wish.budget_bytes, last_bytes))
        bound_us = grid.bound_us(wish.budget_bytes, best.makespan_us) if has_bounds else 0.0
        chosen.append(replace(best, bound_us=bound_us))
        context.watch.found(context, chosen[-1])
    return tuple(chosen)


def anchors(problem: Problem, least_bytes: int) -> list[int]:
    """The budgets in bytes that plans are searched for in any case, rising from the least to all memory.

    The least, those of `fixed_budgets`, all that is ever live on the GPU, and a little more than that. The
    problem's own budget does not matter.
    """
    all_live = resident_bytes_bound(problem)
    found = {*fixed_budgets(all_live, _OCTAVES), all_live, int(all_live * _MARGIN)}
    return sorted({least_bytes} | {b for b in found if b > least_bytes})


@dataclass(slots=True)
class _Grid:
    """Plans of one graph at fixed budgets, each searched for when it is first needed."""

    context: PlanningContext
    problem: Problem
    """With kernels that may run again; its own budget does not matter."""
    again: frozenset[int]
    """Kernels that may, by their numbers without repeats."""
    anchors: Sequence[int]
    smallest: PlacedPlan
    """Fits the first anchor."""
    baselines: BaselinePlans
    is_brief: bool = False
    _searched: dict[int, PlacedPlan] = field(default_factory=dict)
    """At an anchor, by itself."""
    _ends: dict[tuple[int, Decisions], PlacedPlan] = field(default_factory=dict)
    """Where single moves lead to at an anchor, by the decisions that they begin with."""
    _middles: dict[tuple[int, int], PlacedPlan] = field(default_factory=dict)
    """In the middle between two budgets."""
    _bounds_us: dict[int, float] = field(default_factory=dict)

    def best(self, budget_bytes: int, known_us: float) -> PlacedPlan:
        """The plan for a budget, its arenas packed as tightly as the effort allows.

        Any that fits, if it turns out that none takes less than `known_us`.
        """
        position = bisect_right(self.anchors, budget_bytes) - 1
        if position + 1 == len(self.anchors):
            return self.last(self.anchors[position], known_us)
        above = _Found(self.anchors[position + 1], self._anchored(position + 1, known_us))
        if self._fits_host(above.placed) and above.placed.makespan_us >= known_us:
            return self.smallest  # nothing below an anchor is faster than its plan
        below = _Found(self.anchors[position], self._anchored(position, inf))
        above = above._replace(placed=min(below.placed, above.placed, key=self._rank))
        end, limit = self._narrowed(budget_bytes, below, above)
        found = self._polished(end, limit)
        tight = repacked(self.context, found, self.context.effort.packing)
        # faster than a plan with more memory: that must not be
        return found if self._rank(tight) < self._rank(limit) else tight

    def last(self, anchor_bytes: int, known_us: float) -> PlacedPlan:
        """The plan of an anchor, for all larger budgets as well; `known_us` as for `best`."""
        placed = self._anchored(bisect_right(self.anchors, anchor_bytes) - 1, known_us)
        return repacked(self.context, placed, self.context.effort.packing)

    def bound_us(self, budget_bytes: int, known_us: float) -> float:
        """What no plan for a budget is faster than; `known_us` is the time of one."""
        simple_us = simple_time_bound_us(self.context.problem)
        if meets(known_us, simple_us):
            return simple_us  # a linear programme could not prove more
        if budget_bytes not in self._bounds_us:
            problem = replace(self.context.problem, budget_bytes=budget_bytes)
            self._bounds_us[budget_bytes] = time_bound(problem, again=self.again, shared=True).bound_us
        return self._bounds_us[budget_bytes]

    def _narrowed(self, budget_bytes: int, below: _Found, above: _Found) -> tuple[_Found, PlacedPlan]:
        """What is best at the end below a budget, and a plan that it must not be faster than."""
        while True:
            # the better plan is there from the bytes on that it needs
            above = above._replace(budget_bytes=min(above.budget_bytes, above.placed.gpu_bytes))
            if above.budget_bytes <= budget_bytes:
                return above, above.placed
            low, high = max(below.budget_bytes, above.budget_bytes >> _OCTAVES, 1), above.budget_bytes
            if high <= low * _CLOSE or self._is_flat(below.placed, above.placed):
                return below, above.placed
            is_small = high <= low * self.context.effort.budget_step
            if is_small and self.is_brief:
                return below, above.placed
            # in small intervals moves of single decisions are all that a search would find
            best_at = _polished_at if is_small else _best_at
            middle = _Found(isqrt(low * high), self._in_the_middle(below, above, isqrt(low * high), best_at))
            below, above = (middle, above) if middle.budget_bytes <= budget_bytes else (below, middle)

    def _polished(self, found: _Found, limit: PlacedPlan) -> PlacedPlan:
        """The plan that single moves lead to, of those that are not faster than the limit.

        It depends on the interval alone, not on the budget in it: so time falls with the budget.
        """
        is_flat = found.placed.makespan_us <= limit.makespan_us * _FLAT
        if self.is_brief or found.placed is limit or is_flat:
            return found.placed
        point = self._point(found.budget_bytes, found.placed, limit)
        polished = self._tightened(_polished_at(point), found.placed)
        return self._between(found.placed, polished, limit)

    def _fits_host(self, placed: PlacedPlan) -> bool:
        return placed.fits_host(self.context.host_bytes)

    def _is_best_of_all(self, placed: PlacedPlan) -> bool:
        """Whether no memory could make a plan faster."""
        return self._fits_host(placed) and meets(
            placed.makespan_us, simple_time_bound_us(self.context.problem)
        )

    def _is_flat(self, below: PlacedPlan, above: PlacedPlan) -> bool:
        fits = self._fits_host(below) or not self._fits_host(above)
        return fits and below.makespan_us <= above.makespan_us * _FLAT

    def _rank(self, placed: PlacedPlan) -> tuple[bool, float]:
        return not self._fits_host(placed), placed.makespan_us

    def _anchored(self, position: int, known_us: float) -> PlacedPlan:
        """The best plan of an anchor: what is found for it, or for the anchors below.

        Any that fits, if none takes less than `known_us`.
        """
        if position == 0 or self._is_best_of_all(self.smallest):
            return self.smallest
        found = self._beside_below(position, known_us)
        enough_us = min(found.makespan_us, known_us) if self._fits_host(found) else inf
        if not meets(enough_us, self.bound_us(self.anchors[position - 1], enough_us)):
            below = self._anchored(position - 1, enough_us)
            if self._rank(below) < self._rank(found):
                found = self._settled(position, below)
        return found

    def _beside_below(self, position: int, known_us: float) -> PlacedPlan:
        """What is found for an anchor, or what moves make of that of the one below if it is hardly slower.

        No moves are made where none leads to a plan that takes less than `known_us`.
        """
        if all(self._least_us(p) > known_us for p in range(position, max(position - 2, 0), -1)):
            return self._unmoved(position)
        found = self._at_anchor(position)
        worth_us = found.makespan_us * _WORTH_MOVING
        if position > 1 and not meets(worth_us, self.bound_us(self.anchors[position - 1], worth_us)):
            below = self._at_anchor(position - 1)
            if below.makespan_us < worth_us:
                moved = no_faster_than(self._settled(position, below), self._least_us(position - 1))
                found = min(found, moved, key=self._rank)
        return found

    def _at_anchor(self, position: int) -> PlacedPlan:
        """What moves make of what is found for an anchor."""
        moved = self._settled(position, self._unmoved(position))
        return no_faster_than(moved, self._least_us(position))

    def _least_us(self, position: int) -> float:
        """What moves of the plan of an anchor do not lead below; 0 if they may let it fit the host."""
        unmoved = self._unmoved(position)
        return _LEAST_MOVED * unmoved.makespan_us if self._fits_host(unmoved) else 0.0

    def _unmoved(self, position: int) -> PlacedPlan:
        """What is found for an anchor, before single moves."""
        if position not in self._searched:
            point = self._point(self.anchors[position], self.smallest)
            found = self._tightened(_best_at(point), self.smallest)
            self.context.watch.found(self.context, found)
            self._searched[position] = self._of_baselines(found, self.anchors[position])
        return self._searched[position]

    def _settled(self, position: int, found: PlacedPlan) -> PlacedPlan:
        """The plan that single moves lead to with the memory of an anchor, unless none is faster."""
        key = position, found.decisions
        if key not in self._ends:
            point = self._point(self.anchors[position], found)
            polished = self._tightened(_polished_at(point), found)
            self._ends[key] = min(found, polished, key=self._rank)
            self.context.watch.found(self.context, self._ends[key])
        return self._ends[key]

    def _of_baselines(self, found: PlacedPlan, anchor_bytes: int) -> PlacedPlan:
        """The fastest of the baselines for an anchor, so that moves better that, or what was found."""
        placed = self.baselines.faster(found, anchor_bytes)
        if placed is found:
            return found
        decisions = with_recompute_slots(self.problem, placed.problem, placed.decisions)
        problem = replace(self.problem, budget_bytes=placed.problem.budget_bytes)
        return replace(placed, problem=problem, decisions=decisions)

    def _in_the_middle(
        self, below: _Found, above: _Found, middle_bytes: int, best_at: Callable[[_PointSearch], PlacedPlan]
    ) -> PlacedPlan:
        """The plan of the lower end, or one that is faster, but not faster than that of the upper end."""
        ends = below.budget_bytes, above.budget_bytes
        if ends not in self._middles:
            point = self._point(middle_bytes, below.placed, above.placed)
            found = self._tightened(best_at(point), below.placed)
            self._middles[ends] = self._between(below.placed, found, above.placed)
            self.context.watch.found(self.context, self._middles[ends])
        return self._middles[ends]

    def _between(self, below: PlacedPlan, found: PlacedPlan, above: PlacedPlan) -> PlacedPlan:
        """What is found in an interval, if it is faster than the plan of the lower end, else that.

        The search's limit is in simulated time, so that what it finds may turn out a little faster than the
        plan of the upper end. It is then said to take as long.
        """
        if self._fits_host(found) or not self._fits_host(above):
            found = no_faster_than(found, above.makespan_us)
        is_between = self._rank(above) <= self._rank(found) < self._rank(below)
        return found if is_between else below

    def _point(self, budget_bytes: int, below: PlacedPlan, above: PlacedPlan | None = None) -> _PointSearch:
        evaluations = self.context.effort.evaluations(self.context.problem.kernel_count)
        problem = replace(self.problem, budget_bytes=budget_bytes)
        return _PointSearch(self.context, problem, below, evaluations, above, self.is_brief)

    def _tightened(self, found: PlacedPlan, known: PlacedPlan) -> PlacedPlan:
        if self.is_brief or found is known:
            return found
        return repacked(self.context, found, self.context.effort.tightening)


def _best_at(point: _PointSearch) -> PlacedPlan:
    """A faster plan than `below`, or that."""
    point.context.watch.check()
    if point.above is None:
        evaluations = point.evaluations * (1 if point.is_brief else _ANCHOR_FACTOR)
        found = search(
            point.problem, evaluations, starts=[point.below.decisions], check=point.context.watch.check
        )
        return _best_packed(point, found)
    starts = [point.below.decisions, point.above.decisions]
    found = refine(point.problem, starts, point.evaluations, _simulated_us(point.above))
    best = _best_packed(point, found)
    # what is missed here is lost for smaller budgets, whose plans must not be faster
    return best if point.is_brief else _polished_at(replace(point, below=best))


def _polished_at(point: _PointSearch) -> PlacedPlan:
    """A plan that single moves lead to from `below`, or that; none is sought that takes less than `above`."""
    point.context.watch.check()
    bound_us = simple_time_bound_us(point.context.problem)
    enough_us = bound_us * (1 + ROUNDING) if point.above is None else point.above.makespan_us
    return placed_moves(point.context, point.problem, point.below, enough_us)


def _simulated_us(placed: PlacedPlan) -> float:
    """What the search says of a plan, to be compared with what it says of others: no time of steps."""
    return Core(placed.problem).makespan_us(placed.decisions)


def _best_packed(point: _PointSearch, found: SearchResult | None) -> PlacedPlan:
    """The fastest plan of what was found, searched again with less memory where that helps packing."""
    problem, below, host_bytes = point.problem, point.below, point.context.host_bytes
    if found is None or _is_no_better(found, below, host_bytes):
        return below
    known_us, narrowed, best = found.fastest_start_us, problem, below
    for share in (*(_FEW_PACKING_SHARES if point.is_brief else _PACKING_SHARES), None):
        point.context.watch.check()
        placed = _materialized(point, narrowed, found)
        if placed.fits(problem.budget_bytes, host_bytes):
            best = _better(best, placed, known_us, host_bytes)
            if not _waits_for_bytes(point.context, placed, found.makespan_us):
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
    return _simulated_us(below) <= min(found.makespan_us * _HARDLY_SLOWER, found.fastest_start_us)


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
            point.context,
            problem,
            decisions,
            packing=point.context.effort.fitting,
            capacity_bytes=most_bytes,
            must_fit=True,
        )

    tidy = Core(problem).tidied(found.decisions, limit_us)[0]
    placed = packed(tidy)
    if tidy == found.decisions or (placed.gpu_bytes <= most_bytes and placed.makespan_us <= limit_us):
        return placed
    untidied = packed(found.decisions)
    return min(untidied, placed, key=lambda p: (p.gpu_bytes > most_bytes, p.makespan_us))


def _waits_for_bytes(context: PlanningContext, placed: PlacedPlan, simulated_us: float) -> bool:
    """Whether packing has made a plan slower, beyond what its steps lose to each other."""
    if placed.makespan_us <= _WAITS * simulated_us:
        return False
    return placed.makespan_us > _WAITS * unpacked_us(context, placed)


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
