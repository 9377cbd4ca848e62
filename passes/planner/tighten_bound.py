"""A tighter bound on the time of one plan than its search computes, for a given effort.

The search bounds each budget by a linear programme, which takes a moment. For a single plan two more methods
are affordable: the dynamic programme for chains of kernels, and a branch and bound over the linear programme.
Their effort is counted, as everywhere in the planner: the same arguments give the same bound everywhere.
"""

from __future__ import annotations

from dataclasses import replace

from hybridc.ir import Plan
from hybridc.machine import Machine
from hybridc.passes.planner.bounds.bound import time_bound
from hybridc.passes.planner.bounds.chain.chain import chain_time_bound_us, is_chain
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import with_repeats
from hybridc.passes.planner.model.structure import all_bytes, runs_again

_CLOSE = 0.001
"""Gap to the bound that is not worth tightening it."""
_DIVISION_SECONDS = 0.0055
"""Per kernel, what dividing the cells of the dynamic programme once takes; measured on 54 to 64 kernels."""
_FIRST_DIVISIONS = 2
"""What it takes before it divides any cell, in divisions."""
_ROOT_SECONDS, _NODE_SECONDS = 0.1, 0.01
"""Per kernel, what the root of the branch and bound takes, and every further node; likewise."""
_MOST_BRANCHED = 300
"""Kernels up to which the root takes half a minute: its time grows faster than their number."""


def with_tight_bound(tiling: Tiling, machine: Machine, plan: Plan, seconds: float) -> Plan:
    """The plan with the best bound on its time that `seconds` of a nominal machine find.

    No plan is faster that fits the budget and runs the kernels of the tiling in its order. Of up to
    `LARGEST_KERNEL_COUNT` kernels every order is searched, and the bound stays as it is.
    Requires: the plan is of `tiling` and has a GPU, and the graph carries no states but caches. Ensures: not
    looser than before, and not above the plan's own time.
    """
    if len(tiling.graph.kernels) <= LARGEST_KERNEL_COUNT:
        return plan
    names = {name for pair in tiling.graph.caches for name in pair}
    graph = without_bytes(tiling.graph, names) if names else tiling.graph  # they may lie anywhere
    problem = PlanningContext(graph, machine, tiling.pins, tiling.order).problem
    most_bytes = all_bytes(problem)
    budget_bytes = most_bytes if plan.budget_bytes is None else min(plan.budget_bytes, most_bytes)
    problem = replace(problem, budget_bytes=budget_bytes)
    bound_us = tightened_bound_us(problem, plan.time_bound_us, plan.makespan_us, seconds)
    return replace(plan, time_bound_us=bound_us)


def tightened_bound_us(problem: Problem, bound_us: float, time_us: float, seconds: float) -> float:
    """The best bound on plans of a problem, in which kernels may run again as the planner lets them.

    `bound_us` is one that is known, `time_us` the time of a plan: the result is between them. A chain of
    kernels gets half of the effort, what is left goes to the branch and bound.
    """
    again = runs_again(with_repeats(problem))
    kernels = problem.kernel_count
    left_seconds = seconds
    if is_chain(problem) and bound_us * (1 + _CLOSE) < time_us:
        divisions = int(seconds / 2 / (kernels * _DIVISION_SECONDS)) - _FIRST_DIVISIONS
        if divisions >= 0:
            left_seconds -= seconds / 2
            found_us = chain_time_bound_us(problem, again=again, divisions=divisions, known_us=time_us)
            bound_us = max(bound_us, found_us)
    nodes = 1 + int((left_seconds / kernels - _ROOT_SECONDS) / _NODE_SECONDS) if kernels else 0
    if kernels <= _MOST_BRANCHED and nodes > 0 and bound_us * (1 + _CLOSE) < time_us:
        bound_us = max(bound_us, time_bound(problem, again=again, shared=True, nodes=nodes).bound_us)
    return min(bound_us, time_us)
