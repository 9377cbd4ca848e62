"""Networks whose largest kernels exceed the budget run on the emulated GPU in tiles, within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.emulator import ThreadOrder
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.machine import Machine
from hybridc.models import build
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.emit.materialize import materialize
from hybridc.passes.planner.make_plans import assemble
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.search.policies import kernels_that_fit, with_gpu_kernels
from hybridc.progress import NullProgress
from hybridc.runtime import load
from hybridc.targets import parse_target
from tests.support.given_plans import planned_by
from tests.support.light_models import random_feeds
from tests.support.tiled import tiled_to

TARGET = "cuda:sm_75+avx2"
TOLERANCE = 1e-4
MOVEMENTS = {"strided_slice", "rows", "concat"}
"""What cuts up inputs and puts outputs together may be larger than the budget."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    emulator.reset()


def most_on_gpu(budget_bytes: int, graph: Graph, machine: Machine) -> Plan:
    """On the GPU whatever fits the budget by itself; nothing stays there that is not at work."""
    problem = problem_of(graph, machine, budget_bytes * 7 // 8)  # packing may leave holes
    draft = materialize(
        PlanningContext(graph, machine), problem, with_gpu_kernels(problem, kernels_that_fit(problem))
    )
    return assemble(graph, machine, budget_bytes, draft.steps, draft.buffers, draft.arenas)


def compile_within(
    model: onnx.ModelProto, path: Path, budget_bytes: int, limit_bytes: int
) -> tuple[Graph, Plan]:
    with planned_by(lambda graph, machine: most_on_gpu(budget_bytes, graph, machine)), tiled_to(limit_bytes):
        hybridc.compile(model, path, target=TARGET)
    artifact = open_artifact(path)
    return artifact.graph, artifact.plan


def on_cpu(graph: Graph, plan: Plan) -> set[str]:
    """Functions of the kernels that run on the CPU."""
    runs = (step for step in plan.steps if isinstance(step, Run) and step.device is Device.CPU)
    return {graph.kernel[step.kernel].function.rstrip("_0123456789") for step in runs}


def assert_runs_right(model: onnx.ModelProto, path: Path, budget_bytes: int) -> None:
    feeds = random_feeds(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    emulator.start(budget_bytes, thread_order=ThreadOrder.SHUFFLED, lazy_streams=True)
    emulator.reset_peak()
    with load(path) as loaded:
        for got, wanted in zip(loaded.run(None, feeds), session.run(None, feeds), strict=True):
            scale = max(np.abs(wanted).max(), 1e-3)
            assert np.abs(got - wanted).max() <= TOLERANCE * scale
    assert emulator.statistics().peak_bytes <= budget_bytes


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_a_u_net_runs_on_a_gpu_that_its_largest_kernel_does_not_fit(tmp_path: Path) -> None:
    model = build("unet", size=32, width=4, levels=1)
    budget_bytes = 40 << 10
    _, start = import_model(model, CompileOptions(target=parse_target(TARGET)))
    whole = run_stages(start, NullProgress(), stop_after="graph").graph
    assert whole is not None
    assert not all(kernels_that_fit(problem_of(whole, start.machine, budget_bytes)))
    bands, plan = compile_within(model, tmp_path / "bands.hyb", budget_bytes, budget_bytes * 3 // 4)
    assert on_cpu(bands, plan) <= MOVEMENTS
    assert_runs_right(model, tmp_path / "bands.hyb", budget_bytes)


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_a_batch_and_large_weights_run_in_bands(tmp_path: Path) -> None:
    model = build("vgg", depth=11, batch=2, size=32, width=4, hidden=64, classes=10)
    budget_bytes = 48 << 10
    bands, plan = compile_within(model, tmp_path / "bands.hyb", budget_bytes, budget_bytes // 2)
    assert on_cpu(bands, plan) <= MOVEMENTS
    assert_runs_right(model, tmp_path / "bands.hyb", budget_bytes)
