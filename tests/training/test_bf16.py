"""Steps with bf16 products: against float64, and what stays float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.cli import main
from hybridc.machine import load_machine, machine_to_json
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.training.session import TrainingSession
from tests.support.amx import executing, tiles_here
from tests.support.machines import EAGER_GPU
from tests.support.narrow import vectors_here
from tests.training.conftest import BATCH, CLASSES, LOSS, OPTIMIZER, examples

torch = pytest.importorskip("torch")

GPU, GPU_BYTES = "cuda:sm_80+avx2", 1 << 26
RATE = 0.05
BF16 = 2.0**-9
"""The largest relative error of rounding to bf16."""


def network() -> onnx.ModelProto:
    """Convolutions of images, one of them with a stride, and a fully connected layer."""
    g = GraphBuilder("small", 3)
    x = g.input("x", (BATCH, 1, 8, 8))
    x = g.relu(g.conv(x, 16, 3, padding=1))
    x = g.relu(g.conv(x, 32, 3, padding=1))
    x = g.relu(g.conv(x, 32, 2, stride=2))
    return g.model(logits=g.gemm(g.flatten(x), CLASSES, LINEAR_GAIN))


def line() -> onnx.ModelProto:
    """Dilated convolutions along one axis of 16 channels, and nothing that a rounding makes jump."""
    g = GraphBuilder("line", 4)
    x = g.unary("Tanh", g.conv(g.input("x", (2, 16, 700)), 16, 9, padding=16, dilation=4))
    return g.model(y=g.conv(x, 16, 9, padding=16, dilation=4, gain=LINEAR_GAIN))


SLOW = [pytest.param(target, marks=pytest.mark.slow) for target in (tiles_here(), GPU)]


@pytest.fixture(params=[vectors_here(), SLOW[0], GPU])
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == GPU:
        emulator.start(GPU_BYTES)
        yield GPU
        emulator.reset()
        return
    with executing(request.param):
        yield request.param


def compiled(folder: Path, model: onnx.ModelProto, target: str, precision: str, **options: Any) -> Path:
    path = folder / f"{precision}.hyb"
    options = {"loss": LOSS, "optimizer": OPTIMIZER} | options
    if target == GPU:
        options |= {"machine": EAGER_GPU, "plan_seconds": 0.1}
    hybridc.compile_training(model, path, target=target, precision=precision, **options)
    return path


def losses(path: Path, count: int) -> list[float]:
    images, labels = examples(BATCH * count)
    with hybridc.load_training(path) as session:
        return [
            session.step(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, len(images), BATCH)
        ]


@pytest.mark.parametrize("target", [vectors_here(), *SLOW], indirect=True)
def test_losses_stay_within_a_percent_of_float32s(tmp_path: Path, target: str) -> None:
    targets = {"bf16": target, "fp32": "avx2" if target == GPU else target}
    paths = (
        compiled(tmp_path, network(), targets[p], p, optimizer="sgd:lr=0.002,momentum=0.9") for p in targets
    )
    narrow, wide = (losses(path, 10) for path in paths)
    assert wide[-1] < 0.5 * wide[0]
    assert narrow != wide
    np.testing.assert_allclose(narrow, wide, rtol=0.01)


@pytest.mark.parametrize("target", [vectors_here(), *SLOW], indirect=True)
def test_parameters_and_optimizer_states_keep_float32(tmp_path: Path, target: str) -> None:
    """An update far below a bf16 parameter's last bit is not lost."""
    path = compiled(tmp_path, network(), target, "bf16", optimizer="sgd:lr=1e-6,momentum=0.9")
    images, labels = examples(BATCH)
    with hybridc.load_training(path) as session:
        before = session.state_dict()
        session.step(images, labels)
        states = session.state_dict() | session.optimizer_state_dict()
        after = session.state_dict()
    assert {str(np.asarray(v).dtype) for v in states.values()} <= {"float32", "int64", "uint64"}
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert moved == set(before)
    weights = [name for name in before if before[name].ndim > 1]
    changes = [np.abs(after[n] - before[n]).max() / np.abs(before[n]).max() for n in weights]
    assert max(changes) < BF16


def gradients(session: TrainingSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By the update of plain SGD."""
    before = session.state_dict()
    session.step({"x": feeds["x"]}, {"target": feeds["target"]})
    after = session.state_dict()
    return {name: (before[name].astype("f8") - after[name]) / RATE for name in before}


def test_gradients_of_one_axis_are_those_of_float64(tmp_path: Path, target: str) -> None:
    """Relative to the norm of a gradient: each factor is rounded, in three products one behind the other."""
    model, random = line(), np.random.default_rng(5)
    feeds = {n: random.standard_normal((2, 16, 700)).astype("f4") for n in ("x", "target")}
    path = compiled(tmp_path, model, target, "bf16", loss="mse", optimizer=f"sgd:lr={RATE}")
    with hybridc.load_training(path) as session:
        given = session.state_dict()
        ours = gradients(session, feeds)
    parameters = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in given.items()}
    w0, b0, w1, b1 = (parameters[i.name] for i in model.graph.initializer)
    conv = torch.nn.functional.conv1d
    x, wanted = (torch.from_numpy(feeds[n]).double() for n in ("x", "target"))
    hidden = torch.tanh(conv(x, w0, b0.flatten(), padding=16, dilation=4))
    y = conv(hidden, w1, b1.flatten(), padding=16, dilation=4)
    torch.nn.functional.mse_loss(y, wanted).backward()
    for name, parameter in parameters.items():
        true = parameter.grad.numpy()
        assert np.linalg.norm(ours[name] - true) <= 8 * BF16 * np.linalg.norm(true), name


@pytest.mark.parametrize("target", [vectors_here(), *SLOW], indirect=True)
def test_products_that_stay_in_float32_are_named(tmp_path: Path, target: str, capsys: Any) -> None:
    model = tmp_path / "m.onnx"
    onnx.save_model(network(), model)
    options = ["--train", "--loss", LOSS, "--target", target, "--precision", "bf16", "--json"]
    options += ["--machine", str(EAGER_GPU)] if target == GPU else []
    assert main(["compile", str(model), "-o", str(tmp_path / "m.hyb"), *options]) == 0
    step = json.loads(capsys.readouterr().out)["step"]["precision"]
    assert any(kernel["precision"] == "bf16" for kernel in step)
    kept = [kernel for kernel in step if kernel["precision"] == "fp32"]
    notes = {kernel["note"] for kernel in kept}
    if target == GPU:
        assert notes == {"no kernel for tensor cores computes this"}  # the classifier has four columns
        return
    assert "no bf16 kernel computes this" in notes  # the weight gradient of the stride
    assert notes <= {"no bf16 kernel computes this", "fp32 is predicted to be faster"}


@pytest.mark.parametrize(
    ("target", "speedup", "is_rounded"),
    [("avx512_bf16_emulated", 0.5, False), ("avx512_bf16_emulated", 2.0, True), ("amx_emulated", 0.5, True)],
)
def test_vectors_that_multiply_bf16_no_faster_multiply_floats(
    target: str, speedup: float, is_rounded: bool, tmp_path: Path
) -> None:
    """By the profile of the machine; of tiles it says nothing."""
    machine = load_machine()
    profile = replace(machine, cpu=replace(machine.cpu, bf16_speedup=speedup))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(machine_to_json(profile)))
    assert load_machine(path) == profile
    options: dict[str, Any] = {"loss": LOSS, "target": target, "precision": "bf16", "machine": str(path)}
    graph = hybridc.plan_training(network(), **options)["step"].graphs[-1]
    assert any(kernel.precision == "bf16" for kernel in graph.kernels) == is_rounded
    notes = {kernel.precision_note for kernel in graph.kernels}
    assert is_rounded or "this processor multiplies bf16 no faster than fp32" in notes
