"""Single moves judged by their plans: by what these take once their buffers are placed, as `replay` has it.

Decisions are searched with a simulation, which says a little more or less than what is printed of a plan,
and knows nothing of the holes that packing leaves. So the last step of a search, and `hybridc explain`, place
what a move leads to.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hybridc.passes.planner.emit.materialize import SHORT, PlacedPlan, materialize
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.search.moves import ROUND_KERNELS, outcomes

# Less memory than this the moves themselves would use otherwise.
_SHARES = (1.0, 0.97, 0.94, 0.9)
"""Shares of the memory to fetch ahead into, the first that can be packed without waits for bytes."""
_WAITS = 1.005
"""So much slower than simulated a packed plan may be."""
_HARDLY_SLOWER = 1.01
"""So much slower than without it the simulation may think a plan of a move that is placed."""
_ROUNDS = 6
"""How often at most all moves are looked at again after one was made."""
_GAIN = 2e-4
"""A share of the time: gaining less is worth no copies, and no other round."""
# To place a plan takes longer than as many simulations do; more moves were seldom of use.
_SIMULATIONS_OF_PLACING, _MOST_PLACED = 2000, 16
"""Of as many simulations a search has one plan is placed in a round, and no more than so many."""
_MOST_TIMES = 2
"""So many times that in all rounds: in training steps, whose steps wait for bytes, one takes a second."""


def placed_moves(
    context: PlanningContext, problem: Problem, known: PlacedPlan, evaluations: int, enough_us: float
) -> PlacedPlan:
    """The plan that moves lead to, each of which makes the placed plan faster, or `known`.

    Those are placed that the simulation thinks best, one at least, and as many as `evaluations` simulations
    allow; how many moves a round looks at follows from the context's effort. A plan that takes at most
    `enough_us` needs none. Requires: `known` has the budget of the problem, and decisions about it. Ensures:
    what is found fits the problem's budget and the host. Deterministic.
    """
    core, best = Core(problem), known
    placements = min(1 + evaluations // _SIMULATIONS_OF_PLACING, _MOST_PLACED)
    most_kernels = min(context.effort.moved_kernels, ROUND_KERNELS)
    thoroughly, left = False, _MOST_TIMES * placements
    for _ in range(_ROUNDS):
        start = core.repaired(best.decisions)
        if start is None or best.makespan_us <= enough_us or left <= 0:
            break
        before_us, start_us = best.makespan_us, core.makespan_us(start)
        limit_us = start_us * _HARDLY_SLOWER if thoroughly else start_us
        found = outcomes(core, start, thoroughly=thoroughly, most_kernels=most_kernels)
        # what changes nothing in the simulation changes nothing that counts
        worth = [o for o in found if o.makespan_us < limit_us and o.makespan_us != start_us]
        for outcome in worth[: min(placements, left)]:
            left -= 1
            context.watch.check()
            placed = place(context, problem, outcome.decisions)
            if placed is not None and placed.makespan_us < best.makespan_us * (1 - _GAIN):
                best = placed
        if best.makespan_us >= before_us:
            if thoroughly:
                break
            thoroughly = True  # what takes longer only where nothing else is left
    return best


def place(context: PlanningContext, problem: Problem, decisions: Decisions) -> PlacedPlan | None:
    """The fastest plan of these decisions that fits, with less memory to fetch ahead into if that helps
    packing; None if none fits."""
    best: PlacedPlan | None = None
    for share in _SHARES:
        narrowed = replace(problem, budget_bytes=int(problem.budget_bytes * share))
        simulated_us = Core(narrowed).makespan_us(decisions)
        if simulated_us == inf:
            break
        placed = materialize(context, narrowed, decisions, packing=SHORT, capacity_bytes=problem.budget_bytes)
        if not placed.fits(problem.budget_bytes, context.host_bytes):
            continue
        if best is None or placed.makespan_us < best.makespan_us:
            best = placed
        if placed.makespan_us <= simulated_us * _WAITS:
            break
    return best
