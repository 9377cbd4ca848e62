"""Search for the best decisions: fills and baselines as starts, simulated annealing from the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridc.passes.planner.bound import Relaxation, simple_time_bound_us, time_bound
from hybridc.passes.planner.core import Core
from hybridc.passes.planner.decisions import Decisions
from hybridc.passes.planner.policies import BASELINES, greedy_fills, light_fills, relaxed_fills
from hybridc.passes.planner.problem import Problem

_STARTS = 3
"""Starts that are annealed a little before the best of them gets the rest of the effort."""
_FIRST_SHARE = 0.2
"""Share of the effort that each of them gets."""
_SEED = 1
_MOST_RELAXED = 1000
"""Kernels up to which the linear programme takes a second or so."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best decisions found for a problem, and what no decisions can be faster than."""

    decisions: Decisions
    makespan_us: float
    bound_us: float

    @property
    def gap(self) -> float:
        """How much slower than the bound, at most: 0.03 is three per cent."""
        return self.makespan_us / self.bound_us - 1 if self.bound_us else 0.0


def search(
    problem: Problem, evaluations: int, *, starts: Iterable[Decisions] = (), seed: int = _SEED
) -> Found | None:
    """The best decisions that are found with the given number of simulations, or None if none fits.

    `starts` are decisions that are worth to begin with, besides our own; the result is at least as fast
    as each of them that fits. Deterministic: effort is counted, not timed.
    """
    core = Core(problem)
    relaxation = _relaxed(problem)
    candidates: dict[Decisions, float] = {}
    for start in (*starts, *_own_starts(problem, core, relaxation)):
        fitting = core.repaired(start)
        if fitting is not None and fitting not in candidates:
            candidates[fitting] = core.makespan_us(fitting)
    if not candidates:
        return None
    best, best_us = min(candidates.items(), key=lambda item: item[1])
    first = sorted(candidates, key=lambda d: candidates[d])[:_STARTS]
    for number, start in enumerate(first):
        if best_us <= relaxation.bound_us:
            break
        found, us = core.anneal(
            start, int(evaluations * _FIRST_SHARE), seed + number, enough_us=relaxation.bound_us
        )
        if us < best_us:
            best, best_us = found, us
    if best_us > relaxation.bound_us:
        rest = int(evaluations * (1 - _FIRST_SHARE * _STARTS))
        found, us = core.anneal(best, rest, seed + _STARTS, enough_us=relaxation.bound_us)
        if us < best_us:
            best, best_us = found, us
    return Found(best, best_us, relaxation.bound_us)


def improve(problem: Problem, start: Decisions, evaluations: int, seed: int = _SEED) -> Decisions:
    """Decisions at least as fast as a start that fits the budget. Deterministic."""
    return Core(problem).anneal(start, evaluations, seed)[0]


def _relaxed(problem: Problem) -> Relaxation:
    """A bound, and what to round; of a large problem the simple bound alone: the solver would be slow."""
    if problem.kernel_count <= _MOST_RELAXED:
        return time_bound(problem)
    return Relaxation(simple_time_bound_us(problem), (), ())


def _own_starts(problem: Problem, core: Core, relaxation: Relaxation) -> Iterator[Decisions]:
    for policy in BASELINES.values():
        yield policy(problem, core.makespan_us)
    yield from greedy_fills(problem)
    yield from light_fills(problem)
    if relaxation.on_gpu:
        yield from relaxed_fills(problem, relaxation.on_gpu, relaxation.keep)
