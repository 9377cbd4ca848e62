"""Promises of the planner and of its verifier, on random graphs, machines and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Plan, Step
from hybridc.ir.plan import plan_from_json, plan_to_json
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.make_plans import assemble, make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import graphs, machine, machines
from tests.support.mutations import MUTATIONS, Mutation, without_wait
from tests.support.placements import steps_of
from tests.support.random_examples import random_examples
from tests.support.random_steps import random_steps
from tests.support.simulator import run_adversarially
from tests.support.verdicts import is_refused, runs_right

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(seconds=0.001)
quick = random_examples(60)
fractions = st.floats(0, 1.1)


def planned(graph: Graph, machine: Machine, fraction: float) -> Plan:
    """A plan for a fraction of what the graph needs on the GPU, or for the least that can be planned."""
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph, machine))
    least_bytes = smallest_budget_bytes(graph, machine)
    return make_plan(graph, machine, max(budget_bytes, least_bytes), BOTH, effort=BRIEF)


def plan_of(graph: Graph, steps: Sequence[Step], timed: bool = False) -> Plan:
    """The plan of given steps; `timed`: with one lane's steps side by side with those of others."""
    spans = [(float(i), i + 2.5) for i in range(len(steps))] if timed else None
    return assemble(graph, machine(), None, *reuse_buffers(graph, steps, BOTH, spans))


@quick
@given(graphs(), machines(), fractions)
def test_plan_keeps_the_budget_or_names_a_smallest_one_that_works(
    graph: Graph, machine: Machine, fraction: float
) -> None:
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph, machine))
    try:
        plan = make_plan(graph, machine, budget_bytes, BOTH, effort=BRIEF)
    except PlanError as refusal:
        assert refusal.code == "HC203"
        assert refusal.smallest_budget_bytes == smallest_budget_bytes(graph, machine) > budget_bytes
        budget_bytes = refusal.smallest_budget_bytes
        plan = make_plan(graph, machine, budget_bytes, BOTH, effort=BRIEF)
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    assert plan == make_plan(graph, machine, budget_bytes, BOTH, effort=BRIEF)
    assert plan == plan_from_json(plan_to_json(plan))


@quick
@given(graphs(), st.randoms(use_true_random=False))
def test_any_placement_becomes_a_right_plan(graph: Graph, random: Random) -> None:
    placement = [random.choice(kernel.devices) for kernel in graph.kernels]
    plan = plan_of(graph, steps_of(graph, placement))
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert all(arena.size_bytes >= arena.lower_bound_bytes for arena in plan.arenas)


@quick
@given(graphs(), st.randoms(use_true_random=False), st.booleans())
def test_steps_with_offload_recomputation_and_streamed_weights_become_a_right_plan(
    graph: Graph, random: Random, timed: bool
) -> None:
    steps = random_steps(graph, random)
    plan = plan_of(graph, steps, timed=timed)
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert plan == plan_from_json(plan_to_json(plan))
    for position, step in enumerate(plan.steps):
        for wait in step.waits:
            assert is_refused(graph, without_wait(plan, position, wait))


@quick
@given(graphs(), machines(), fractions)
def test_no_wait_is_superfluous(graph: Graph, machine: Machine, fraction: float) -> None:
    plan = planned(graph, machine, fraction)
    for position, step in enumerate(plan.steps):
        for wait in step.waits:
            assert is_refused(graph, without_wait(plan, position, wait))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@random_examples(25)
@given(graph=graphs(), machine=machines(), fraction=fractions, random=st.randoms(use_true_random=False))
def test_damaged_plan_is_refused_unless_it_still_runs_right(
    mutation: Mutation, graph: Graph, machine: Machine, fraction: float, random: Random
) -> None:
    plan = planned(graph, machine, fraction)
    if random.random() < 0.5:
        plan = plan_of(graph, random_steps(graph, random))
    for _ in range(4):
        damaged = mutation(plan, random)
        assert is_refused(graph, damaged) or runs_right(graph, damaged)


@quick
@given(graphs(), machines(), fractions, st.randoms(use_true_random=False))
def test_plan_that_runs_wrong_is_refused(
    graph: Graph, machine: Machine, fraction: float, random: Random
) -> None:
    plan = planned(graph, machine, fraction)
    if random.random() < 0.5:
        plan = plan_of(graph, random_steps(graph, random))
    damaged = random.choice(MUTATIONS)(random.choice(MUTATIONS)(plan, random), random)
    assert runs_right(graph, damaged, random_orders=2) or is_refused(graph, damaged)
