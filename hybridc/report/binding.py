"""What a predicted run waits for: the steps of its longest chain, by lane; and what bounds every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridc.ir import Copy, Device, Graph, Lane, Plan
from hybridc.machine import Machine
from hybridc.machines.shared_run import Resource, run_shared, work_of
from hybridc.options import format_bytes
from hybridc.passes.planner.bounds.parts import bound_parts
from hybridc.passes.planner.emit.recover import recover
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import with_repeats
from hybridc.passes.planner.model.structure import runs_again
from hybridc.report.lanes import LaneRow, lane_row, spans_of
from hybridc.report.table import format_us

_WORK = {
    Lane.GPU: "kernels on the GPU take",
    Lane.CPU: "kernels on the CPU take",
    Lane.H2D: "{copied} must cross the link to the GPU:",
    Lane.D2H: "{copied} must cross the link to the CPU:",
    Lane.NET: "sums over the ranks take",
}


# Less is not worth a word, and a measured profile shares a little nearly everywhere.
_WORTH_TELLING = 0.01
"""Share of a lane's time that is lost."""
_MOST_KERNELS = 400
"""Kernels up to which a bound is explained: the relaxation is solved again, in about a second then."""


def binding_rows(graph: Graph, plan: Plan, machine: Machine | None = None) -> tuple[LaneRow, ...]:
    """The lanes of a chain of steps that follow each other without a pause to the end of the run.

    Only what is done faster on this chain makes the run faster. The lane that it spends most time on first.
    With the machine also what they lose there to others, and at which memory, or at the link.
    """
    chain = _longest_chain(plan)
    positions = {lane: [i for i in chain if plan.steps[i].lane is lane] for lane in Lane}
    rows = [lane_row(graph, plan, lane, own) for lane, own in positions.items()]
    if machine is not None:
        run = run_shared(work_of(graph, plan.steps, machine), machine.link.both_directions)
        rows = [_with_losses(row, [run.lost_us[i] for i in positions[row.lane]]) for row in rows]
    return tuple(sorted((row for row in rows if row.busy_us > 0), key=lambda row: -row.busy_us))


def _with_losses(row: LaneRow, lost_us: Sequence[Mapping[Resource, float]]) -> LaneRow:
    """With what its steps lose; of their time as the plan says it at most all."""
    by_resource = {resource: math.fsum(each.get(resource, 0.0) for each in lost_us) for resource in Resource}
    told_us = min(math.fsum(by_resource.values()), row.busy_us)
    if told_us <= _WORTH_TELLING * row.busy_us:
        return row
    return replace(row, lost_us=told_us, lost_to=max(Resource, key=lambda r: by_resource[r]).value)


def binding_line(rows: Sequence[LaneRow]) -> str:
    """A sentence about all lanes of `binding_rows`; empty without any."""
    told = (
        f"{_WORK[row.lane].format(copied=format_bytes(row.copied_bytes))} {format_us(row.busy_us)}"
        + (f" ({format_us(row.lost_us)} of it lost to others at {row.lost_to})" if row.lost_to else "")
        for row in rows
    )
    return f"What the run waits for: {', '.join(told)}." if rows else ""


def bound_line(graph: Graph, plan: Plan, machine: Machine, pins: Pins) -> str:
    """A sentence about the lanes that keep every plan for the budget from being faster; empty if unknown.

    They are those of the relaxation that bounds the plan (`bound_parts`), whose bound the plan's may exceed.
    """
    if len(plan.arenas) < 2 or len(graph.kernels) > _MOST_KERNELS:
        return ""
    problem = pinned(recover(graph, machine, plan)[0], pins)
    parts = bound_parts(problem, again=runs_again(with_repeats(problem)))
    told = (
        f"{_WORK[part.lane].format(copied=format_bytes(part.copied_bytes))} {format_us(part.us)}"
        for part in parts
    )
    return f"What bounds every plan for the budget: {', '.join(told)}." if parts else ""


def pinned(problem: Problem, pins: Pins) -> Problem:
    """The problem with kernels only on the devices that they are pinned to."""

    def times_us(of: Sequence[float], other: Device) -> tuple[float, ...]:
        named = zip(problem.kernel_names, of, strict=True)
        return tuple(math.inf if pins.get(name) is other else us for name, us in named)

    return replace(
        problem,
        gpu_us=times_us(problem.gpu_us, Device.CPU),
        cpu_us=times_us(problem.cpu_us, Device.GPU),
    )


def _longest_chain(plan: Plan) -> list[int]:
    """Positions of steps, the last first, each of which starts when the next one in the list ends."""
    spans = spans_of(plan)
    before: list[list[int]] = []
    latest: dict[Lane, int] = {}
    for position, step in enumerate(plan.steps):
        before.append([*step.waits, *([latest[step.lane]] if step.lane in latest else [])])
        latest[step.lane] = position
    chain: list[int] = []
    candidates: Sequence[int] = range(len(plan.steps))
    while candidates:
        # of those that end together one that copies: it is the kernel that waits for the copy
        chain.append(max(candidates, key=lambda i: (spans[i][1], isinstance(plan.steps[i], Copy))))
        candidates = before[chain[-1]] if spans[chain[-1]][0] > 0 else ()
    return chain
