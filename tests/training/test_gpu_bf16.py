"""Steps in bf16 on an emulated GPU: losses, results, and the bytes that they take there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator, models
from hybridc.artifact.load import open_artifact
from hybridc.ir import Device, Run
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.results import Planned
from hybridc.training.artifact import STEP
from tests.support.layouts import draw_layouts
from tests.support.machines import EAGER_GPU

TARGET = "cuda:sm_80+avx2"
LOSS = "softmax_cross_entropy"
TWO_LOSSES = "mse(track)+0.5*mse(peaks)"
pytestmark = pytest.mark.isa("avx2")


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    emulator.start(1 << 26)
    yield
    emulator.reset()


def atacworks(length: int) -> onnx.ModelProto:
    return models.build(
        "atacworks", batch=2, length=length, channels=16, kernel=9, dilation=4, blocks=1, peak_blocks=1
    )


def compiled(path: Path, model: onnx.ModelProto, loss: str, precision: str, **options: Any) -> Path:
    options = {"optimizer": "sgd:lr=0.01,momentum=0.9"} | options
    if precision == "bf16":
        options = {"target": TARGET, "machine": EAGER_GPU, "plan_seconds": 0.1} | options
    else:
        options["target"] = "avx2"
    hybridc.compile_training(model, path, loss=loss, precision=precision, **options)
    return path


def losses(path: Path, feeds: tuple[Any, ...], count: int) -> list[float]:
    with hybridc.load_training(path) as session:
        return [session.step(*feeds) for _ in range(count)]


def images() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((16, 3, 16, 16)).astype("f4"), random.integers(0, 10, 16)


def tracks(length: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    wanted = {"target_track": (2, length), "target_peaks": (2, length)}
    targets = {name: random.standard_normal(shape).astype("f4") for name, shape in wanted.items()}
    return {"x": random.standard_normal((2, 1, length)).astype("f4")}, targets


@pytest.mark.slow  # many ways to cut a step up are planned, here and below
@pytest.mark.parametrize(
    ("model", "loss", "feeds"),
    [
        (models.build("cifar_quick", batch=16, size=16, width=16), LOSS, images()),
        (atacworks(300), TWO_LOSSES, tracks(300)),
    ],
    ids=["cifar_quick", "atacworks"],
)
def test_losses_are_float32s(
    tmp_path: Path, model: onnx.ModelProto, loss: str, feeds: tuple[Any, ...]
) -> None:
    wide = losses(compiled(tmp_path / "wide.hyb", model, loss, "fp32"), feeds, 4)
    narrow = losses(compiled(tmp_path / "narrow.hyb", model, loss, "bf16"), feeds, 4)
    assert narrow != wide and emulator.statistics().launches > 0
    np.testing.assert_allclose(narrow, wide, rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_losses_do_not_depend_on_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    model = models.build("cifar_quick", batch=16, size=16, width=16)
    wide = losses(compiled(tmp_path / "wide.hyb", model, LOSS, "fp32"), images(), 4)
    draw_layouts(monkeypatch, 1, share)
    path = compiled(tmp_path / "last.hyb", model, LOSS, "bf16")
    assert any(tensor.channels_last for tensor in open_artifact(path / STEP).graph.tensors)
    np.testing.assert_allclose(losses(path, images(), 4), wide, rtol=0.01)


@pytest.mark.slow
def test_half_of_the_memory_is_enough(tmp_path: Path) -> None:
    """On a device that has the budget and no byte more."""
    random, g = np.random.default_rng(0), GraphBuilder("small", 3)
    x = g.unary("Tanh", g.gemm(g.input("x", (64, 64)), 96))
    model = g.model(logits=g.gemm(x, 16, LINEAR_GAIN))
    feeds = random.standard_normal((64, 64)).astype("f4"), random.integers(0, 16, 64)
    wide = losses(compiled(tmp_path / "wide.hyb", model, LOSS, "fp32"), feeds, 3)
    path = compiled(tmp_path / "narrow.hyb", model, LOSS, "bf16", gpu_memory="50%")
    plan = open_artifact(path / STEP).plan
    assert plan.budget_bytes
    emulator.reset()
    emulator.start(plan.budget_bytes)
    np.testing.assert_allclose(losses(path, feeds, 3), wide, rtol=0.01)
    assert any(isinstance(step, Run) and step.device is Device.GPU for step in plan.steps)
    assert emulator.statistics().capacity_bytes == plan.budget_bytes


@cache
def planned(precision: str) -> Planned:
    options: dict[str, Any] = {"target": TARGET, "machine": EAGER_GPU, "plan_seconds": 0.1}
    options |= {"loss": TWO_LOSSES, "optimizer": "adam:lr=0.01", "precision": precision}
    return hybridc.plan_training(atacworks(4000), **options)[STEP]


@pytest.mark.slow
def test_activations_take_half_of_the_bytes() -> None:
    narrow, wide = planned("bf16"), planned("fp32")
    assert narrow.all_gpu_peak_bytes < 0.6 * wide.all_gpu_peak_bytes  # inputs and parameters are float32
    tensors = {tensor.name: tensor for tensor in narrow.graphs[-1].tensors}
    long = [t for t in tensors.values() if t.shape[1:] == (16, 4000)]
    assert len(long) > 10 and {t.dtype for t in long} == {"bfloat16"}


def test_states_and_gradients_of_parameters_take_four_bytes() -> None:
    graph = planned("bf16").graphs[-1]
    tensor = {t.name: t for t in graph.tensors}
    updates = [kernel for kernel in graph.kernels if kernel.function.startswith("adam_update")]
    assert updates
    for kernel in updates:
        assert {tensor[name].dtype for name in (*kernel.inputs, *kernel.outputs)} == {"float32"}
    assert {tensor[name].dtype for name in graph.outputs} <= {"float32", "int64"}


def test_tensor_cores_make_products_forward_and_backward() -> None:
    graph = planned("bf16").graphs[-1]
    tensor = {t.name: t for t in graph.tensors}
    reduced = [k for k in graph.kernels if k.precision == "bf16"]
    assert sum("wgrad" in k.function for k in reduced) > 3
    assert sum("wgrad" not in k.function for k in reduced) > 6
    for kernel in reduced:
        assert graph.precision_on(kernel, Device.GPU) == "bf16"
        assert [tensor[name].dtype for name in kernel.inputs].count("bfloat16") >= 2
    notes = {k.precision_note for k in graph.kernels} - {""}
    assert notes == {"no kernel for tensor cores computes this"}  # convolutions from or to one channel


@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path) -> None:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x, labels = (data.images[:, None] / 16).astype("f4"), data.target.astype("i8")
    g = GraphBuilder("digits", 0)
    y = g.pool("MaxPool", g.relu(g.conv(g.input("x", (64, 1, 8, 8)), 16, 3, padding=1)), 2, stride=2)
    model = g.model(logits=g.gemm(g.relu(g.gemm(g.flatten(y), 64)), 10, LINEAR_GAIN))
    path = compiled(tmp_path / "d.hyb", model, LOSS, "bf16", optimizer="adam:lr=0.01")
    batches = [slice(at, at + 64) for at in range(0, len(x) - 63, 64)]
    with hybridc.load_training(path) as session:
        for _ in range(6):
            for batch in batches:
                session.step(x[batch], labels[batch])
        found = [session.evaluate(x[batch], labels[batch]).outputs["logits"] for batch in batches]
    right = [np.argmax(f, 1) == labels[batch] for f, batch in zip(found, batches, strict=True)]
    assert np.mean(right) > 0.98
