"""One artifact for several budgets: the GPU's size chooses the plan; each is right, within its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.errors import DeviceError, PlanError, UsageError
from hybridc.ir import Device
from hybridc.machine import load_machine, machine_to_json
from hybridc.models import build
from tests.support.light_models import random_feeds

TARGET = "cuda:sm_75+avx2"
BUDGETS = "60%,25%,100%,60%"
"""Unordered, and one of them twice."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    emulator.reset()


@pytest.fixture(scope="module")
def perceptron() -> onnx.ModelProto:
    return build("mlp", batch=8, inputs=64, hidden=64, layers=6, classes=64)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For a machine whose CPU is so slow that even a small network is better run on the GPU."""
    data = machine_to_json(load_machine("laptop-4gb"))
    data["cpu"] |= {"peak_gflops": 1, "launch_us": 100}
    machine = tmp_path_factory.mktemp("machine") / "slow.json"
    machine.write_text(json.dumps(data))
    return {"target": TARGET, "machine": machine, "plan_seconds": 0.05}


@pytest.fixture(scope="module")
def artifact(
    perceptron: onnx.ModelProto, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("budgets") / "mlp.hyb"
    compiled = hybridc.compile(perceptron, path, gpu_memory=BUDGETS, host_memory="1GiB", **options)
    assert len(compiled.plans) == 3
    return path


def assert_right(model: onnx.ModelProto, session: hybridc.runtime.Session) -> None:
    feeds = random_feeds(model)
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, wanted in zip(session.run(None, feeds), reference.run(None, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.isa("avx2")
def test_the_size_of_the_gpu_chooses_the_plan(perceptron: onnx.ModelProto, artifact: Path) -> None:
    plans = open_artifact(artifact).plans
    arenas = [plan.arena_bytes(Device.GPU) for plan in plans]
    assert arenas == sorted(set(arenas))
    for number, plan in enumerate(plans):
        assert plan.budget_bytes is not None and arenas[number] <= plan.budget_bytes
        emulator.start(plan.budget_bytes, lazy_streams=True)
        emulator.reset_peak()
        with hybridc.load(artifact) as session:
            assert session.artifact.number == number
            assert_right(perceptron, session)
        assert emulator.statistics().peak_bytes == arenas[number]
    emulator.start(arenas[0] - 1)
    with pytest.raises(DeviceError) as caught:
        hybridc.load(artifact)
    assert caught.value.code == "HC405"


@pytest.mark.isa("avx2")
def test_a_budget_chooses_the_plan_on_a_large_gpu(perceptron: onnx.ModelProto, artifact: Path) -> None:
    plans = open_artifact(artifact).plans
    emulator.start(1 << 30)
    for plan in plans:
        emulator.reset_peak()
        with hybridc.load(artifact, gpu_memory=f"{plan.budget_bytes}B") as session:
            assert session.artifact.plan == plan
            assert_right(perceptron, session)
        assert emulator.statistics().peak_bytes == plan.arena_bytes(Device.GPU)
    with pytest.raises(UsageError, match="no plan of the artifact"):
        hybridc.load(artifact, gpu_memory="1B")


@pytest.mark.isa("avx2")
def test_plans_are_those_for_one_budget_and_share_weights(
    perceptron: onnx.ModelProto, artifact: Path, options: dict[str, Any]
) -> None:
    several = open_artifact(artifact)
    assert hybridc.plan(perceptron, gpu_memory="60%", **options).plans == several.plans[1:2]
    weight_bytes = sum(numpy_helper.to_array(w).nbytes for w in perceptron.graph.initializer)
    assert several.weights.size_bytes < 2.5 * weight_bytes, "once for each layout, not for each plan"


@pytest.mark.isa("avx2")
def test_host_memory_limits_the_plan_and_is_kept_in_the_artifact(
    perceptron: onnx.ModelProto, artifact: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    opened = open_artifact(artifact)
    assert opened.manifest.host_memory_bytes == 1 << 30
    results_bytes = sum(opened.graph.tensor[name].size_bytes for name in opened.graph.outputs)
    with pytest.raises(PlanError, match="bytes of host memory") as caught:
        hybridc.compile(
            perceptron,
            tmp_path / "mlp.hyb",
            gpu_memory="25%,100%",
            host_memory=f"{results_bytes - 1}B",
            **options,
        )
    assert caught.value.code == "HC204"
    emulator.start(1 << 30)
    with pytest.raises(DeviceError, match="bytes of host memory") as refused:
        hybridc.load(artifact, host_memory="1KiB")
    assert refused.value.code == "HC408"
