"""The worked example of the guide to policies is a policy that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.passes.planner.search.policies import BASELINES, all_cpu
from hybridc.passes.planner.search.search import search
from tests.support.graphs import machine
from tests.support.planner_graphs import NETWORKS

GUIDE = Path(__file__).parents[3] / "docs" / "writing_a_policy.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture
def cheapest_bytes() -> Any:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(EXAMPLES[0], names)
    return names["cheapest_bytes"]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_worked_example_lies_between_all_cpu_and_the_search(
    cheapest_bytes: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = NETWORKS["unet"]()
    problem = problem_of(graph, machine(), int(share * all_gpu_peak_bytes(graph, machine())))
    core = Core(problem)
    us = core.makespan_us(cheapest_bytes(problem, core.makespan_us))
    assert us <= core.makespan_us(all_cpu(problem, core.makespan_us))
    monkeypatch.setattr(
        "hybridc.passes.planner.search.search.BASELINES", {**BASELINES, "cheapest_bytes": cheapest_bytes}
    )
    found = search(problem, evaluations=10)
    assert found is not None and found.makespan_us <= us


def test_example_by_hand_prints_an_outcome(cheapest_bytes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    graph = NETWORKS["unet"]()
    budget_bytes = all_gpu_peak_bytes(graph, machine()) // 2
    exec(EXAMPLES[1], {"graph": graph, "budget_bytes": budget_bytes, "cheapest_bytes": cheapest_bytes})
    makespan_us, peak_bytes, events = capsys.readouterr().out.split()
    assert 0 < float(makespan_us) < float("inf")
    assert int(peak_bytes) <= budget_bytes and int(events) >= len(graph.kernels)
