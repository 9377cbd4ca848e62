"""From a budget to the best plan for it, such that more memory never makes a plan slower.

Plans are searched at fixed budgets only, the rungs, which depend on graph and machine but not on the budget
asked for. From the lowest rung up, each search begins with what the rung below found, and its result is
taken only if it is faster. A budget gets the plan of the highest rung that it reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridc.ir import Graph
from hybridc.machine import Machine
from hybridc.passes.planner.bound import resident_bytes_bound, time_bound
from hybridc.passes.planner.problem import Problem
from hybridc.passes.planner.realise import Draft, realise
from hybridc.passes.planner.search import improve, search

THOROUGH_SHARES = (0.015, 0.03, 0.06, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of what the graph needs entirely on the GPU where most of the effort goes: what people ask for."""
RUNGS_PER_OCTAVE = 4
OCTAVES = 6
_LIGHT = 0.05
"""Effort of the rungs between, which only improve on the rung below: a share of a thorough search."""
_PACKING_TRIALS = 3
"""How often a search is repeated with less memory because its result could not be packed."""
_MARGIN = 1.02
"""The top rung has a little more than all bytes that are ever live, so that packing does not fail there."""


def climb(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    budgets: Sequence[int],
    smallest: Draft,
    evaluations: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Draft, ...]:
    """The best plan for each budget, in bytes; the problem's own does not matter.

    Requires: `smallest` is a plan for the smallest budget that can be met, and fits all of them.
    Ensures: never slower with a larger budget, all else equal; the same for a budget whatever others are
    asked for. `evaluations` are the simulations that a thorough search may use.
    """
    best = smallest
    bound_us = {b: time_bound(replace(problem, budget_bytes=b)).bound_us for b in budgets}
    drafts = dict.fromkeys(budgets, smallest)
    rungs = [r for r in rungs_of(problem, smallest.gpu_bytes) if r[0] <= max(budgets)]
    for number, (rung_bytes, is_thorough) in enumerate(rungs):
        report(number, len(rungs))
        if best.makespan_us <= bound_us[max(budgets)]:
            break  # no rung above can be faster
        at_rung = replace(problem, budget_bytes=rung_bytes)
        if is_thorough:
            best = _improved(graph, machine, at_rung, best, evaluations)
        else:
            best = _refined(graph, machine, at_rung, best, int(evaluations * _LIGHT))
        drafts |= {b: best for b in budgets if b >= rung_bytes}
    return tuple(replace(drafts[b], bound_us=bound_us[b]) for b in budgets)


def rungs_of(problem: Problem, smallest_bytes: int) -> list[tuple[int, bool]]:
    """The budgets that plans are searched for, and whether thoroughly: from the least possible to all."""
    largest_bytes = resident_bytes_bound(problem)
    thorough = {int(largest_bytes * share) for share in THOROUGH_SHARES} | {int(largest_bytes * _MARGIN)}
    steps = range(1, OCTAVES * RUNGS_PER_OCTAVE)
    light = {int(largest_bytes * 2 ** (-i / RUNGS_PER_OCTAVE)) for i in steps}
    between = {b for b in light if all(abs(b - t) > 0.05 * t for t in thorough)}
    rungs = {smallest_bytes: True} | dict.fromkeys(between, False) | dict.fromkeys(thorough, True)
    return sorted((b, is_thorough) for b, is_thorough in rungs.items() if b >= smallest_bytes)


def _improved(graph: Graph, machine: Machine, problem: Problem, below: Draft, evaluations: int) -> Draft:
    """A faster plan than that of the rung below, from a search of its own; or that."""
    narrowed = problem
    for _ in range(_PACKING_TRIALS):
        found = search(narrowed, evaluations, starts=[below.decisions])
        if found is None:
            return below
        draft = realise(graph, machine, narrowed, found.decisions)
        if draft.gpu_bytes <= problem.budget_bytes:
            return _faster(below, draft)
        excess_bytes = draft.gpu_bytes - problem.budget_bytes
        narrowed = replace(narrowed, budget_bytes=narrowed.budget_bytes - excess_bytes)
    return below


def _refined(graph: Graph, machine: Machine, problem: Problem, below: Draft, evaluations: int) -> Draft:
    """A faster plan than that of the rung below, from a short search that begins with it; or that."""
    found = improve(problem, below.decisions, evaluations)
    draft = realise(graph, machine, problem, found)
    return _faster(below, draft) if draft.gpu_bytes <= problem.budget_bytes else below


def _faster(one: Draft, other: Draft) -> Draft:
    return one if one.makespan_us <= other.makespan_us else other
