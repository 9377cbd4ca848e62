"""Accept or refuse the times that a plan claims for a machine. Shares no code with the planner."""

from __future__ import annotations

import math
from itertools import starmap

from hybridc.errors import PlanError
from hybridc.ir import Graph, Plan
from hybridc.machine import Machine
from hybridc.machines.shared_run import run_shared, work_of

# The planner settles one step at a time, and the one that is settled later bears the loss of both: in sum
# 0.57 to 1.39 times what rates that change at every begin and end make it. Its runs differed from such ones
# by at most 0.55 of what is lost, on 190 drawn machines.
LEAST_LOST = 0.4
"""Of what steps lose to each other in the run that is made here a plan must account for this share."""
MOST_SPARED = 0.75
"""A plan's run may be shorter by this share of what is lost."""
SLIGHT = 0.01
"""Of the run's time: a share below 0.5 % of a memory counts as no loss in plans."""
_ROUNDING = 1e-9


def verify_times(graph: Graph, plan: Plan, machine: Machine) -> None:
    """Check the times of a plan that `verify` has accepted against a simulation of its own.

    A time that is too long is allowed: a plan whose steps were changed after the search may keep losses that
    are none any more. Raises PlanError HC222 where a step takes less than it does by itself, or where the
    plan's times leave out what its steps lose to each other at shared memories and the link.
    """
    work = work_of(graph, plan.steps, machine)
    for position, (one, us) in enumerate(zip(work, plan.step_us, strict=True)):
        if us < one.us * (1 - _ROUNDING):
            raise _refuse(
                f"step {position} is said to take {us:.6g} us, but by itself it takes {one.us:.6g} us"
            )
    run = run_shared(work, machine.link.both_directions)
    lost_us = math.fsum(us for each in run.lost_us for us in each.values())
    slight_us = SLIGHT * run.makespan_us
    told_us = math.fsum(starmap(lambda one, us: us - one.us, zip(work, plan.step_us, strict=True)))
    # copies that fall away with states on the GPU may be those that bore the losses of steps that stay
    if not graph.loop_carried and told_us < LEAST_LOST * lost_us - slight_us:
        raise _refuse(
            f"its steps lose {lost_us:.6g} us to each other, of which it accounts for {told_us:.6g} us"
        )
    if plan.makespan_us < run.makespan_us - MOST_SPARED * lost_us - slight_us:
        raise _refuse(
            f"is said to take {plan.makespan_us:.6g} us, but takes {run.makespan_us:.6g} us where steps share"
            " memories and the link"
        )


def _refuse(what: str) -> PlanError:
    remedy = "corrupted plan, or a hybridc bug: compile the model again"
    return PlanError("HC222", what, where="the plan", remedy=remedy)
