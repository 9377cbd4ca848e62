"""Small graphs: the fastest plan of all instead of the fastest that was found."""

from __future__ import annotations

from dataclasses import replace

from hybridc.passes.planner.bounds.bound import meets, simple_time_bound_us, time_bound
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT, ExactSolution, solve_exactly
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize, repacked
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import without_repeats
from hybridc.passes.planner.model.simulate import EventKind, SimulatedRun
from hybridc.passes.planner.model.structure import all_bytes

# Each trial is another proof, which may take all of its effort again.
_PACKING_TRIALS = 3
"""How often to solve with less memory because the result could not be packed."""


def proven(context: PlanningContext, placed: PlacedPlan, budget_bytes: int) -> PlacedPlan:
    """The fastest plan for a budget in bytes, with its bound, where the graph is small and OR-tools is there.

    Unlike the given plan it may run the kernels in another order, but none twice: a plan that does may be
    faster, and keeps its own bound. What cannot be proven or packed within the context's effort leaves the
    given plan as it is. Deterministic. Ensures: not slower, and arenas as tight as those of the given plan.
    """
    effort = context.effort.of_proof
    once = without_repeats(placed.problem)
    # more memory than all tensors have only makes the solver's numbers larger
    problem = replace(once, budget_bytes=min(budget_bytes, all_bytes(once)))
    least_us = simple_time_bound_us(problem)  # for every order
    if problem.kernel_count > LARGEST_KERNEL_COUNT or meets(placed.makespan_us, least_us):
        return placed
    first = solve_exactly(problem, effort=effort, least_us=least_us, known_us=placed.makespan_us)
    best, found = placed, first
    for _ in range(_PACKING_TRIALS):
        if found is None or found.run.makespan_us >= placed.makespan_us:
            break
        plan = _materialized(context, found)
        if problem.host_bytes is not None and plan.host_bytes > max(problem.host_bytes, placed.host_bytes):
            break  # the solver knows nothing of the host
        if plan.gpu_bytes <= budget_bytes:
            best = repacked(context, plan) if plan.makespan_us < placed.makespan_us else placed
            break
        problem = replace(problem, budget_bytes=problem.budget_bytes - (plan.gpu_bytes - budget_bytes))
        found = solve_exactly(problem, effort=effort, least_us=least_us, known_us=placed.makespan_us)
    if first is not None and first.is_optimal and not _runs_again(best):
        return replace(best, bound_us=min(first.bound_us, best.makespan_us))
    if best is placed:
        return placed
    return replace(best, bound_us=time_bound(replace(best.problem, budget_bytes=budget_bytes)).bound_us)


def _runs_again(placed: PlacedPlan) -> bool:
    return any(not placed.decisions.on_cpu[repeat] for repeat in placed.problem.repeats)


def _materialized(context: PlanningContext, found: ExactSolution) -> PlacedPlan:
    """A proven schedule without the copies that it can do without; simulated, if that is as fast."""
    us = found.run.makespan_us
    tidy, tidy_us = Core(found.problem).tidied(found.decisions, us)
    if tidy_us <= us:
        return materialize(context, found.problem, tidy)
    run = without_idle_offloads(found.problem, found.run)
    return materialize(context, found.problem, found.decisions, run=run)


def without_idle_offloads(problem: Problem, run: SimulatedRun) -> SimulatedRun:
    """The run without copies to the host that nothing there reads and that no output of the model needs."""
    on_cpu = [e.index for e in run.events if e.kind is EventKind.RUN_CPU]
    read = {tensor for kernel in on_cpu for tensor in problem.inputs[kernel]}
    read |= {e.index for e in run.events if e.kind is EventKind.FETCH}
    events = tuple(
        e
        for e in run.events
        if e.kind is not EventKind.OFFLOAD or problem.wanted_on_host[e.index] or e.index in read
    )
    return replace(run, events=events)
