"""Accept or refuse the times that a plan claims for a machine. Shares no code with the planner."""

from __future__ import annotations

from hybridc.errors import PlanError
from hybridc.ir import Graph, Plan
from hybridc.machine import Machine
from hybridc.machines.shared_run import work_of

_ROUNDING = 1e-9


def verify_times(graph: Graph, plan: Plan, machine: Machine) -> None:
    """Check the times of steps of a plan that `verify` has accepted against the machine's profile.

    What steps lose to each other at shared memories and the link may be any time: tests hold it against
    `shared_run`. Raises PlanError HC222 where a step takes less than it does by itself.
    """
    for position, (one, us) in enumerate(zip(work_of(graph, plan.steps, machine), plan.step_us, strict=True)):
        if us < one.us * (1 - _ROUNDING):
            raise PlanError(
                "HC222",
                f"step {position} is said to take {us:.6g} us, but by itself it takes {one.us:.6g} us",
                where="the plan",
                remedy="corrupted plan, or a hybridc bug: compile the model again",
            )
