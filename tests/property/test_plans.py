"""Promises of the planner and of its verifier, on random graphs, machines and budgets."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Plan
from hybridc.ir.plan import plan_from_json, plan_to_json
from hybridc.machine import Machine
from hybridc.passes.insert_copies import insert_copies
from hybridc.passes.plan import all_gpu_peak_bytes, assemble, make_plan, smallest_budget_bytes
from hybridc.passes.reuse_buffers import reuse_buffers
from hybridc.passes.verify import verify
from tests.support.graphs import graphs, machine, machines
from tests.support.mutations import MUTATIONS, Mutation, without_wait
from tests.support.simulator import WrongResult, run_adversarially

BOTH = (Device.GPU, Device.CPU)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
fractions = st.floats(0, 1.1)


def planned(graph: Graph, machine: Machine, fraction: float) -> Plan:
    """A plan for a fraction of what the graph needs on the GPU, or for the least that can be planned."""
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph))
    return make_plan(graph, machine, max(budget_bytes, smallest_budget_bytes(graph, machine)), BOTH)


@quick
@given(graphs(), machines(), fractions)
def test_plan_keeps_the_budget_or_names_a_smallest_one_that_works(
    graph: Graph, machine: Machine, fraction: float
) -> None:
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph))
    try:
        plan = make_plan(graph, machine, budget_bytes, BOTH)
    except PlanError as refusal:
        assert refusal.code == "HC203"
        assert refusal.smallest_budget_bytes == smallest_budget_bytes(graph, machine) > budget_bytes
        budget_bytes = refusal.smallest_budget_bytes
        plan = make_plan(graph, machine, budget_bytes, BOTH)
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    assert plan == make_plan(graph, machine, budget_bytes, BOTH)
    assert plan == plan_from_json(plan_to_json(plan))


@quick
@given(graphs(), st.randoms(use_true_random=False))
def test_any_placement_becomes_a_right_plan(graph: Graph, random: Random) -> None:
    placement = [random.choice(kernel.devices) for kernel in graph.kernels]
    steps, buffers, arenas = reuse_buffers(graph, insert_copies(graph, placement), BOTH)
    plan = assemble(graph, machine(), None, steps, buffers, arenas)
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert all(arena.size_bytes >= arena.lower_bound_bytes for arena in arenas)


@quick
@given(graphs(), machines(), fractions)
def test_no_wait_is_superfluous(graph: Graph, machine: Machine, fraction: float) -> None:
    plan = planned(graph, machine, fraction)
    for position, step in enumerate(plan.steps):
        for wait in step.waits:
            with pytest.raises(PlanError):
                verify(graph, without_wait(plan, position, wait))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@settings(quick, max_examples=25)
@given(graph=graphs(), machine=machines(), fraction=fractions, random=st.randoms(use_true_random=False))
def test_damaged_plan_is_refused_unless_it_still_runs_right(
    mutation: Mutation, graph: Graph, machine: Machine, fraction: float, random: Random
) -> None:
    plan = planned(graph, machine, fraction)
    for _ in range(4):
        damaged = mutation(plan, random)
        try:
            verify(graph, damaged)
        except PlanError:
            continue
        run_adversarially(graph, damaged)


@quick
@given(graphs(), machines(), fractions, st.randoms(use_true_random=False))
def test_plan_that_runs_wrong_is_refused(
    graph: Graph, machine: Machine, fraction: float, random: Random
) -> None:
    plan = planned(graph, machine, fraction)
    damaged = random.choice(MUTATIONS)(random.choice(MUTATIONS)(plan, random), random)
    try:
        run_adversarially(graph, damaged, random_orders=2)
    except WrongResult:
        with pytest.raises(PlanError):
            verify(graph, damaged)
