"""The bytes that a training step takes of the device are those that its plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc import emulator, models
from hybridc.ir import Device, Run
from hybridc.machine import load_machine, machine_to_json

NETWORKS: dict[str, dict[str, Any]] = {
    "cifar_quick": {"batch": 4},
    "resnet": {"depth": 10, "batch": 4, "size": 16, "width": 8, "classes": 10},
}


@pytest.fixture
def emulated_gpu() -> Iterator[None]:
    emulator.start(1 << 30)
    yield
    emulator.reset()


@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("emulated_gpu")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("resnet", "40%"), ("resnet", "100%"), ("cifar_quick", "40%")])
def test_device_counts_the_bytes_that_were_planned(name: str, share: str, tmp_path: Path) -> None:
    model = models.build(name, **NETWORKS[name])
    data = machine_to_json(load_machine("laptop-4gb"))
    data["cpu"] |= {"peak_gflops": 1, "launch_us": 100}  # so that even a small network is better on the GPU
    (tmp_path / "machine.json").write_text(json.dumps(data))
    made = hybridc.compile_training(
        model,
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05",
        target="cuda:sm_75+avx2",
        gpu_memory=share,
        machine=tmp_path / "machine.json",
        plan_seconds=0.2,
    )
    plan = made.step.plan
    assert plan is not None
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    emulator.reset_peak()
    before = emulator.statistics().used_bytes
    with hybridc.load_training(made.path) as session:
        assert np.isfinite(session.step(images, np.arange(shape[0]) % 10))
        assert emulator.statistics().peak_bytes - before == plan.arena_bytes(Device.GPU)
    assert any(isinstance(step, Run) and step.device is Device.GPU for step in plan.steps)
