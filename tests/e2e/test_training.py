"""Training steps against PyTorch in float64: losses, parameters and running statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.errors import UsageError
from hybridc.ir import Device
from hybridc.machine import load_machine, machine_to_json
from hybridc.models.builder import LINEAR_GAIN, GraphBuilder
from hybridc.training.data import Dataset
from hybridc.training.loop import TrainingRun, train
from hybridc.training.schedule import parse_schedule
from tests.support.machines import EAGER_GPU

torch = pytest.importorskip("torch")

from tests.support.torch_reference import TorchReference  # noqa: E402  (it imports torch)

BATCH, CLASSES, STEPS = 8, 5, 10


@pytest.fixture
def emulated_gpu() -> Iterator[None]:
    emulator.start(1 << 30)
    yield
    emulator.reset()


def convolutional() -> onnx.ModelProto:
    """For 8x8 digits."""
    g = GraphBuilder("convolutional", 0)
    x = g.input("x", ("N", 1, 8, 8))
    x = g.relu(g.batch_norm(g.conv(x, 16, 3, padding=1)))
    x = g.pool("MaxPool", g.relu(g.conv(x, 32, 3, padding=1)), 2, stride=2)
    return g.model(logits=g.gemm(g.flatten(x), 10, LINEAR_GAIN))


def perceptron() -> onnx.ModelProto:
    g = GraphBuilder("perceptron", 5)
    x = g.flatten(g.input("x", ("N", 3, 8, 8)))
    x = g.relu(g.batch_norm(g.gemm(x, 16)))
    return g.model(logits=g.gemm(x, CLASSES, LINEAR_GAIN))


Batches = list[tuple[np.ndarray, np.ndarray]]


def batches() -> Batches:
    random = np.random.default_rng(1)
    return [
        (random.standard_normal((BATCH, 3, 8, 8), dtype=np.float32), random.integers(0, CLASSES, BATCH))
        for _ in range(STEPS)
    ]


def digits() -> tuple[Dataset, Dataset]:
    """scikit-learn's, four fifths to train with."""
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    images, labels = (data.images[:, None] / 16).astype(np.float32), data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    rows = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    train, held_out = (Dataset({"x": images[r]}, {"target": labels[r]}) for r in rows)
    return train, held_out


def reference_run(
    model: onnx.ModelProto, data: Batches, make: Any, parts: int = 1, frozen: tuple[str, ...] = ()
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of the steps, and the states behind the last. `make` makes an optimizer of parameters."""
    network = TorchReference(model)
    optimizer = make([tensor for name, tensor in network.parameters.items() if name not in frozen])
    losses = []
    for images, labels in data:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(np.split(images, parts), np.split(labels, parts), strict=True):
            logits = network({"x": x})["logits"]
            loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
            (loss / parts).backward()
            total += loss.item() / parts
        optimizer.step()
        losses.append(total)
    states = {name: tensor.detach().numpy() for name, tensor in network.parameters.items()}
    return losses, states | {name: t.numpy() for name, t in network.constants.items() if t.ndim}


def assert_same_run(path: Path, data: Batches, losses: list[float], states: dict[str, np.ndarray]) -> None:
    with hybridc.load_training(path) as session:
        found = [session.step(images, labels) for images, labels in data]
        np.testing.assert_allclose(found, losses, rtol=1e-3)
        for name, value in session.state_dict().items():
            np.testing.assert_allclose(value, states[name], rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.fixture(scope="module")
def digits_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = hybridc.compile_training(
        convolutional(),
        tmp_path_factory.mktemp("digits") / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05,momentum=0.9,nesterov=1,weight_decay=0.0001",
        batch=32,
        target="avx2",
    )
    return made.path


@pytest.mark.isa("avx2")
def test_convolutional_network_trains_as_with_pytorch(digits_step: Path) -> None:
    train_data, _ = digits()
    rows = [np.arange(i * 32, (i + 1) * 32) for i in range(STEPS)]
    data = [(train_data.inputs["x"][r], train_data.targets["target"][r]) for r in rows]
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    losses, states = reference_run(convolutional(), data, lambda p: torch.optim.SGD(p, **options))
    assert_same_run(digits_step, data, losses, states)


@pytest.mark.isa("avx2")
def test_held_out_digits_are_read_rightly(digits_step: Path) -> None:
    train_data, held_out = digits()
    with hybridc.load_training(digits_step) as session:
        progress = train(session, train_data, TrainingRun(10, parse_schedule("cosine:warmup=1")), held_out)
    accuracy = progress.evaluations[-1].accuracy
    assert accuracy is not None and accuracy >= 0.98


@pytest.mark.slow
@pytest.mark.isa("avx2")
def test_accumulated_batch_trains_as_with_pytorch(tmp_path: Path) -> None:
    model = perceptron()
    frozen = "Gemm_0.bias"  # its gradient in front of BatchNorm is zero, and Adam would follow the noise
    made = hybridc.compile_training(
        model,
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="adamw:lr=0.01,weight_decay=0.1",
        batch=BATCH,
        accumulate=2,
        freeze=[frozen],
        target="avx2",
    )
    losses, states = reference_run(
        model, batches(), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), 2, (frozen,)
    )
    assert_same_run(made.path, batches(), losses, states)
    with hybridc.load_training(made.path) as session:
        assert frozen not in session.state_dict()


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("emulated_gpu")
def test_network_trains_the_same_within_half_the_memory(tmp_path: Path) -> None:
    model = perceptron()
    data = machine_to_json(load_machine("laptop-4gb"))
    data["cpu"] |= {"peak_gflops": 1, "launch_us": 100}  # so that even a small network is better on the GPU
    (tmp_path / "machine.json").write_text(json.dumps(data))
    made = hybridc.compile_training(
        model,
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05",
        batch=BATCH,
        target="cuda:sm_75+avx2",
        gpu_memory="50%",
        machine=tmp_path / "machine.json",
        plan_seconds=1.0,
    )
    plan = made.step.plan
    assert plan is not None and plan.budget_bytes is not None
    assert 0 < plan.arena_bytes(Device.GPU) <= plan.budget_bytes
    emulator.start(max(p.arena_bytes(Device.GPU) for p in (*made.step.plans, *made.evaluation.plans)))
    emulator.reset_peak()
    losses, states = reference_run(model, batches(), lambda p: torch.optim.SGD(p, lr=0.05))
    assert_same_run(made.path, batches(), losses, states)
    assert emulator.statistics().launches > 0
    assert emulator.statistics().peak_bytes == plan.arena_bytes(Device.GPU)


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("emulated_gpu")
def test_programs_that_take_turns_on_the_gpu_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation and step, where the GPU has room for one of them."""
    model = perceptron()
    made = hybridc.compile_training(
        model,
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch=BATCH,
        accumulate=4,
        target="cuda:sm_75+avx2",
        machine=EAGER_GPU,
        plan_seconds=0.5,
    )
    folders = ("step", "accumulate", "evaluate")
    emulator.start(max(arena_bytes(made.path / folder) for folder in folders))
    opened: list[str] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return open_artifact(path, **options)

    monkeypatch.setattr("hybridc.runtime.session.open_artifact", counted)
    losses, states = reference_run(
        model, batches(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), parts=4
    )
    assert_same_run(made.path, batches(), losses, states)
    assert opened == ["step", "accumulate"]
    assert emulator.statistics().launches > 0


def arena_bytes(path: Path) -> int:
    return open_artifact(path).plan.arena_bytes(Device.GPU)


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.usefixtures("emulated_gpu")
def test_dominating_layer_trains_in_parts_that_nobody_sees(tmp_path: Path) -> None:
    g = GraphBuilder("wide", 2)
    x = g.relu(g.gemm(g.flatten(g.input("x", ("N", 3, 8, 8))), 2048))
    model = g.model(logits=g.gemm(x, CLASSES, LINEAR_GAIN))
    made = hybridc.compile_training(
        model,
        tmp_path / "step.hyb",
        loss="softmax_cross_entropy",
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch=BATCH,
        target="cuda:sm_75+avx2",
        plan_seconds=0.5,
    )
    losses, states = reference_run(model, batches(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    assert_same_run(made.path, batches(), losses, states)
    with hybridc.load_training(made.path) as session:
        splits = session.artifact.manifest.splits
        assert set(splits) == {"Gemm_0.weight", "Gemm_0.weight#momentum"}
        parameters = session.state_dict()
        assert {n: v.shape for n, v in parameters.items()} == {n: v.shape for n, v in states.items()}
        session.step(*batches()[0])
        trained, moments = session.state_dict(), session.optimizer_state_dict()
        expected = session.step(*batches()[1])
        session.export_onnx(tmp_path / "trained.onnx")
        with pytest.raises(UsageError, match="instead of"):
            session.load_state_dict({**trained, "Gemm_0.weight": trained["Gemm_0.weight"][:-1]})
        session.load_state_dict(trained)
        session.load_optimizer_state_dict(moments)
        assert session.step(*batches()[1]) == expected
        exported = onnx.load(tmp_path / "trained.onnx").graph.initializer
        last = session.state_dict()
        for tensor in exported:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), last[tensor.name])
