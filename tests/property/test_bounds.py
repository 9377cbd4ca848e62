"""Promises of the planner's bounds, on random problems and decisions."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Graph
from hybridc.machine import Machine
from hybridc.machines.shared_run import run_shared, work_of
from hybridc.passes.planner.bounds.bound import (
    bytes_bound,
    can_be_planned,
    resident_bytes_bound,
    simple_time_bound_us,
    time_bound,
)
from hybridc.passes.planner.bounds.chain.chain import chain_time_bound_us, is_chain
from hybridc.passes.planner.bounds.exact import solve_exactly
from hybridc.passes.planner.emit.materialize import materialize
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import without_repeats
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.model.structure import runs_again
from tests.support.graphs import graphs, machines
from tests.support.outcomes import violations
from tests.support.planner_problems import all_on_gpu, decisions, problems, problems_with_repeats
from tests.support.random_examples import random_examples

quick = random_examples(100)
ROUNDING = 1 + 1e-9


@quick
@given(st.data())
def test_no_decisions_are_faster_than_the_bound(data: st.DataObject) -> None:
    problem = data.draw(problems())
    bound_us = time_bound(problem).bound_us
    for _ in range(5):
        outcome = simulate(problem, data.draw(decisions(problem)))
        if outcome.feasible:
            assert can_be_planned(problem)
            assert outcome.makespan_us * ROUNDING >= bound_us
            assert outcome.peak_gpu_bytes >= bytes_bound(problem)


@random_examples(200)
@given(graphs(), machines(), st.data())
def test_no_replayed_plan_is_faster_than_the_bound_of_shared_runs(
    graph: Graph, machine: Machine, data: st.DataObject
) -> None:
    context = PlanningContext(graph, machine)
    budget_bytes = data.draw(st.integers(0, sum(t.size_bytes for t in graph.tensors)))
    problem = replace(context.problem, budget_bytes=budget_bytes)
    chosen = data.draw(decisions(problem))
    if not simulate(problem, chosen).feasible:
        return
    placed = materialize(context, problem, chosen)
    ample = replace(problem, budget_bytes=max(budget_bytes, placed.gpu_bytes))
    shared = run_shared(work_of(graph, placed.steps, machine), machine.link.both_directions)
    assert time_bound(ample, shared=True).bound_us <= shared.makespan_us * (1 + 1e-6)


@random_examples(60)
@given(st.data())
def test_no_decisions_are_faster_than_the_bound_of_a_chain(data: st.DataObject) -> None:
    problem = data.draw(problems())
    if not (can_be_planned(problem) and is_chain(problem)):
        return
    bound_us = chain_time_bound_us(problem, divisions=1, points=20)
    again_us = chain_time_bound_us(problem, divisions=1, points=20, again=range(problem.kernel_count))
    assert again_us <= bound_us * ROUNDING + 1e-9
    for _ in range(5):
        outcome = simulate(problem, data.draw(decisions(problem)))
        if outcome.feasible:
            assert outcome.makespan_us * ROUNDING >= bound_us


@quick
@given(st.data())
def test_no_decisions_with_kernels_that_run_again_are_faster(data: st.DataObject) -> None:
    wide = data.draw(problems_with_repeats())
    once = without_repeats(wide)
    if not can_be_planned(once):
        return
    again = runs_again(wide)
    assert {once.outputs[k] for k in again} == {wide.outputs[k] for k in wide.repeats}
    bound_us = max(
        time_bound(once, again=again).bound_us,
        chain_time_bound_us(once, divisions=0, points=20, again=again) if is_chain(once) else 0.0,
    )
    for _ in range(10):
        outcome = simulate(wide, data.draw(decisions(wide)))
        assert not outcome.feasible or bound_us <= outcome.makespan_us * ROUNDING


@quick
@given(problems())
def test_bound_falls_with_memory_and_with_leave_to_run_again(problem: Problem) -> None:
    bound_us = time_bound(problem).bound_us
    more = replace(problem, budget_bytes=problem.budget_bytes + 7)
    assert time_bound(more).bound_us <= bound_us * (1 + 1e-6)
    again_us = time_bound(problem, again=range(problem.kernel_count)).bound_us
    assert time_bound(problem, recompute=True).bound_us * (1 - 1e-6) <= again_us <= bound_us * (1 + 1e-6)
    assert simple_time_bound_us(problem) <= bound_us


@quick
@given(problems())
def test_no_run_that_stays_on_the_gpu_needs_fewer_bytes(problem: Problem) -> None:
    ample = replace(problem, budget_bytes=1 << 40)
    outcome = simulate(ample, all_on_gpu(ample, keep=True))
    assert outcome.peak_gpu_bytes >= resident_bytes_bound(ample)


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs OR-tools")
@random_examples(12)
@given(st.data())
def test_exact_plan_is_right_and_between_bound_and_decisions(data: st.DataObject) -> None:
    problem = data.draw(problems(largest=7))
    found = solve_exactly(problem, keep_order=True)
    assert (found is not None) == can_be_planned(problem)
    if found is None:
        return
    assert found.is_optimal
    assert violations(found.problem, found.run) == []
    assert found.bound_us <= found.run.makespan_us <= found.bound_us * (1 + 1e-3) + 1e-3
    assert time_bound(problem).bound_us <= found.run.makespan_us * ROUNDING
    assert chain_time_bound_us(problem, divisions=1, points=60) <= found.run.makespan_us * ROUNDING
    best_us = min(
        (simulate(problem, data.draw(decisions(problem))).makespan_us for _ in range(20)), default=math.inf
    )
    assert found.bound_us <= best_us * ROUNDING
