"""Promises of the whole planner, on random graphs, machines and budgets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.ir.plan import plan_to_json
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.machines.shared_run import run_shared, work_of
from hybridc.passes.planner.bounds.exact import has_solver, solve_exactly
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize
from hybridc.passes.planner.make_plans import assemble, make_plan
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.pins import resolve_pins
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.rematerialize import without_repeats
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.budget_grid import anchors
from hybridc.passes.planner.search.partition import (
    all_gpu_peak_bytes,
    partition,
    smallest_budget_bytes,
)
from hybridc.passes.planner.search.policies import BASELINES
from tests.support.graphs import chain, graphs, machine, machines
from tests.support.planner_graphs import NETWORKS, random_dag
from tests.support.random_examples import random_examples
from tests.support.simulator import run_adversarially

BOTH = (Device.GPU, Device.CPU)
BRIEF = Effort(seconds=0.002)
ROUNDING = 1 + 1e-9
quick = random_examples(60)
fractions = st.floats(0, 1.1)
SHARES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.0)


def budget_of(graph: Graph, machine: Machine, fraction: float) -> int:
    """A share of what the graph needs on the GPU, but at least what any plan needs."""
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph, machine))
    return max(budget_bytes, smallest_budget_bytes(graph, machine))


@quick
@given(graphs(), machines(), fractions)
def test_plan_is_right_within_its_budget_and_no_faster_than_the_bound(
    graph: Graph, machine: Machine, fraction: float
) -> None:
    budget_bytes = budget_of(graph, machine, fraction)
    plan = make_plan(graph, machine, budget_bytes, BOTH, effort=BRIEF)
    verify(graph, plan)
    run_adversarially(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    assert 0 <= plan.time_bound_us <= plan.makespan_us * ROUNDING


@random_examples(40)
@given(graphs(), machines(), st.lists(fractions, min_size=4, max_size=8))
def test_more_memory_never_gives_a_slower_plan(graph: Graph, machine: Machine, shares: list[float]) -> None:
    budgets = sorted(budget_of(graph, machine, share) for share in shares)
    drafts = [partition(PlanningContext(graph, machine, effort=BRIEF), [budget])[0] for budget in budgets]
    times = [draft.makespan_us for draft in drafts]
    assert times == sorted(times, reverse=True)
    assert [
        draft.makespan_us for draft in partition(PlanningContext(graph, machine, effort=BRIEF), budgets)
    ] == times


@random_examples(30)
@given(graphs(), machines(), fractions)
def test_two_calls_give_the_same_plan(graph: Graph, machine: Machine, fraction: float) -> None:
    budget_bytes = budget_of(graph, machine, fraction)
    one, other = (make_plan(graph, machine, budget_bytes, BOTH, effort=BRIEF) for _ in range(2))
    assert one == other


FRESH = """
import json
from hybridc.ir.plan import plan_to_json
from tests.property.test_planner import network_plan
print(json.dumps(plan_to_json(network_plan())))
"""


def network_plan() -> Plan:
    graph = NETWORKS["unet"]()
    return make_plan(graph, machine(), all_gpu_peak_bytes(graph, machine()) // 4, BOTH, effort=BRIEF)


def test_a_fresh_process_gives_the_same_plan() -> None:
    output = subprocess.run(
        [sys.executable, "-c", FRESH],
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ".", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(output) == json.loads(json.dumps(plan_to_json(network_plan())))


@quick
@given(graphs(), machines(), fractions, st.randoms(use_true_random=False))
def test_pins_are_honoured_or_refused(
    graph: Graph, machine: Machine, fraction: float, random: Random
) -> None:
    wishes = [(k.name, random.choice(list(Device))) for k in graph.kernels if random.random() < 0.4]
    impossible = [name for name, device in wishes if device not in graph.kernel[name].devices]
    if impossible:
        with pytest.raises(PlanError) as refused:
            resolve_pins(graph, wishes)
        assert refused.value.code == "HC207" and repr(impossible[0]) in refused.value.where
        return
    pins = resolve_pins(graph, wishes)
    budget_bytes = int(fraction * all_gpu_peak_bytes(graph, machine))
    try:
        plan = make_plan(graph, machine, budget_bytes, BOTH, pins=pins, effort=BRIEF)
    except PlanError as refusal:
        assert refusal.code == "HC203"
        budget_bytes = smallest_budget_bytes(graph, machine, pins)
        assert refusal.smallest_budget_bytes == budget_bytes
        plan = make_plan(graph, machine, budget_bytes, BOTH, pins=pins, effort=BRIEF)
    verify(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    ran = {step.kernel: step.device for step in plan.steps if isinstance(step, Run)}
    assert dict(pins) == {name: ran[name] for name in pins}


def assert_as_fast_as_every_baseline(graph: Graph, machine: Machine, budget_bytes: int) -> None:
    context = PlanningContext(graph, machine, effort=BRIEF)
    (draft,) = partition(context, [budget_bytes])
    draft_us = shared_us(graph, draft, machine)
    assert draft_us <= draft.makespan_us * ROUNDING
    problem = replace(context.problem, budget_bytes=budget_bytes)
    for name, policy in BASELINES.items():
        chosen = policy(problem, lambda decisions: simulate(problem, decisions).makespan_us)
        if simulate(problem, chosen).feasible:
            placed = materialize(context, problem, chosen)
            is_slower = draft_us > shared_us(graph, placed, machine) * ROUNDING
            assert not (placed.fits(budget_bytes, None) and is_slower), name


def shared_us(graph: Graph, placed: PlacedPlan, machine: Machine) -> float:
    """The time of a plan whose steps share memories and the link, by code that is none of the planner's."""
    return run_shared(work_of(graph, placed.steps, machine), machine.link.both_directions).makespan_us


@random_examples(15)
@given(graphs(), machines())
def test_no_baseline_is_faster_at_the_budgets_that_are_searched(graph: Graph, machine: Machine) -> None:
    least_bytes = smallest_budget_bytes(graph, machine)
    problem = without_repeats(partition(PlanningContext(graph, machine, effort=BRIEF), [1 << 40])[0].problem)
    for budget_bytes in anchors(problem, least_bytes):
        assert_as_fast_as_every_baseline(graph, machine, budget_bytes)


@random_examples(30)
@given(graphs(), machines(), fractions)
def test_no_baseline_is_faster_between_them(graph: Graph, machine: Machine, fraction: float) -> None:
    assert_as_fast_as_every_baseline(graph, machine, budget_of(graph, machine, fraction))


@pytest.mark.parametrize(
    ("network", "share"), [("unet", 0.5), pytest.param("bert", 0.1, marks=pytest.mark.slow)]
)
def test_no_baseline_is_faster_on_networks(network: str, share: float) -> None:
    graph = NETWORKS[network]()
    assert_as_fast_as_every_baseline(graph, machine(), int(share * all_gpu_peak_bytes(graph, machine())))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25, 0.1, 0.03])
@pytest.mark.parametrize("network", NETWORKS)
def test_plan_of_a_network_is_right(network: str, share: float) -> None:
    graph = NETWORKS[network]()
    budget_bytes = int(share * all_gpu_peak_bytes(graph, machine()))
    (draft,) = partition(PlanningContext(graph, machine(), effort=Effort(0.5)), [budget_bytes])
    plan = assemble(graph, machine(), budget_bytes, draft.steps, draft.buffers, draft.arenas)
    verify(graph, plan)
    assert draft.bound_us <= plan.makespan_us
    assert_as_fast_as_every_baseline(graph, machine(), budget_bytes)


needs_solver = pytest.mark.skipif(not has_solver(), reason="needs OR-tools")
SOLVER_ROUNDING = 1 + 1e-4
"""The exact solver works with whole numbers."""


UNSHARED_GB_S = 1e6
"""Of memories that serve kernels and copies at once at full speed: the exact solver knows no contention."""


def unshared() -> Machine:
    gpu, cpu = (replace(p, shared_gb_s=UNSHARED_GB_S) for p in (machine().gpu, machine().cpu))
    return replace(machine(), gpu=gpu, cpu=cpu)


def planned_with_proof(graph: Graph, share: float, seconds: float = 10) -> Plan:
    """A plan with the effort that a proof takes; it is right."""
    budget_bytes = int(share * all_gpu_peak_bytes(graph, unshared()))
    plan = make_plan(graph, unshared(), budget_bytes, BOTH, effort=Effort(seconds))
    verify(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    return plan


def is_proven(plan: Plan) -> bool:
    return plan.makespan_us <= plan.time_bound_us * SOLVER_ROUNDING


@needs_solver
@pytest.mark.parametrize(("seed", "share"), [pytest.param(1, 0.5, marks=pytest.mark.slow), (2, 0.8)])
def test_plan_of_a_small_graph_is_optimal(seed: int, share: float) -> None:
    graph = random_dag(seed)
    plan = planned_with_proof(graph, share)
    run_adversarially(graph, plan)
    assert is_proven(plan)
    assert plan.budget_bytes is not None
    best = solve_exactly(problem_of(graph, unshared(), plan.budget_bytes), effort=6)  # asked afresh
    assert best is not None and best.is_optimal
    assert plan.makespan_us <= best.run.makespan_us * SOLVER_ROUNDING


@needs_solver
@pytest.mark.slow
def test_plans_of_small_graphs_are_optimal_and_monotone() -> None:
    unproven = 0
    for seed in range(12):
        plans = [planned_with_proof(random_dag(seed), share, seconds=60) for share in SHARES]
        for less, more in pairwise(plans):
            assert more.makespan_us <= less.makespan_us * SOLVER_ROUNDING
        unproven += sum(not is_proven(plan) for plan in plans)
    assert unproven <= 0.05 * 12 * len(SHARES)


def test_effort_is_counted_and_a_little_is_enough_for_a_plan() -> None:
    graph = chain(20)
    budget_bytes = all_gpu_peak_bytes(graph, machine()) // 2
    plan = make_plan(graph, machine(), budget_bytes, BOTH, effort=Effort(seconds=1e-9))
    verify(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
