"""A plan's steps -> the decisions that lead to them, to ask what other decisions would have cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridc.ir import Copy, Device, Graph, Lane, Plan, Run
from hybridc.ir.plan import align, resident_pairs
from hybridc.machine import Machine
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.order import best_order, level_order
from hybridc.passes.planner.model.problem import BEFORE_ALL, UNLIMITED_BYTES, Problem, problem_of


def recover(graph: Graph, machine: Machine, plan: Plan) -> tuple[Problem, Decisions]:
    """The problem that a plan solves, without pins, and its decisions.

    Kernels are in one of the planner's own orders, if each device runs them so, and else in that in which the
    steps run them first. That some run again is not among the
    decisions: what they make is fetched instead. States that stay on the GPU from run to run are taken to be
    there, in memory of their own.
    """
    first_run: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        if isinstance(step, Run):
            # a later run of the same kernel is a repeat
            first_run.setdefault(step.kernel, position)
    order = _order(graph, plan, first_run)
    budget_bytes = UNLIMITED_BYTES if plan.budget_bytes is None else plan.budget_bytes
    pairs = resident_pairs(graph, plan.steps)
    # what states hold all the time is not there for the rest
    budget_bytes -= sum(align(graph.tensor[old].size_bytes) for old in pairs)
    problem = problem_of(without_bytes(graph, {*pairs, *pairs.values()}), machine, budget_bytes, order=order)
    on_cpu = tuple(plan.steps[first_run[name]].lane is Lane.CPU for name in problem.kernel_names)
    return problem, Decisions(on_cpu, _kept(problem, plan, on_cpu, first_run, _arrivals(graph, plan)))


def _order(graph: Graph, plan: Plan, first_run: Mapping[str, int]) -> Sequence[int]:
    """The order of kernels that a plan was made with, as far as its steps tell."""
    by_step = sorted(range(len(graph.kernels)), key=lambda i: first_run[graph.kernels[i].name])
    lanes = {i: plan.steps[first_run[graph.kernels[i].name]].lane for i in by_step}

    def of_lanes(order: Sequence[int]) -> list[list[int]]:
        return [[i for i in order if lanes[i] is lane] for lane in (Lane.GPU, Lane.CPU)]

    # between kernels of different devices only the planner's order says which fetch comes first
    own = (order for order in (best_order(graph), level_order(graph)) if of_lanes(order) == of_lanes(by_step))
    return next(own, by_step)


def _arrivals(graph: Graph, plan: Plan) -> dict[str, list[int]]:
    """Positions of the steps that put each tensor on the GPU again: copies, and all but first runs."""
    found: dict[str, list[int]] = {}
    ran: set[str] = set()
    for position, step in enumerate(plan.steps):
        if isinstance(step, Copy) and step.target is Device.GPU:
            found.setdefault(step.tensor, []).append(position)
        elif isinstance(step, Run):
            # the first run makes a tensor, a later one brings it back
            for name in graph.kernel[step.kernel].outputs if step.kernel in ran else ():
                found.setdefault(name, []).append(position)
            ran.add(step.kernel)
    return found


def _kept(
    problem: Problem,
    plan: Plan,
    on_cpu: tuple[bool, ...],
    first_run: Mapping[str, int],
    arrivals: Mapping[str, Sequence[int]],
) -> tuple[bool, ...]:
    """A gap is kept if nothing puts its tensor on the GPU again between the uses there that enclose it."""
    resident = {b.tensor for b in plan.buffers if b.device is Device.GPU and b.first_step < 0}
    keep = [False] * len(problem.gaps)
    for tensor, gaps in enumerate(problem.gaps_of):
        name = problem.tensor_names[tensor]
        # resident weights have a buffer from before the first step
        if problem.is_weight[tensor] and name in resident:
            keep[gaps.start : gaps.stop] = [True] * len(gaps)
            continue
        producer = problem.producer[tensor]
        is_there = producer != BEFORE_ALL and not on_cpu[producer]
        since, first = first_run[problem.kernel_names[producer]] if is_there else -1, gaps.start
        for gap in gaps:
            user = problem.gaps[gap].end
            # the gap goes on: a use on the CPU says nothing of the GPU's copy
            if on_cpu[user]:
                continue
            now = first_run[problem.kernel_names[user]]
            if is_there and not any(since < again < now for again in arrivals.get(name, ())):
                keep[first : gap + 1] = [True] * (gap + 1 - first)
            is_there, since, first = True, now, gap + 1
    return tuple(keep)
