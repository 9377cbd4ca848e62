"""Decisions as steps and buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.ir.verify import verify
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.materialize import materialize, repacked, shared_timeline
from hybridc.passes.planner.make_plans import assemble
from hybridc.passes.planner.model.contention import Contention
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.policies import with_gpu_kernels
from tests.support.graphs import GraphBuilder, chain, machine
from tests.support.placements import names

GPU, CPU = Device.GPU, Device.CPU
UNIT = ALIGNMENT_BYTES


def streamed(budget_bytes: int) -> tuple[Problem, Decisions]:
    """A chain on the GPU whose weights are fetched while the kernels before them run."""
    problem = problem_of(chain(4, size=4, weight=2), machine(), budget_bytes)
    keep = tuple(not problem.is_weight[gap.tensor] for gap in problem.gaps)
    return problem, Decisions((False,) * 4, keep)


def test_draft_takes_as_long_as_simulated_where_nothing_waits_for_bytes() -> None:
    problem, decisions = streamed(1 << 20)
    draft = materialize(PlanningContext(chain(4), machine()), problem, decisions)
    outcome = simulate(problem, decisions)
    assert draft.makespan_us == pytest.approx(outcome.makespan_us)
    assert draft.spans == [(event.start_us, event.end_us) for event in outcome.events]
    assert len(draft.steps) == len(draft.listed) == len(outcome.events)
    assert draft.gpu_bytes <= outcome.peak_gpu_bytes
    verify(chain(4), assemble(chain(4), machine(), 1 << 20, draft.steps, draft.buffers, draft.arenas))


def test_budget_is_met_where_the_live_bytes_fill_it() -> None:
    problem, decisions = streamed(12 * UNIT)
    outcome = simulate(problem, decisions)
    assert outcome.peak_gpu_bytes == 12 * UNIT  # two activations, two weights
    draft = materialize(PlanningContext(chain(4), machine()), problem, decisions)
    assert draft.gpu_bytes <= 12 * UNIT
    assert draft.makespan_us == pytest.approx(outcome.makespan_us)
    verify(chain(4), assemble(chain(4), machine(), 12 * UNIT, draft.steps, draft.buffers, draft.arenas))


def test_only_the_cpu_has_an_arena_on_a_target_without_gpu() -> None:
    problem = problem_of(chain(3), machine(), 0)
    draft = materialize(
        PlanningContext(chain(3), machine(), devices=(CPU,)), problem, with_gpu_kernels(problem, [False] * 3)
    )
    assert [arena.device for arena in draft.arenas] == [CPU]
    assert draft.gpu_bytes == 0 and names(draft.steps) == ["k0@cpu", "k1@cpu", "k2@cpu"]


def test_outcome_may_be_given() -> None:
    problem, decisions = streamed(1 << 20)
    outcome = simulate(problem, decisions)
    draft = materialize(PlanningContext(chain(4), machine()), problem, decisions, run=outcome)
    assert draft == materialize(PlanningContext(chain(4), machine()), problem, decisions)


def test_steps_that_sharing_delays_are_listed_by_their_starts() -> None:
    build = GraphBuilder()
    results = [build.kernel((build.input(f"x{i}", 4),), {f"y{i}": 4}) for i in range(6)]
    graph = build.graph(*results)
    alone = problem_of(graph, machine(), 1 << 20)
    decisions = with_gpu_kernels(alone, [True] * 6)
    run = simulate(alone, decisions)
    # each copy loses half of its speed to those the other way: not what the run was made with
    shared = replace(alone, contention=Contention(link=0.5))
    listed = insert_copies(graph, shared, run)
    starts = [start_us for start_us, _ in shared_timeline(shared, listed, run)]
    assert starts != sorted(starts)
    draft = materialize(PlanningContext(graph, machine()), shared, decisions, run=run)
    assert draft.spans is not None
    starts = [start_us for start_us, _ in draft.spans]
    assert starts == sorted(starts)
    verify(graph, assemble(graph, machine(), 1 << 20, draft.steps, draft.buffers, draft.arenas))


def test_decisions_that_do_not_fit_are_refused() -> None:
    problem, decisions = streamed(9 * UNIT)
    with pytest.raises(AssertionError, match="exceed the budget"):
        materialize(PlanningContext(chain(4), machine()), problem, decisions)


def test_tightening_makes_nothing_slower_or_larger() -> None:
    build = GraphBuilder()
    value, skips = build.input("x", 3), []
    for i in range(6):
        value = build.kernel(
            (value, build.weight(f"w{i}", 1 + i)), {f"d{i}": 5 + (7 * i) % 4}, workspace=i % 3
        )
        skips.append(value)
    for i in range(6):
        value = build.kernel((value, skips.pop()), {f"u{i}": 3 + (5 * i) % 7})
    graph = build.graph(value)
    problem = problem_of(graph, machine(), 1 << 30)
    decisions = with_gpu_kernels(problem, [i % 4 != 2 for i in range(12)], keep=True)
    draft = materialize(PlanningContext(graph, machine()), problem, decisions)
    tight = repacked(PlanningContext(graph, machine()), draft)
    assert tight.gpu_bytes <= draft.gpu_bytes and tight.makespan_us <= draft.makespan_us
    verify(graph, assemble(graph, machine(), None, tight.steps, tight.buffers, tight.arenas))
