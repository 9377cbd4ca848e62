"""Search for the best decisions: fills and baselines as starts, simulated annealing from the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from hybridc.passes.planner.bounds.bound import (
    ROUNDING,
    Relaxation,
    meets,
    simple_time_bound_us,
    time_bound,
)
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import (
    recompute_instead_of_fetch,
    with_recompute_slots,
    without_recompute_slots,
    without_repeats,
)
from hybridc.passes.planner.search.policies import (
    BASELINES,
    earliest_fills,
    greedy_fills,
    light_fills,
    relaxed_fills,
    side_by_side_fills,
    streaming_fills,
)

# As many as there are families of starts: those given, and five in `_own_starts`.
_STARTS = 6
"""Starts that are annealed a little before the best of them gets the rest of the effort."""
# Six starts take 60 %; the best of them gets the rest.
_FIRST_SHARE = 0.1
"""Share of the effort that each of them gets."""
# any one: the result is the same for every call
_SEED = 1
_LAST_SHARE = 0.4
"""The same for the best of the starts that come from two other budgets, which get the rest."""
_NEARLY = 1.0005
"""So near to the least time that is of use such a search ends."""
# Here the solution is one start among several; `time_bound`, which proves, is asked for larger graphs, too.
MOST_ROUNDED_KERNELS = 1000
"""Kernels up to which the linear programme takes a second or so."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best decisions found for a problem, and what no decisions can be faster than."""

    decisions: Decisions
    makespan_us: float
    bound_us: float
    """0 where it was not asked for."""
    fastest_start_us: float
    """Of the starts, which are known ways to decide."""

    @property
    def gap(self) -> float:
        """How much slower than the bound, at most: 0.03 is three per cent."""
        return self.makespan_us / self.bound_us - 1 if self.bound_us else 0.0


def search(
    problem: Problem,
    evaluations: int,
    *,
    starts: Iterable[Decisions] = (),
    seed: int = _SEED,
    check: Callable[[], None] = lambda: None,
) -> SearchResult | None:
    """The best decisions that are found with the given number of simulations, or None if none fits.

    Starts of several families are repaired and timed; the best of each are annealed a little, and the best
    of those for the rest of the effort (`Core.anneal`).

    `starts` are decisions that are worth to begin with, besides our own; the result is at least as fast
    as each of them that fits. Deterministic: effort is counted, not timed. `check` is called every now and
    then, and may end the search by an exception.
    """
    if problem.repeats:
        return _search_again(problem, evaluations, starts, seed, check)
    core = Core(problem)
    relaxation = _relaxed(problem)
    families: list[dict[Decisions, float]] = []
    for family in (starts, *_own_starts(problem, core, relaxation)):
        fitting = [start for start in map(core.repaired, family) if start is not None]
        # timed after the repair: what does not fit has no time
        families.append({start: core.makespan_us(start) for start in fitting})
    candidates = {start: us for family in families for start, us in family.items()}
    if not candidates:
        return None
    best, best_us = min(candidates.items(), key=lambda item: item[1])
    fastest_start_us = best_us
    # starts of one family are alike: of each only the best is annealed
    leaders = (min(family, key=lambda d: family[d]) for family in families if family)
    first = sorted(dict.fromkeys(leaders), key=lambda d: candidates[d])[:_STARTS]
    enough_us = relaxation.bound_us * (1 + ROUNDING)
    for number, start in enumerate(first):
        if meets(best_us, relaxation.bound_us):
            break
        check()
        found, us = core.anneal(start, int(evaluations * _FIRST_SHARE), seed + number, enough_us=enough_us)
        if us < best_us:
            best, best_us = found, us
    if not meets(best_us, relaxation.bound_us):
        check()
        rest = int(evaluations * (1 - _FIRST_SHARE * _STARTS))
        found, us = core.anneal(best, rest, seed + _STARTS, enough_us=enough_us)
        if us < best_us:
            best, best_us = found, us
    return SearchResult(best, best_us, relaxation.bound_us, fastest_start_us)


def _search_again(
    problem: Problem,
    evaluations: int,
    starts: Iterable[Decisions],
    seed: int,
    check: Callable[[], None],
) -> SearchResult | None:
    """First without running any kernel again; then from there, and from the starts, as much with that."""
    once, core = without_repeats(problem), Core(problem)
    given = list(starts)
    first = search(
        once,
        evaluations,
        starts=[without_recompute_slots(problem, once, start) for start in given],
        seed=seed,
        check=check,
    )
    if first is None:
        return None
    check()
    best = with_recompute_slots(problem, once, first.decisions)
    # what the best without repeats fetches, run again instead: a start of the other kind
    fitting = map(core.repaired, [*given, recompute_instead_of_fetch(problem, best)])
    candidates = sorted([best, *(start for start in fitting if start is not None)], key=core.makespan_us)
    bound_us = simple_time_bound_us(once)  # holds with repeats, too
    each = int(evaluations * _FIRST_SHARE)
    enough_us = bound_us * (1 + ROUNDING)
    annealed = [core.anneal(start, each, seed, enough_us=enough_us) for start in candidates]
    # annealing leaves repeats behind that are of no use any more: without them it goes on from a faster plan
    best, us = min((core.tidied(*found) for found in annealed), key=itemgetter(1))
    rest = int(evaluations * (1 - _FIRST_SHARE * len(candidates)))
    check()
    found, us = core.anneal(best, rest, seed + 1, enough_us=enough_us)
    return SearchResult(found, us, bound_us, first.fastest_start_us)


def refine(
    problem: Problem, starts: Iterable[Decisions], evaluations: int, least_us: float
) -> SearchResult | None:
    """Decisions for a budget between two, from what was found for these; or None if none of that fits.

    Each start is annealed, and the best once more. Nothing takes less than `least_us`, and the search ends
    near to that. Deterministic.
    """
    core = Core(problem)
    fitting = dict.fromkeys(start for start in map(core.repaired, starts) if start is not None)
    timed = {start: us for start in fitting if (us := core.makespan_us(start)) >= least_us}
    if not timed:
        return None
    each = int(evaluations * (1 - _LAST_SHARE) / len(timed))
    limits = {"enough_us": least_us * _NEARLY, "least_us": least_us}
    found = (core.anneal(start, each, _SEED + n, **limits) for n, start in enumerate(timed))
    best, best_us = min(found, key=itemgetter(1))
    if best_us > limits["enough_us"]:
        best, best_us = core.anneal(best, int(evaluations * _LAST_SHARE), _SEED + len(timed), **limits)
    return SearchResult(best, best_us, 0.0, min(timed.values()))


def improve(
    problem: Problem, starts: Iterable[Decisions], evaluations: int, seed: int = _SEED
) -> SearchResult | None:
    """Decisions at least as fast as the starts and the baselines, or None if none fits. Deterministic."""
    core, once = Core(problem), without_repeats(problem)
    once_core = Core(once) if problem.repeats else core
    baselines = [policy(once, once_core.makespan_us) for policy in BASELINES.values()]
    if problem.repeats:
        baselines = [with_recompute_slots(problem, once, decisions) for decisions in baselines]
    fitting = [start for start in map(core.repaired, (*starts, *baselines)) if start is not None]
    if not fitting:
        return None
    fastest_start_us, start = min(((core.makespan_us(d), d) for d in fitting), key=itemgetter(0))
    found, us = core.anneal(start, evaluations, seed)
    return SearchResult(found, us, 0.0, fastest_start_us)


def _relaxed(problem: Problem) -> Relaxation:
    """A bound, and what to round; of a large problem the simple bound alone: the solver would be slow."""
    if problem.kernel_count <= MOST_ROUNDED_KERNELS:
        return time_bound(problem)
    return Relaxation(simple_time_bound_us(problem), (), ())


def _own_starts(problem: Problem, core: Core, relaxation: Relaxation) -> Iterator[Iterable[Decisions]]:
    """Families of starts that are much alike."""
    yield (*(policy(problem, core.makespan_us) for policy in BASELINES.values()), *greedy_fills(problem))
    yield light_fills(problem)
    yield earliest_fills(problem)
    yield streaming_fills(problem)
    yield side_by_side_fills(problem)
    if relaxation.on_gpu:
        yield relaxed_fills(problem, relaxation.on_gpu, relaxation.keep)
