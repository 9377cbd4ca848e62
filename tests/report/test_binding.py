"""What a run waits for, and what that loses to others."""

from __future__ import annotations

from hybridc.ir import Copy, Device, Graph, Lane, Plan, Run
from hybridc.machine import Link, Machine, Processor
from hybridc.machines.shared_run import Resource, run_shared, work_of
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.report.binding import binding_line, binding_rows
from tests.support.graphs import GraphBuilder

GPU, CPU = Device.GPU, Device.CPU
MACHINE = Machine(
    "m",
    Processor("g", 1e9, 1e6, 0, 1 << 32),
    Processor("c", 1e9, 40, 0, 1 << 34, shared_gb_s=20),
    Link(10, 10, 0, both_directions=0.5),
)


def built() -> Graph:
    build = GraphBuilder(bytes_each=1)
    build.input("x", 1_000_000)
    build.kernel((build.input("a", 10_000_000),), {"b": 10_000_000})
    build.kernel(("b",), {"y": 1_000_000})
    return build.graph("y")


GRAPH = built()


def shared_plan() -> Plan:
    """A kernel that needs all of the host's memory, and copies both ways that nothing waits for."""
    steps = (Run("k0", CPU), Copy("x", CPU, GPU), Copy("y", GPU, CPU))
    work = work_of(GRAPH, steps, MACHINE)
    lost_us = run_shared(work, MACHINE.link.both_directions).lost_us
    step_us = tuple(one.us + sum(lost.values()) for one, lost in zip(work, lost_us, strict=True))
    return Plan(steps, (), (), None, step_us, timeline(steps, step_us)[0])


def test_losses_are_named_by_what_holds_the_lane_up() -> None:
    [row] = binding_rows(GRAPH, shared_plan(), MACHINE)
    assert row.lane is Lane.CPU and row.lost_to == Resource.HOST and 0 < row.lost_us < row.busy_us
    assert "of it lost to others at the host's memory)" in binding_line([row])


def test_without_a_machine_or_losses_none_are_told() -> None:
    steps = (Run("k0", CPU),)
    step_us = tuple(one.us for one in work_of(GRAPH, steps, MACHINE))
    plan = Plan(steps, (), (), None, step_us, sum(step_us))
    for machine in (None, MACHINE):
        [row] = binding_rows(GRAPH, plan, machine)
        assert (row.lost_us, row.lost_to) == (0, "") and "lost" not in binding_line([row])
