"""A pipeline of three networks, in the shape of a diffusion pipeline, in less than its largest two need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.cli import main
from hybridc.ir import Device
from hybridc.machine import load_machine, machine_to_json
from hybridc.models import build

SIZE = 8
IMAGE = (1, 3, SIZE, SIZE)
STEPS = 3
"""Runs of the U-Net for each text."""
Run = Callable[[str, str, np.ndarray], np.ndarray]
"""By a network's name and input, its only output."""


@dataclass(frozen=True)
class Pipeline:
    models: dict[str, onnx.ModelProto]
    paths: dict[str, Path]

    @property
    def arena_bytes(self) -> list[int]:
        """What each network needs alone, largest last."""
        plans = [open_artifact(path).plan for path in self.paths.values()]
        return sorted(plan.arena_bytes(Device.GPU) for plan in plans)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Text encoder, U-Net and decoder, for a machine whose CPU is so slow that all run on the GPU."""
    folder = tmp_path_factory.mktemp("pipeline")
    machine = folder / "slow.json"
    data = machine_to_json(load_machine("laptop-4gb"))
    data["cpu"] |= {"peak_gflops": 1, "launch_us": 100}
    machine.write_text(json.dumps(data))
    classes = int(np.prod(IMAGE))
    models = {
        "encoder": build("encoder", tokens=8, layers=1, hidden=32, heads=2, vocabulary=99, classes=classes),
        "unet": build("unet", size=SIZE, width=16, levels=1, classes=3),
        "decoder": build("super_resolution", size=SIZE, width=16, blocks=1),
    }
    paths = {name: folder / f"{name}.hyb" for name in models}
    options: dict[str, Any] = {"target": "cuda:sm_75+avx2", "machine": machine, "plan_seconds": 0.1}
    for name, model in models.items():
        hybridc.compile(model, paths[name], **options)
    return Pipeline(models, paths)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    yield
    if emulator.is_active():
        emulator.reset()


def generated(run: Run, seed: int) -> np.ndarray:
    """The image of a text: the U-Net works on what the encoder makes of the text, the decoder enlarges it."""
    text = np.random.default_rng(seed).integers(0, 99, (1, 8))
    image = run("encoder", "input_ids", text).reshape(IMAGE)
    for _ in range(STEPS):
        image = np.tanh(run("unet", "x", image))
    return run("decoder", "x", image)


def test_a_pipeline_runs_in_less_than_its_largest_two_need(pipeline: Pipeline) -> None:
    *_, second, largest = pipeline.arena_bytes
    budget_bytes = largest + second // 2
    assert largest < budget_bytes < second + largest
    references = {
        name: onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for name, model in pipeline.models.items()
    }
    with hybridc.load_group(
        pipeline.paths, gpu_memory=budget_bytes, emulate_gpu=budget_bytes, runs={"unet": STEPS}
    ) as group:
        emulator.reset_peak()
        for seed in range(2):
            found = generated(lambda name, port, array: group.run(name, None, {port: array})[0], seed)
            wanted = generated(lambda name, port, array: references[name].run(None, {port: array})[0], seed)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(np.abs(wanted).max()))
        assert emulator.statistics().peak_bytes <= budget_bytes
        assert group.plan.separate_us >= 1.5 * group.plan.round_us


def test_the_command_says_what_each_member_gets(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, second, largest = pipeline.arena_bytes
    budget = ["--gpu-memory", f"{largest + second // 2}B"]
    assert main(["group", *map(str, pipeline.paths.values()), *budget, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [member["name"] for member in data["members"]] == list(pipeline.paths)
    assert data["arena_bytes"] <= data["budget_bytes"] == largest + second // 2
    assert main(["group", *map(str, pipeline.paths.values()), *budget]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("encoder ")


def test_the_command_names_the_member_that_a_budget_is_too_small_for(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = pipeline.arena_bytes[-1]
    paths = [str(path) for path in pipeline.paths.values()]
    assert main(["group", *paths, "--gpu-memory", f"{largest - 1}B"]) == 4
    shown = capsys.readouterr().err
    assert shown.startswith("error[HC208]: member 'decoder' alone needs") and "= help:" in shown
    assert main(["group", *paths, "--gpu-memory", "1GiB", "--runs", "7"]) == 2
    assert "--runs NAME=20" in capsys.readouterr().err
