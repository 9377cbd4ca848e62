"""What the planner simulates is a right plan that keeps its bytes and its time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.insert_copies import insert_copies
from hybridc.passes.plan import assemble
from hybridc.passes.planner.decisions import Decisions
from hybridc.passes.planner.problem import Problem, problem_of
from hybridc.passes.planner.simulate import Outcome, simulate
from hybridc.passes.reuse_buffers import live_bytes_bound, reuse_buffers
from hybridc.passes.verify import verify
from tests.support.graphs import graphs, machines
from tests.support.simulator import run_adversarially

BOTH = (Device.GPU, Device.CPU)


def simulated(graph: Graph, machine: Machine, random: Random) -> tuple[Problem, Outcome]:
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


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(graphs(), machines(), st.randoms(use_true_random=False))
def test_any_feasible_decisions_become_a_right_plan(graph: Graph, machine: Machine, random: Random) -> None:
    problem, outcome = simulated(graph, machine, random)
    assert outcome.feasible
    steps = insert_copies(graph, problem, outcome)
    assert live_bytes_bound(graph, steps, Device.GPU) <= outcome.peak_gpu_bytes <= problem.budget_bytes
    spans = [(event.start_us, event.end_us) for event in outcome.events]
    for given_spans in (None, spans):
        plan = assemble(graph, machine, None, *reuse_buffers(graph, steps, BOTH, given_spans))
        verify(graph, plan)
        run_adversarially(graph, plan, random_orders=2)
    assert plan.makespan_us <= outcome.makespan_us + 1e-6  # reused bytes delay nothing
