"""Finished plans: of the alternatives that `hybridc explain` lists none is predicted to be faster."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hybridc.ir import Device, Graph
from hybridc.machine import load_machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.report.explain import alternatives
from tests.support.planner_graphs import bert, resnet, unet

WORTH = 0.005
"""A gain, as a share of the time, that the planner should have taken."""


@pytest.mark.parametrize(
    "make", [lambda: bert(2), lambda: resnet((1, 1, 1, 1)), lambda: unet(256)], ids=["bert", "resnet", "unet"]
)
def test_no_alternative_of_a_plan_gains(make: Callable[[], Graph]) -> None:
    graph, nominal = make(), load_machine("laptop-4gb")
    all_bytes = all_gpu_peak_bytes(graph, nominal)
    draw = random.Random(5)
    budgets = [int(all_bytes * draw.uniform(0.1, 0.95)) for _ in range(4)]
    plans = make_plans((Tiling(graph),), nominal, budgets, (Device.GPU, Device.CPU), effort=Effort(0.5))
    for _, plan in plans:
        changes_us = [
            found.change_us
            for _, found in alternatives(graph, plan, nominal, graph.kernels)
            if found.change_us is not None
        ]
        assert min(changes_us) >= -WORTH * plan.makespan_us
