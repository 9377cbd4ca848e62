"""Times that plans claim for machines whose lanes share memories and the link."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import starmap

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Copy, Device, Graph, Lane, Plan, Run
from hybridc.ir.verify import verify
from hybridc.machine import Link, Machine, Processor
from hybridc.machines.shared_run import Resource, Work, alone_us, run_shared, work_of
from hybridc.machines.verify_times import verify_times
from hybridc.passes.planner.emit.replay import demands_of, replay
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import graphs, machine, machines, with_updates
from tests.support.planner_graphs import random_dag
from tests.support.random_examples import random_examples

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(seconds=0.002)
LITTLE = Machine(
    "little",
    Processor("g", 3000, 128, 5, 1 << 32, shared_gb_s=80),
    Processor("c", 400, 40, 2, 1 << 34, shared_gb_s=20),
    Link(12, 12, 10, both_directions=0.6),
)
quick = random_examples(60)


def planned(graph: Graph, machine: Machine, share: float) -> Plan:
    least, most = smallest_budget_bytes(graph, machine), all_gpu_peak_bytes(graph, machine)
    return make_plan(graph, machine, max(least, int(share * most)), BOTH, effort=BRIEF)


def loses_as_it_claims(graph: Graph, plan: Plan, machine: Machine) -> bool:
    """Whether a plan's times have in them what a run of another code says that its steps lose to each other.

    A share below 0.5 % of a memory counts as no loss in plans where nothing loses more. Times may be too
    long: a plan that turns out faster than one with more memory is said to take as long.
    """
    work = work_of(graph, plan.steps, machine)
    run = run_shared(work, machine.link.both_directions)
    lost_us = math.fsum(us for each in run.lost_us for us in each.values())
    told_us = math.fsum(starmap(lambda one, us: us - one.us, zip(work, plan.step_us, strict=True)))
    slight_us = 0.01 * run.makespan_us
    return told_us >= lost_us - slight_us and plan.makespan_us >= run.makespan_us - slight_us


def accepted(graph: Graph, plan: Plan, machine: Machine) -> None:
    verify(graph, plan)
    verify_times(graph, plan, machine)
    assert loses_as_it_claims(graph, plan, machine)


def refused(graph: Graph, plan: Plan, machine: Machine, code: str, what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        verify(graph, plan)
        verify_times(graph, plan, machine)
    assert error.value.code == code


def with_times(plan: Plan, step_us: tuple[float, ...]) -> Plan:
    makespan_us, _ = timeline(plan.steps, step_us)
    return replace(plan, step_us=step_us, makespan_us=makespan_us, time_bound_us=0.0)


@st.composite
def sharing(draw: st.DrawFn) -> Machine:
    """A machine whose memories and link reach little for several at once, or as much as each by itself."""
    drawn, kept = draw(machines()), st.sampled_from([1.0, 0.9, 0.6, 0.3])
    return replace(
        drawn,
        gpu=replace(drawn.gpu, shared_gb_s=draw(kept) * drawn.gpu.bandwidth_gb_s),
        cpu=replace(drawn.cpu, shared_gb_s=draw(kept) * drawn.cpu.bandwidth_gb_s),
        link=replace(drawn.link, both_directions=draw(kept)),
    )


def test_what_is_lost_is_told_by_resource() -> None:
    up = Work(Lane.H2D, (), 30.0, ((Resource.HOST, 0.3), (Resource.GPU, 0.1)))
    down = Work(Lane.D2H, (), 60.0, ((Resource.HOST, 0.3), (Resource.GPU, 0.1)))
    kernel = Work(Lane.CPU, (0,), 20.0, ((Resource.HOST, 0.9),))
    assert run_shared((up, down), 0.75).makespan_us == pytest.approx(70)
    run = run_shared((up, down, kernel), 0.75)
    # up ends at 40 with 30 of down done; then both have 1 / 1.2 of their speed, until the kernel ends at 64
    assert run.makespan_us == pytest.approx(74)
    assert [dict(lost) for lost in run.lost_us] == [
        {Resource.LINK: pytest.approx(10)},
        {Resource.LINK: pytest.approx(10), Resource.HOST: pytest.approx(4)},
        {Resource.HOST: pytest.approx(4)},
    ]


@quick
@given(graphs(), sharing(), st.floats(0, 1.1))
def test_times_of_the_planner_are_accepted(graph: Graph, machine: Machine, share: float) -> None:
    accepted(graph, planned(graph, machine, share), machine)


@quick
@given(graphs(), sharing(), st.floats(0, 1.1))
def test_the_run_is_that_of_the_planners_own_replay(graph: Graph, machine: Machine, share: float) -> None:
    """Two codes, one model; and what steps lose is what they take longer."""
    steps = planned(graph, machine, share).steps
    work = work_of(graph, steps, machine)
    run = run_shared(work, machine.link.both_directions)
    makespan_us, spans = replay(steps, demands_of(graph, steps, machine), machine)
    assert run.makespan_us == pytest.approx(makespan_us, rel=1e-7)
    for one, lost, (start_us, end_us) in zip(work, run.lost_us, spans, strict=True):
        assert one.us + sum(lost.values()) == pytest.approx(
            end_us - start_us, rel=1e-6, abs=1e-6 * makespan_us
        )


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_leaves_out_what_is_shared_is_told_from_others(seed: int) -> None:
    graph = random_dag(seed, 20)
    plan = planned(graph, LITTLE, 0.25)
    accepted(graph, plan, LITTLE)
    times_us = tuple(alone_us(graph, step, LITTLE) for step in plan.steps)
    if sum(plan.step_us) - sum(times_us) > 0.05 * plan.makespan_us:
        assert not loses_as_it_claims(graph, with_times(plan, times_us), LITTLE)


def test_some_plan_loses_enough_for_that() -> None:
    def lost_share(seed: int) -> float:
        graph = random_dag(seed, 20)
        plan = planned(graph, LITTLE, 0.25)
        return 1 - sum(alone_us(graph, step, LITTLE) for step in plan.steps) / sum(plan.step_us)

    assert sum(lost_share(seed) > 0.05 for seed in range(6)) >= 3


@quick
@given(graphs(), sharing(), st.floats(0, 1.1), st.data())
def test_changed_times_are_refused(graph: Graph, machine: Machine, share: float, data: st.DataObject) -> None:
    plan = planned(graph, machine, share)
    slow = [i for i, step in enumerate(plan.steps) if alone_us(graph, step, machine) > 1e-3]
    assume(slow)
    at = data.draw(st.sampled_from(slow))
    factor = data.draw(st.sampled_from([0.0, 0.5, 0.99]))
    changed = tuple(
        us if i != at else factor * alone_us(graph, plan.steps[i], machine)
        for i, us in enumerate(plan.step_us)
    )
    refused(graph, with_times(plan, changed), machine, "HC222", "by itself")
    refused(graph, replace(plan, makespan_us=plan.makespan_us * 0.99), machine, "HC221", "steps end|bound")
    refused(graph, replace(plan, makespan_us=plan.makespan_us * 1.01), machine, "HC221", "steps end")
    above = replace(plan, time_bound_us=plan.makespan_us * 1.01)
    refused(graph, above, machine, "HC221", "less than its bound")
    for us in (-1.0, float("nan"), float("inf")):
        bad = tuple(us if i == at else each for i, each in enumerate(plan.step_us))
        refused(graph, replace(plan, step_us=bad), machine, "HC221", "takes")
    refused(graph, replace(plan, step_us=plan.step_us[1:]), machine, "HC221", "times for")


def test_a_plan_made_for_a_faster_link_is_refused() -> None:
    graph = random_dag(1, 20)
    plan = planned(graph, LITTLE, 0.25)
    assert any(isinstance(step, Copy) for step in plan.steps) and any(isinstance(s, Run) for s in plan.steps)
    slower = replace(LITTLE, link=replace(LITTLE.link, h2d_gb_s=6, d2h_gb_s=6))
    refused(graph, plan, slower, "HC222", "by itself")


def test_where_nothing_is_shared_the_run_is_the_claimed_one() -> None:
    graph = random_dag(3, 20)
    alone = replace(machine(), link=replace(machine().link, both_directions=1.0))
    plan = planned(graph, alone, 0.3)
    work = [replace(one, demands=()) for one in work_of(graph, plan.steps, alone)]
    assert run_shared(work).makespan_us == pytest.approx(timeline(plan.steps, [w.us for w in work])[0])


@pytest.mark.parametrize("seed", [7, 9, 10])
def test_plans_with_states_on_the_gpu_are_accepted(seed: int) -> None:
    """Their copies, which fall away, bore the losses of steps that stay."""
    graph = with_updates(random_dag(seed, 8))
    assert graph.loop_carried
    accepted(graph, planned(graph, LITTLE, 0.7), LITTLE)
