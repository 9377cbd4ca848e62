"""Bounds that effort makes tighter: never above the plan, never looser, the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device, Graph, Plan
from hybridc.machine import load_machine
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.search.partition import Effort, all_gpu_peak_bytes
from hybridc.passes.planner.tighten_bound import with_tight_bound
from tests.support.planner_graphs import bert, random_dag

MACHINE = load_machine("laptop-4gb")
BOTH = (Device.GPU, Device.CPU)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return bert(1)


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return make_plan(graph, MACHINE, all_gpu_peak_bytes(graph, MACHINE) // 3, BOTH, effort=Effort(0.2))


def test_effort_makes_the_bound_tighter() -> None:
    graph = bert(2)
    plan = make_plan(graph, MACHINE, all_gpu_peak_bytes(graph, MACHINE) // 5, BOTH, effort=Effort(0.2))
    little, much = (with_tight_bound(Tiling(graph), MACHINE, plan, seconds) for seconds in (1.0, 4.0))
    assert plan.time_bound_us < little.time_bound_us < much.time_bound_us <= plan.makespan_us
    assert replace(much, time_bound_us=plan.time_bound_us) == plan, "only the bound is another"
    assert with_tight_bound(Tiling(graph), MACHINE, plan, 1.0) == little


def test_too_little_effort_leaves_the_bound_as_it_is(graph: Graph, plan: Plan) -> None:
    assert with_tight_bound(Tiling(graph), MACHINE, plan, 0.01) == plan


def test_a_bound_that_the_plan_reaches_needs_no_effort(graph: Graph, plan: Plan) -> None:
    reached = replace(plan, time_bound_us=plan.makespan_us)
    assert with_tight_bound(Tiling(graph), MACHINE, reached, 1e9) == reached


def test_a_plan_without_a_limit_can_be_bounded(graph: Graph) -> None:
    free = make_plan(graph, MACHINE, None, BOTH, effort=Effort(0.2))
    found = with_tight_bound(Tiling(graph), MACHINE, free, 1.0)
    assert free.time_bound_us <= found.time_bound_us <= free.makespan_us


def test_few_kernels_whose_order_is_free_keep_their_bound() -> None:
    small = random_dag(1, kernels=LARGEST_KERNEL_COUNT)
    plan = make_plan(small, MACHINE, None, BOTH, effort=Effort(0.2))
    assert with_tight_bound(Tiling(small), MACHINE, plan, 4.0) == plan
