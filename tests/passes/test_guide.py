"""The worked examples of the guide to passes work, and the files that it names exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm import relax

from hybridc.ir import Copy, Device
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.passes.program.program import ProgramBuilder
from tests.support.graphs import machine
from tests.support.planner_graphs import NETWORKS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "writing_a_pass.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def defined_by(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(example, names)
    return names


def test_files_that_the_guide_names_exist() -> None:
    named = re.findall(r"`((?:passes|hybridc|schedules|tests)/[\w/]+(?:\.py|/))`", GUIDE)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_first_example_counts_elementwise_operators() -> None:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = ProgramBuilder([x])
    y = builder.emit(relax.op.tanh(x), ["a"], "a")
    z = builder.emit(relax.op.reshape(builder.emit(relax.op.add(x, y), ["b"], "b"), (6,)), ["c"], "c")
    assert defined_by(EXAMPLES[0])["count_elementwise"](builder.finish([z])) == 2


def test_second_example_finds_every_copy_where_latency_is_all_and_none_where_it_is_nothing() -> None:
    find = defined_by(EXAMPLES[1])["find_latency_bound_copies"]
    graph = NETWORKS["unet"]()
    budget_bytes = all_gpu_peak_bytes(graph, machine()) // 2
    plan = make_plan(graph, machine(), budget_bytes, tuple(Device))
    copied = dict.fromkeys(step.tensor for step in plan.steps if isinstance(step, Copy))
    slow, instant = (replace(machine(), link=replace(machine().link, latency_us=us)) for us in (1e9, 0.0))
    assert copied
    assert find(graph, plan, slow) == tuple(copied)
    assert find(graph, plan, instant) == ()
