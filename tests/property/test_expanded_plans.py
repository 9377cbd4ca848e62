"""What the planner simulates is a right plan that keeps its bytes and its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Device, Graph, Lane, Step
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.reuse_buffers import live_bytes_bound, reuse_buffers
from hybridc.passes.planner.emit.slack import reduce_peak, schedule_fetches_late
from hybridc.passes.planner.make_plans import assemble
from hybridc.passes.planner.model.cost import step_times_us
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.simulate import SimulatedRun, simulate
from tests.support.graphs import graphs, machines
from tests.support.random_examples import random_examples
from tests.support.simulator import run_adversarially

BOTH = (Device.GPU, Device.CPU)


def simulated(graph: Graph, machine: Machine, random: Random) -> tuple[Problem, SimulatedRun]:
    """A run with random decisions, in no more memory than they need, or a little more."""
    problem = problem_of(graph, machine, 1 << 60)
    likely = random.random()
    decisions = Decisions(
        tuple(random.random() < likely / 2 for _ in problem.kernel_names),
        tuple(random.random() < likely for _ in problem.gaps),
    )
    least_bytes = simulate(replace(problem, budget_bytes=0), decisions).peak_gpu_bytes
    problem = replace(problem, budget_bytes=least_bytes + random.choice([0, 0, 512, 4096, 1 << 40]))
    return problem, simulate(problem, decisions)


@random_examples(100)
@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_any_feasible_decisions_become_a_right_plan(graph: Graph, machine: Machine, random: Random) -> None:
    problem, outcome = simulated(graph, machine, random)
    assert outcome.feasible
    steps = insert_copies(graph, problem, outcome)
    # the peak is what slots hold; copies to the host still under way may hold what is left of the budget
    assert outcome.peak_gpu_bytes <= problem.budget_bytes
    assert live_bytes_bound(graph, steps, Device.GPU) <= problem.budget_bytes
    spans = [(event.start_us, event.end_us) for event in outcome.events]
    for given_spans in (None, spans):
        plan = assemble(graph, machine, None, *reuse_buffers(graph, steps, BOTH, given_spans))
        verify(graph, plan)
        run_adversarially(graph, plan, random_orders=2)
    assert plan.makespan_us <= outcome.makespan_us + 1e-6  # reused bytes delay nothing


@random_examples(50)
@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_fewer_bytes_at_once_make_no_right_plan_slower_or_larger(
    graph: Graph, machine: Machine, random: Random
) -> None:
    problem, outcome = simulated(graph, machine, random)
    steps = insert_copies(graph, problem, outcome)
    spans = random.choice([None, [(event.start_us, event.end_us) for event in outcome.events]])
    plan = assemble(graph, machine, None, *reuse_buffers(graph, steps, BOTH, spans))
    listed, later = reduce_peak(graph, steps, plan.step_us, plan.steps, BOTH)
    again = assemble(graph, machine, None, *reuse_buffers(graph, listed, BOTH, later))
    verify(graph, again)
    run_adversarially(graph, again, random_orders=2)
    makespan_us = max((end_us for _, end_us in later), default=0.0)
    assert again.makespan_us <= makespan_us
    assert spans is None or makespan_us <= outcome.makespan_us + 1e-6
    for arena, before in zip(again.arenas, plan.arenas, strict=True):
        held_bytes = live_bytes_bound(graph, listed, arena.device, later)
        assert arena.lower_bound_bytes <= held_bytes <= min(arena.size_bytes, before.size_bytes)
        if arena.device is Device.GPU and all(us > 0 for us in plan.step_us):
            assert arena.lower_bound_bytes == held_bytes


@random_examples(50)
@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_later_copies_to_the_gpu_delay_nothing(graph: Graph, machine: Machine, random: Random) -> None:
    problem, outcome = simulated(graph, machine, random)
    steps = insert_copies(graph, problem, outcome)
    plan = assemble(graph, machine, None, *reuse_buffers(graph, steps, BOTH))
    listed, spans = reduce_peak(graph, steps, plan.step_us, plan.steps, BOTH)
    step_us = step_times_us(graph, listed, machine)
    late, later = schedule_fetches_late(graph, listed, step_us, spans, BOTH)
    again = assemble(graph, machine, None, *reuse_buffers(graph, late, BOTH, later))
    verify(graph, again)
    run_adversarially(graph, again, random_orders=2)
    makespan_us = max((end_us for _, end_us in spans), default=0.0)
    assert max((end_us for _, end_us in later), default=0.0) <= makespan_us
    assert again.makespan_us <= makespan_us
    before = dict(zip(numbered(listed), spans, strict=True))
    for (step, number), span in zip(numbered(late), later, strict=True):
        assert span[0] >= before[step, number][0]
        assert step.lane is Lane.H2D or span == before[step, number]


def numbered(steps: Sequence[Step]) -> list[tuple[Step, int]]:
    """The steps without their waits; those that are the same then, in order."""
    seen: Counter[Step] = Counter()
    found = []
    for step in (replace(step, waits=()) for step in steps):
        found.append((step, seen[step]))
        seen[step] += 1
    return found
