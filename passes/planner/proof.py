"""Small graphs: the fastest plan of all instead of the fastest that was found."""

from __future__ import annotations

from dataclasses import replace

from hybridc.ir import Graph
from hybridc.machine import Machine
from hybridc.passes.planner.bound import simple_time_bound_us, time_bound
from hybridc.passes.planner.exact import LARGEST_KERNEL_COUNT, solve_exactly
from hybridc.passes.planner.problem import Problem
from hybridc.passes.planner.realise import Draft, realise

_PACKING_TRIALS = 3
"""How often to solve with less memory because the result could not be packed."""


def proven(graph: Graph, machine: Machine, draft: Draft, budget_bytes: int, effort: float) -> Draft:
    """The fastest plan for a budget, with its bound, where the graph is small and OR-tools is there.

    Unlike the draft it may run the kernels in another order. What cannot be proven or packed within the
    effort, in units of `solve_exactly`, leaves the draft as it is. Deterministic. Ensures: not slower.
    """
    problem = replace(draft.problem, budget_bytes=min(budget_bytes, _all_bytes(draft.problem)))
    least_us = simple_time_bound_us(problem)  # for every order
    if problem.kernel_count > LARGEST_KERNEL_COUNT or draft.makespan_us <= least_us:
        return draft
    first = solve_exactly(problem, effort=effort, least_us=least_us, known_us=draft.makespan_us)
    best, found = draft, first
    for _ in range(_PACKING_TRIALS):
        if found is None or found.outcome.makespan_us >= draft.makespan_us:
            break
        plan = realise(graph, machine, found.problem, found.decisions, outcome=found.outcome)
        if plan.gpu_bytes <= budget_bytes:
            best = plan if plan.makespan_us < draft.makespan_us else draft
            break
        problem = replace(problem, budget_bytes=problem.budget_bytes - (plan.gpu_bytes - budget_bytes))
        found = solve_exactly(problem, effort=effort, least_us=least_us, known_us=draft.makespan_us)
    if first is not None and first.is_optimal:
        return replace(best, bound_us=min(first.bound_us, best.makespan_us))
    if best is draft:
        return draft
    return replace(best, bound_us=time_bound(replace(best.problem, budget_bytes=budget_bytes)).bound_us)


def _all_bytes(problem: Problem) -> int:
    """No plan can make use of more."""
    return sum(problem.size_bytes) + sum(problem.workspace_bytes)
