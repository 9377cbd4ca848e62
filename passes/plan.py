"""From a graph, a machine and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridc.ir import Arena, Buffer, Device, Graph, Plan, Step
from hybridc.machine import Machine
from hybridc.passes.cost import step_times_us
from hybridc.passes.partition import Effort, partition, partition_each
from hybridc.passes.pins import NO_PINS, Pins
from hybridc.passes.planner.realise import Draft
from hybridc.passes.simulate import timeline


def make_plan(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    devices: Sequence[Device],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Plan `graph` for the devices of a target: `(CPU,)` or `(GPU, CPU)`.

    `budget_bytes` limits the GPU's arena, its weights included; None means no limit. Raises PlanError as
    `partition` does.
    """
    draft = partition(graph, machine, budget_bytes, devices, pins=pins, effort=effort, report=report)
    return plan_of(graph, machine, budget_bytes if Device.GPU in devices else None, draft)


def make_plans(
    graph: Graph,
    machine: Machine,
    budgets: Sequence[int],
    devices: Sequence[Device],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Plan, ...]:
    """A plan for each of several budgets in bytes, each the one that `make_plan` makes.

    Without budgets there is one plan, which has no limit. Raises PlanError as `partition` does; HC203 names
    the smallest budget.
    """
    if not budgets:
        return (make_plan(graph, machine, None, devices, pins=pins, effort=effort, report=report),)
    drafts = partition_each(graph, machine, budgets, pins=pins, effort=effort, report=report)
    return tuple(
        plan_of(graph, machine, budget_bytes, draft)
        for budget_bytes, draft in zip(budgets, drafts, strict=True)
    )


def plan_of(graph: Graph, machine: Machine, budget_bytes: int | None, draft: Draft) -> Plan:
    """The plan that a draft amounts to."""
    plan = assemble(graph, machine, budget_bytes, draft.steps, draft.buffers, draft.arenas)
    return replace(plan, time_bound_us=draft.bound_us)


def assemble(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    steps: tuple[Step, ...],
    buffers: tuple[Buffer, ...],
    arenas: tuple[Arena, ...],
) -> Plan:
    """A plan out of what the stages decided, with its predicted times."""
    step_us = step_times_us(graph, steps, machine)
    return Plan(steps, buffers, arenas, budget_bytes, step_us, timeline(steps, step_us)[0])
