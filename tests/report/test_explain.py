"""Explanations: found by node or kernel, true to the steps, alternatives simulated."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hybridc.errors import UsageError
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.report.explain import Explanation, explain, explanation_to_json, find_kernels
from hybridc.report.explain_text import render_explanation
from tests.report.test_plan_report import handmade_graph, handmade_plan, laptop
from tests.support.graphs import GraphBuilder, chain, machine

GPU, CPU = Device.GPU, Device.CPU


def explained(node: str, plan: Plan | None = None) -> Explanation:
    (kernel,) = find_kernels(handmade_graph(), node)
    return explain(handmade_graph(), plan or handmade_plan(), laptop(), {}, kernel)


@pytest.mark.parametrize("node", ["Conv_0", "Relu_3"])
def test_text(golden: Callable[[str, str], None], node: str) -> None:
    golden(f"explain_{node}.txt", render_explanation(explained(node)))


@pytest.mark.parametrize(("width", "most"), [(None, 100), (200, 100), (80, 80), (60, 60)])
def test_lines_are_at_most_100_columns_and_fit_the_terminal(width: int | None, most: int) -> None:
    for kernel in handmade_graph().kernels:
        text = render_explanation(explained(kernel.name), width)
        assert max(map(len, text.splitlines())) <= most


def test_node_is_found_by_its_name_or_that_of_its_kernel() -> None:
    graph = handmade_graph()
    assert find_kernels(graph, "Relu_1") == find_kernels(graph, "stem") == (graph.kernel["stem"],)


def test_unknown_node_is_refused_with_one_of_almost_the_same_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'Relu_3'") as caught:
        find_kernels(handmade_graph(), "Relu3")
    assert caught.value.code == "HC538"


def test_json_has_plain_values() -> None:
    data = json.loads(json.dumps(explanation_to_json(explained("Relu_3"))))
    assert data["device"] == "gpu" and set(data["device_us"]) == {"gpu", "cpu"}
    assert data["tensors"][0]["facts"][0] == "copied to the GPU from 1.33 ms to 1.42 ms"


def test_without_a_gpu_there_is_nothing_else_to_decide() -> None:
    graph = handmade_graph()
    plan = make_plan(graph, laptop(), None, (CPU,))
    explanation = explain(graph, plan, laptop(), {}, graph.kernel["stem"])
    assert (explanation.alternatives, explanation.reason) == ((), "no GPU in the target")


def test_changes_are_those_of_the_plan_with_that_decision() -> None:
    graph, plan = two_kernels()
    explanation = explain(graph, plan, machine(), {}, graph.kernels[1])
    changes = {a.what: (a.change_us, a.change_bytes) for a in explanation.alternatives}
    assert [s.device for s in plan.steps if isinstance(s, Run)] == [GPU, GPU]
    copy_us = 1 + 400 * 512 / 12e3
    us, _ = changes["evict a and fetch it for k1"]
    assert us == pytest.approx(2 * copy_us)  # there and back
    us, _ = changes["run it on the CPU"]
    assert us is not None and us > 0


def two_kernels() -> tuple[Graph, Plan]:
    """x -> k0 -> a -> k1 -> y, both far faster on the GPU, with room for everything."""
    build = GraphBuilder()
    x, w = build.input("x", 400), build.weight("w", 400)
    a = build.kernel((x,), {"a": 400}, flops=10**9)
    graph = build.graph(build.kernel((a, w), {"y": 1}, flops=10**9))
    return graph, make_plan(graph, machine(), 2000 * 512, (GPU, CPU), effort=Effort(0.01))


def test_change_beyond_the_budget_is_said_not_to_fit() -> None:
    graph = chain(1, size=400, weight=300)
    plan = make_plan(graph, machine(), 512, (GPU, CPU), effort=Effort(0.01))
    (alternative,) = explain(graph, plan, machine(), {}, graph.kernels[0]).alternatives
    assert (alternative.change_us, alternative.note) == (None, "does not fit the budget")


def test_no_single_change_improves_a_plan_that_is_at_its_bound() -> None:
    graph = chain(8, size=400, weight=300)
    peak_bytes = all_gpu_peak_bytes(graph, machine())
    plan = make_plan(graph, machine(), 2 * peak_bytes, (GPU, CPU), effort=Effort(0.1))
    assert plan.makespan_us == pytest.approx(plan.time_bound_us)
    for kernel in graph.kernels:
        for alternative in explain(graph, plan, machine(), {}, kernel).alternatives:
            assert alternative.change_us is None or alternative.change_us > -1e-6
