"""Decisions are read off a plan's steps such that they lead to the same run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.emit.materialize import materialize
from hybridc.passes.planner.emit.recover import recover
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from tests.support.graphs import chain, graphs, machine, machines
from tests.support.random_examples import random_examples

GPU, CPU = Device.GPU, Device.CPU


@pytest.mark.parametrize("percent", [0, 10, 30, 60, 100])
def test_recovered_decisions_run_like_the_plan(percent: int) -> None:
    graph = chain(20, size=400, weight=300)
    plan = make_plan(
        graph, machine(), _budget_bytes(graph, machine(), percent), (GPU, CPU), effort=Effort(0.05)
    )
    problem, decisions = recover(graph, machine(), plan)
    # planned for the budget, or for a smaller one, if that is where the best plan was found
    budgets = (problem.budget_bytes, plan.arena_bytes(GPU))
    outcomes = [simulate(replace(problem, budget_bytes=b), decisions) for b in budgets]
    context = PlanningContext(graph, machine())
    runs = [materialize(context, replace(problem, budget_bytes=b), decisions) for b in budgets]
    assert plan.makespan_us in [pytest.approx(placed.makespan_us, rel=0.01) for placed in runs]
    assert all(len(outcome.events) == len(plan.steps) for outcome in outcomes)


@given(graphs(largest=8), machines(), st.sampled_from([0, 30, 60, 100]))
@random_examples(30)
def test_decisions_are_recovered_from_every_plan(graph: Graph, machine: Machine, percent: int) -> None:
    budget_bytes = _budget_bytes(graph, machine, percent)
    plan = make_plan(graph, machine, budget_bytes, (GPU, CPU), effort=Effort(0.002))
    problem, decisions = recover(graph, machine, plan)
    assert dict(zip(problem.kernel_names, decisions.on_cpu, strict=True)) == {
        name: device is CPU for name, device in plan.device_of().items()
    }
    assert Core(problem).repaired(decisions) is not None


def _budget_bytes(graph: Graph, machine: Machine, percent: int) -> int:
    """From the least that can be met to all that is of use."""
    least, most = smallest_budget_bytes(graph, machine), all_gpu_peak_bytes(graph, machine)
    return least + max(most - least, 0) * percent // 100


def test_without_a_budget_there_is_no_limit() -> None:
    graph = chain(3)
    plan = make_plan(graph, machine(), None, (GPU, CPU), effort=Effort(0.01))
    problem, decisions = recover(graph, machine(), plan)
    assert simulate(problem, decisions).makespan_us == pytest.approx(plan.makespan_us)
