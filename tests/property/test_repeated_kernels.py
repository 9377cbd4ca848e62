"""Kernels that run again make the same plan as right as any other, and never a slower one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from hybridc.ir import Device, Graph, Run
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.reuse_buffers import live_bytes_bound, reuse_buffers
from hybridc.passes.planner.make_plans import assemble, make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.rematerialize import (
    expand,
    with_recompute_slots,
    with_repeats,
    without_recompute_slots,
)
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, smallest_budget_bytes
from hybridc.passes.planner.search.search import search
from tests.support.graphs import graphs, machine, machines
from tests.support.planner_graphs import NetworkBuilder
from tests.support.planner_problems import decisions, problems, problems_with_repeats
from tests.support.random_examples import random_examples
from tests.support.simulator import run_adversarially

BOTH = (Device.GPU, Device.CPU)
quick = random_examples(60)


def with_random_repeats(once: Problem, random: Random) -> Problem:
    """Kernels with one result stand again before some of its uses."""
    stands: list[tuple[int, bool]] = []
    for use, inputs in enumerate(once.inputs):
        makers = sorted({once.producer[t] for t in inputs} - {-1})
        able = [k for k in makers if len(once.outputs[k]) == 1 and once.gpu_us[k] < float("inf")]
        stands += [(k, True) for k in able if random.random() < 0.5]
        stands.append((use, False))
    return expand(once, stands)


@quick
@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_any_feasible_decisions_become_a_right_plan(graph: Graph, machine: Machine, random: Random) -> None:
    problem = with_random_repeats(problem_of(graph, machine, 1 << 60), random)
    likely = random.random()
    chosen = Decisions(
        tuple(random.random() < likely / 2 for _ in problem.kernel_names),
        tuple(random.random() < likely for _ in problem.gaps),
    )
    least_bytes = simulate(replace(problem, budget_bytes=0), chosen).peak_gpu_bytes
    problem = replace(problem, budget_bytes=least_bytes + random.choice([0, 512, 1 << 40]))
    outcome = simulate(problem, chosen)
    assert outcome.feasible
    steps = insert_copies(graph, problem, outcome)
    assert live_bytes_bound(graph, steps, Device.GPU) <= outcome.peak_gpu_bytes <= problem.budget_bytes
    spans = [(event.start_us, event.end_us) for event in outcome.events]
    plan = assemble(graph, machine, None, *reuse_buffers(graph, steps, BOTH, spans))
    verify(graph, plan)
    run_adversarially(graph, plan, random_orders=2)
    assert plan.makespan_us <= outcome.makespan_us + 1e-6


@quick
@given(st.data())
def test_a_problem_with_repeats_that_do_not_run_is_the_one_without(data: st.DataObject) -> None:
    problem = data.draw(problems_with_repeats())
    once = expand(problem, [(k, False) for k in range(problem.kernel_count) if k not in problem.repeats])
    chosen = data.draw(decisions(once))
    lifted = with_recompute_slots(problem, once, chosen)
    assert all(lifted.on_cpu[repeat] for repeat in problem.repeats)
    assert simulate(problem, lifted).makespan_us == simulate(once, chosen).makespan_us
    assert simulate(once, without_recompute_slots(problem, once, lifted)) == simulate(once, chosen)


@random_examples(25)
@given(problems(largest=14))
def test_searching_with_repeats_is_never_slower(problem: Problem) -> None:
    wide = with_repeats(problem)
    found, once = search(wide, evaluations=60), search(problem, evaluations=60)
    assert (found is None) == (once is None)
    if found is None or once is None:
        return
    assert found.makespan_us <= once.makespan_us
    outcome = simulate(wide, found.decisions)
    assert outcome.feasible and outcome.makespan_us == found.makespan_us >= found.bound_us * (1 - 1e-9)


def there_and_back(depth: int) -> Graph:
    """A forward pass of heavy kernels, each with a light one behind it whose large result is saved."""
    build = NetworkBuilder()
    heavy, saved = [build.input(1e6)], []
    for _ in range(depth):
        heavy.append(build.kernel((heavy[-1],), 1e6, 4e9))
        saved.append(build.kernel((heavy[-1],), 64e6, 1e6, bytes_moved=1e6))
    gradient = heavy[-1]
    for stored in reversed(saved):
        gradient = build.kernel((gradient, stored), 1e6, 4e9, output=stored is saved[0])
    return build.graph()


def test_light_kernels_run_again_where_their_results_do_not_fit() -> None:
    graph = there_and_back(depth=6)
    budget_bytes = max(all_gpu_peak_bytes(graph, machine()) // 3, smallest_budget_bytes(graph, machine()))
    plan = make_plan(graph, machine(), budget_bytes, BOTH, effort=Effort(seconds=0.2))
    verify(graph, plan)
    run_adversarially(graph, plan)
    ran = [step.kernel for step in plan.steps if isinstance(step, Run)]
    assert len(ran) > len(set(ran)) == len(graph.kernels)
