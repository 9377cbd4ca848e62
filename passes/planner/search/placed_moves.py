"""Single moves judged by their plans: by what these take once their buffers are placed, as `replay` has it.

Decisions are searched with a simulation, which says a little more or less than what is printed of a plan,
and knows nothing of the holes that packing leaves. So the last step of a search, and `hybridc explain`, place
what a move leads to.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hybridc.passes.planner.emit.materialize import (
    PlacedPlan,
    listed_plan,
    unpacked_us,
    with_places,
)
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.search.moves import ROUND_KERNELS, outcomes

# Less memory than this the moves themselves would use otherwise.
_SHARES = (1.0, 0.97, 0.94, 0.9)
"""Shares of the memory to fetch ahead into, the first that can be packed without waits for bytes."""
_WAITS = 1.005
"""So much slower than without waits for bytes a packed plan may be."""
# Of plans of ResNet-152 packing made some 0.05 % faster: a step that waits leaves the link to another.
_HASTENED = 1.001
"""So much slower than it is with waits for bytes a plan without them may seem."""
_HARDLY_SLOWER = 1.01
"""So much slower than without it the simulation may think a plan of a move that is placed."""
_ROUNDS = 6
"""How often at most all moves are looked at again after one was made."""
_GAIN = 2e-4
"""A share of the time: gaining less is worth no copies, and no other round."""
# More were seldom of use.
_MOST_PLACED = 16
"""Moves that are placed in a round, at most."""
_MOST_TIMES = 2
"""So many times what a round may place is placed in all rounds."""


def placed_moves(
    context: PlanningContext, problem: Problem, known: PlacedPlan, enough_us: float
) -> PlacedPlan:
    """The plan that moves lead to, each of which makes the placed plan faster, or `known`.

    Those are placed that the simulation thinks best. How many they are, and how many moves a round looks at,
    follows from the context's effort: of a large graph with little effort none. A plan that takes at most
    `enough_us` needs none. Requires: `known` has the budget of the problem, and decisions about it. Ensures:
    what is found fits the problem's budget and the host. Deterministic.
    """
    core, best = Core(problem), known
    placements = min(int(context.effort.placed_steps / max(len(known.listed), 1)), _MOST_PLACED)
    most_kernels = min(context.effort.moved_kernels, ROUND_KERNELS)
    thoroughly, left = False, _MOST_TIMES * placements
    for _ in range(_ROUNDS):
        start = core.repaired(best.decisions)
        if start is None or best.makespan_us <= enough_us or left <= 0:
            break
        before_us, start_us = best.makespan_us, core.makespan_us(start)
        most_us = start_us * _HARDLY_SLOWER if thoroughly else start_us
        found = outcomes(core, start, thoroughly=thoroughly, most_kernels=most_kernels)
        # what changes nothing in the simulation changes nothing that counts
        worth = [o for o in found if o.makespan_us < most_us and o.makespan_us != start_us]
        for outcome in worth[: min(placements, left)]:
            left -= 1
            context.watch.check()
            limit_us = best.makespan_us * (1 - _GAIN)
            placed = place(context, problem, outcome.decisions, limit_us)
            if placed is not None and placed.makespan_us < limit_us:
                best = placed
        if best.makespan_us >= before_us:
            if thoroughly:
                break
            thoroughly = True  # what takes longer only where nothing else is left
    return best


def place(
    context: PlanningContext, problem: Problem, decisions: Decisions, limit_us: float = inf
) -> PlacedPlan | None:
    """The fastest plan of these decisions that fits, with less memory to fetch ahead into if that helps
    packing; None if none fits, or if none would take less than `limit_us` though no step waited for bytes."""
    best: PlacedPlan | None = None
    for share in _SHARES:
        narrowed = replace(problem, budget_bytes=int(problem.budget_bytes * share))
        if Core(narrowed).makespan_us(decisions) == inf:
            break
        unplaced = listed_plan(context, narrowed, decisions)
        least_us = unpacked_us(context, unplaced)
        # with less memory to fetch ahead into fetches only come later
        if least_us >= min(limit_us, best.makespan_us if best else inf) * _HASTENED:
            break
        placed = with_places(context, unplaced, problem.budget_bytes, must_fit=True)
        if not placed.fits(problem.budget_bytes, context.host_bytes):
            continue
        if best is None or placed.makespan_us < best.makespan_us:
            best = placed
        if placed.makespan_us <= least_us * _WAITS:
            break
    return best
