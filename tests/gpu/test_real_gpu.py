"""The same promises on a real NVIDIA GPU, where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hybridc
from hybridc.cli import main
from hybridc.ir import Device
from hybridc.models import build, export
from tests.support.light_models import random_feeds

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["lenet", "resnet18", "unet", "mobilenet_v2"])
def test_results_are_those_of_onnxruntime_at_every_budget(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    parameters: dict[str, Any] = {"size": 64, "width": 16} if name == "unet" else {}
    export(name, path, **parameters)
    assert (
        main(["compare", str(path), "--target", "cuda+avx2", "--gpu-memory", "100%,50%,25%", "--json"]) == 0
    )
    for row in json.loads(capsys.readouterr().out)["comparisons"]:
        assert row["max_rel_error"] <= 1e-4
        assert row["allocated_bytes"] <= row["budget_bytes"]


def test_repeated_runs_are_equal_and_allocate_nothing(tmp_path: Path) -> None:
    model = build("unet", size=64, width=16)
    hybridc.compile(model, tmp_path / "unet.hyb", target="cuda+avx2", gpu_memory="60%")
    with hybridc.load(tmp_path / "unet.hyb") as session:
        feeds = random_feeds(model)
        first = session.run(None, feeds)[0]
        held = session.memory()[Device.GPU].allocated_bytes
        for _ in range(20):
            np.testing.assert_array_equal(session.run(None, feeds)[0], first)
        assert session.memory()[Device.GPU].allocated_bytes == held


def test_gpu_and_link_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridc.calibrate import measure
    from hybridc.progress import NullProgress
    from hybridc.targets import parse_target
    from tests.support.timers import PretendedTimer

    monkeypatch.setattr(measure, "CpuTimer", lambda target, threads: PretendedTimer(Device.CPU))
    target = parse_target("cuda+avx2")
    machine = measure.calibrate("mine", target, 2, "cpu", 1 << 34, None, NullProgress())
    assert machine.gpu.peak_gflops > 500 and machine.gpu.bandwidth_gb_s > 50
    assert 0.5 < machine.gpu.launch_us < 100
    assert machine.link.h2d_gb_s > 1 and machine.link.d2h_gb_s > 1
    assert 0.3 < machine.link.both_directions <= 1
    assert all(0.001 < e.compute < 4 for e in machine.gpu.efficiencies.values())
