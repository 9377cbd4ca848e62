"""The 1,517-layer ResNet is planned in bounded effort."""

from __future__ import annotations

import time

import pytest

from hybridc.ir import Device
from hybridc.ir.verify import verify
from hybridc.models import build
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

SECONDS = 120.0
"""Of processor time, for the plan alone."""


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_resnet_of_1517_layers_is_planned_and_verified(share: float) -> None:
    model = build("resnet", depth=1517, size=32, width=2, classes=10)
    options = CompileOptions(target=parse_target("cuda+avx2"))
    graph = run_stages(import_model(model, options)[1], NullProgress(), stop_after="graph").graph
    assert graph is not None and len(graph.kernels) > 1500
    budget_bytes = int(share * all_gpu_peak_bytes(graph, options.machine))
    start = time.process_time()
    plan = make_plan(graph, options.machine, budget_bytes, (Device.GPU, Device.CPU))
    seconds = time.process_time() - start
    verify(graph, plan)
    assert plan.arena_bytes(Device.GPU) <= budget_bytes
    assert 0 < plan.time_bound_us <= plan.makespan_us
    assert seconds <= SECONDS
