"""The worked example of the guide to passes is a pass that works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridc.ir import Copy, Device
from hybridc.machine import load_machine
from hybridc.passes.partition import Effort, all_gpu_peak_bytes
from hybridc.passes.plan import make_plan
from tests.support.planner_graphs import bert

GUIDE = Path(__file__).parents[2] / "docs" / "writing_a_pass.md"


def test_worked_example_finds_the_copies_that_are_mostly_latency() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(code, names)
    find = names["find_latency_bound_copies"]
    graph, machine = bert(1), load_machine("laptop-4gb")
    budget_bytes = all_gpu_peak_bytes(graph, machine) // 3
    plan = make_plan(graph, machine, budget_bytes, (Device.GPU, Device.CPU), effort=Effort(0.1))
    copied = list(dict.fromkeys(step.tensor for step in plan.steps if isinstance(step, Copy)))
    found = find(graph, plan, machine)
    assert list(found) == [name for name in copied if name in found]
    largest = max(copied, key=lambda name: graph.tensor[name].size_bytes)
    assert largest not in found
    link = machine.link
    assert find(graph, plan, replace(machine, link=replace(link, latency_us=0.0))) == ()
    assert list(find(graph, plan, replace(machine, link=replace(link, latency_us=1e9)))) == copied
