"""Sums over ranks as steps of a plan: what the verifier accepts, and what they are predicted to hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Lane, Plan, Run
from hybridc.ir.plan import plan_from_json, plan_to_json
from hybridc.ir.verify import verify
from hybridc.keywords import PlanKeywords, options_of
from hybridc.machine import Network
from hybridc.models import build
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.report.lanes import lane_rows
from hybridc.report.trace import trace_to_json
from hybridc.training.artifact import ACCUMULATE
from hybridc.training.compile import plan_training
from hybridc.training.ranks.collectives import Summing, choose_buckets, hidden_share, with_collectives

RANKS, BATCH = 4, 64
NETWORK = Network()


@pytest.fixture(scope="module", params=["avx2", pytest.param("cuda+avx2", marks=pytest.mark.slow)])
def planned(request: pytest.FixtureRequest) -> tuple[Graph, Plan]:
    """The accumulation of cifar_quick; with a GPU for half of what it needs there."""
    given = {"target": request.param, "plan_seconds": 0.2}
    if "cuda" in request.param:
        given["gpu_memory"] = "50%"
    loss, optimizer = parse_loss("softmax_cross_entropy"), parse_optimizer("sgd:lr=0.01,momentum=0.9")
    spec = TrainingSpec(loss, optimizer, BATCH, RANKS)
    model = build("cifar_quick", dynamic_batch=True)
    made = plan_training(model, options_of(given, PlanKeywords), spec, wanted=[ACCUMULATE])[ACCUMULATE]
    return made.graphs[-1], made.plans[-1]


def sums_of(graph: Graph) -> list[str]:
    """All results but the loss, which is the first."""
    return list(graph.outputs[1:])


def extended(planned: tuple[Graph, Plan], network: Network = NETWORK) -> tuple[Graph, Plan]:
    buckets = choose_buckets(*planned, sums_of(planned[0]), Summing(RANKS, network))
    return with_collectives(*planned, buckets, Summing(RANKS, network))


def collectives(plan: Plan) -> list[int]:
    return [i for i, step in enumerate(plan.steps) if step.lane is Lane.NET]


def with_step(plan: Plan, position: int, **changes: object) -> Plan:
    step = replace(plan.steps[position], **changes)  # type: ignore[arg-type]
    return replace(plan, steps=(*plan.steps[:position], step, *plan.steps[position + 1 :]))


def test_plan_with_collectives_is_accepted_and_sums_all_gradients_once(planned: tuple[Graph, Plan]) -> None:
    graph, plan = extended(planned)
    verify(graph, plan)
    summed = [name for i in collectives(plan) for name in graph.kernel[plan.steps[i].kernel].inputs]  # type: ignore[union-attr]
    assert sorted(summed) == sorted(sums_of(planned[0]))
    assert plan_from_json(plan_to_json(plan)) == plan


def test_buckets_take_no_gpu_memory(planned: tuple[Graph, Plan]) -> None:
    _, plan = extended(planned)
    assert plan.arena_bytes(Device.GPU) == planned[1].arena_bytes(Device.GPU)
    assert plan.arena_bytes(Device.CPU) > planned[1].arena_bytes(Device.CPU)


def test_collective_that_does_not_wait_for_its_gradients_is_refused(planned: tuple[Graph, Plan]) -> None:
    graph, plan = extended(planned)
    with pytest.raises(PlanError, match="HC213"):
        verify(graph, with_step(plan, collectives(plan)[0], waits=()))


def test_collective_on_another_lane_is_refused(planned: tuple[Graph, Plan]) -> None:
    graph, plan = extended(planned)
    with pytest.raises(PlanError, match="HC225"):
        verify(graph, with_step(plan, collectives(plan)[0], is_collective=False))
    kernel = next(i for i, step in enumerate(plan.steps) if isinstance(step, Run) and step.lane is Lane.CPU)
    with pytest.raises(PlanError, match="HC225"):
        verify(graph, with_step(plan, kernel, is_collective=True))


def test_collectives_in_another_order_are_refused(planned: tuple[Graph, Plan]) -> None:
    buckets = [(name,) for name in sums_of(planned[0])]
    written = choose_buckets(*planned, sums_of(planned[0]), Summing(RANKS, NETWORK))
    in_order = tuple((name,) for bucket in written for name in bucket)
    assert len(in_order) == len(buckets) > 1
    graph, plan = with_collectives(*planned, in_order, Summing(RANKS, NETWORK))
    verify(graph, plan)
    first, last = graph.kernels[-2:]
    swapped = replace(graph, kernels=(*graph.kernels[:-2], last, first))
    with pytest.raises(PlanError, match="HC225"):
        verify(swapped, plan)


def test_sum_that_is_read_before_it_is_made_is_refused(planned: tuple[Graph, Plan]) -> None:
    """The lane's workspace may not be what another step still uses."""
    graph, plan = extended(planned)
    kernel = next(k for k in graph.kernels if k.family == "collective")
    moved = tuple(replace(b, offset_bytes=0) if b.tensor == kernel.name else b for b in plan.buffers)
    with pytest.raises(PlanError, match="HC216"):
        verify(graph, replace(plan, buffers=moved))


def test_slow_link_is_hidden_behind_the_backward_pass(planned: tuple[Graph, Plan]) -> None:
    """Of a link on which the sums take 60 % of the backward pass, which is two thirds of the run or so."""
    size = sum(planned[0].tensor[name].size_bytes for name in sums_of(planned[0]))
    bytes_per_us = 2 * (RANKS - 1) / RANKS * size / (0.6 * 2 / 3 * planned[1].makespan_us)
    slow = Network(0.1, bytes_per_us / 1e3)
    _, plan = extended(planned, slow)
    buckets = choose_buckets(*planned, sums_of(planned[0]), Summing(RANKS, slow))
    whole = with_collectives(*planned, (tuple(n for b in buckets for n in b),), Summing(RANKS, slow))[1]
    assert len(buckets) > 1
    assert plan.makespan_us < whole.makespan_us
    assert hidden_share(whole) < 0.1
    assert hidden_share(plan) > (0.85 if len(plan.arenas) == 1 else 0.75)


def test_high_latency_makes_buckets_large(planned: tuple[Graph, Plan]) -> None:
    few = choose_buckets(*planned, sums_of(planned[0]), Summing(RANKS, Network(1e5)))
    many = choose_buckets(*planned, sums_of(planned[0]), Summing(RANKS, Network(1e-3, 0.01)))
    assert len(few) == 1 < len(many)


def test_more_buckets_are_made_only_where_the_run_ends_earlier(planned: tuple[Graph, Plan]) -> None:
    graph, plan = planned
    fast, slow = (Summing(RANKS, Network(1.5, gb_s)) for gb_s in (100.0, 0.05))
    few = choose_buckets(graph, plan, sums_of(graph), fast)
    many = choose_buckets(graph, plan, sums_of(graph), slow)
    assert len(few) < len(many) if len(plan.arenas) == 1 else len(few) <= len(many)
    late = [with_collectives(graph, plan, buckets, fast)[1].makespan_us for buckets in (few, many)]
    assert late[0] <= 1.006 * late[1]


def test_reports_show_the_lane_of_the_network(planned: tuple[Graph, Plan]) -> None:
    graph, plan = extended(planned)
    assert Lane.NET in [row.lane for row in lane_rows(graph, plan)]
    threads = [e["args"].get("name") for e in trace_to_json(graph, plan)["traceEvents"] if e["ph"] == "M"]
    assert "network" in threads
