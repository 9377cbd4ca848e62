"""Rows of the relaxation for what kernels and copies lose to each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device, Graph
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.planner.bounds.bound import time_bound
from hybridc.passes.planner.bounds.sharing import shared_windows
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.problem import Problem
from tests.support.graphs import GraphBuilder

MACHINE = Machine(
    "shared",
    Processor("g", 3000, 110, 1, 1 << 32),
    Processor("c", 400, 30, 1, 1 << 34),
    Link(12, 12, 1),
)
SIZE = 2_000_000
"""Bytes of a weight: to read it takes a CPU's kernel two fifths of what its copy takes."""


def columns(count: int) -> Graph:
    """A kernel, parts of a product side by side that memory bounds, and what joins them."""
    build = GraphBuilder(bytes_each=1)
    x = build.kernel((build.input("x", 400),), {"a": 400})
    parts = [build.kernel((x, build.weight(f"w{i}", SIZE)), {f"t{i}": 400}) for i in range(count)]
    return build.graph(build.kernel(tuple(parts), {"y": 400}))


def problem_of_columns(count: int, weights: float, machine: Machine = MACHINE) -> Problem:
    context = PlanningContext(columns(count), machine)
    return replace(context.problem, budget_bytes=int(weights * SIZE))


def test_copies_beside_kernels_that_read_the_same_memory_gain_nothing() -> None:
    problem = problem_of_columns(8, 2.1)
    alone, shared = (time_bound(problem, shared=shared).bound_us for shared in (False, True))
    # six of eight weights come from the host's memory, be it for the CPU or for the link
    host_us = 6 * SIZE / 30e3
    assert alone < 0.8 * host_us < 0.98 * host_us < shared


@pytest.mark.parametrize("weights", [1.1, 2.1, 4.1, 6.1])
def test_no_plan_is_faster_and_one_comes_near(weights: float) -> None:
    graph, budget_bytes = columns(8), int(weights * SIZE)
    plan = make_plan(graph, MACHINE, budget_bytes, (Device.GPU, Device.CPU), effort=Effort(0.1))
    bound_us = time_bound(problem_of_columns(8, weights), shared=True).bound_us
    assert bound_us <= plan.makespan_us <= 1.2 * bound_us


def test_more_memory_and_more_lanes_of_it_lower_the_bound() -> None:
    bounds_us = [
        time_bound(problem_of_columns(8, w), shared=True).bound_us for w in (1.1, 2.1, 3.1, 5.1, 9.1)
    ]
    assert bounds_us == sorted(bounds_us, reverse=True)
    wide = replace(
        MACHINE, cpu=replace(MACHINE.cpu, shared_gb_s=60), gpu=replace(MACHINE.gpu, shared_gb_s=200)
    )
    problem = problem_of_columns(8, 2.1, wide)
    assert list(shared_windows(problem)) == []
    assert time_bound(problem, shared=True).bound_us == time_bound(problem).bound_us


def test_windows_reach_from_cut_to_cut_and_weights_are_at_most_one() -> None:
    problem = problem_of_columns(3, 2.1)
    windows = list(shared_windows(problem))
    assert {(w.first, w.last) for w in windows} >= {(0, 4), (None, 5)}
    assert all(0 <= weight <= 1 + 1e-9 for w in windows for _, weight in w.weights)
    assert all(0 < w.copies < 1 for w in windows)


def test_without_large_copies_nothing_is_said() -> None:
    slow = replace(MACHINE, link=replace(MACHINE.link, latency_us=500))
    assert list(shared_windows(problem_of_columns(3, 2.1, slow))) == []
