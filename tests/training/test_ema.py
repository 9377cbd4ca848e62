"""Moving averages of weights against PyTorch's `AveragedModel`, and where they are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.errors import UsageError
from hybridc.training.checkpoint import read_checkpoint
from hybridc.training.data import Dataset
from hybridc.training.loop import TrainingRun, train
from hybridc.training.session import TrainingSession
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, examples, network

pytestmark = pytest.mark.isa("avx2")
DECAY, STEPS = 0.8, 6


def compiled(path: Path, **more: Any) -> Path:
    options: dict[str, Any] = {"loss": LOSS, "optimizer": OPTIMIZER, "batch": BATCH, "target": "avx2"}
    options |= {"ema": DECAY} | more
    return hybridc.compile_training(network(), path, **options).path


@pytest.fixture(scope="module")
def averaging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("ema") / "step.hyb")


def step(session: TrainingSession, number: int) -> float:
    return session.step(*examples(BATCH, seed=number))


def averages_of_pytorch(weights: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Of weights behind each step, which are parameters all."""
    torch = pytest.importorskip("torch")
    swa = torch.optim.swa_utils

    def module(values: dict[str, np.ndarray]) -> Any:
        parameters = [torch.nn.Parameter(torch.from_numpy(v.astype(np.float64))) for v in values.values()]
        return torch.nn.ParameterList(parameters)

    averaged = swa.AveragedModel(module(weights[0]), multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY))
    for values in weights:
        averaged.update_parameters(module(values))
    return dict(zip(weights[0], (p.detach().numpy() for p in averaged.module), strict=True))


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"accumulate": 2, "clip_norm": 1.0, "optimizer": "adamw"}, marks=pytest.mark.slow),
    ],
)
def test_averages_are_pytorchs(more: dict[str, Any], averaging: Path, tmp_path: Path) -> None:
    path = compiled(tmp_path / "step.hyb", **more) if more else averaging
    weights = []
    with hybridc.load_training(path) as session:
        statistics = {s.name for s in session.artifact.manifest.states if s.kind == "statistic"}
        before, averaged = session.state_dict(), session.averaged_state_dict()
        assert all(np.array_equal(averaged[name], value) for name, value in before.items())
        for number in range(STEPS):
            step(session, number)
            weights.append({n: v for n, v in session.state_dict().items() if n not in statistics})
        found, present = session.averaged_state_dict(), session.state_dict()
    for name, value in averages_of_pytorch(weights).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
    assert statistics and all(np.array_equal(found[name], present[name]) for name in statistics)
    assert not np.allclose(found["Gemm_0.weight"], present["Gemm_0.weight"])


def test_evaluation_and_export_are_of_averages(averaging: Path, tmp_path: Path) -> None:
    images, labels = examples(BATCH, seed=STEPS)
    with hybridc.load_training(averaging) as session:
        for number in range(STEPS):
            step(session, number)
        averaged, present = session.averaged_state_dict(), session.state_dict()
        found = session.evaluate(images, labels).outputs["logits"]
        session.export_onnx(tmp_path / "trained.onnx")
        session.export_onnx(tmp_path / "training.onnx", for_training=True)
    for file, expected in (("trained.onnx", averaged), ("training.onnx", present)):
        for tensor in onnx.load(tmp_path / file).graph.initializer:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), expected[tensor.name])
    oracle = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(found, oracle.run(None, {"x": images})[0], rtol=1e-4, atol=1e-5)


def test_averages_go_on_from_saved_states(averaging: Path) -> None:
    with hybridc.load_training(averaging) as session:
        for number in range(STEPS):
            step(session, number)
            if number == 1:
                model, optimizer = session.state_dict(), session.optimizer_state_dict()
        expected = session.averaged_state_dict()
    assert "Gemm_0.weight#average" in optimizer
    with hybridc.load_training(averaging) as session:
        session.load_state_dict(model)
        session.load_optimizer_state_dict(optimizer)
        for number in range(2, STEPS):
            step(session, number)
        for name, value in session.averaged_state_dict().items():
            np.testing.assert_array_equal(value, expected[name])


def test_validation_and_resumption_of_a_run_are_by_averages(averaging: Path, tmp_path: Path) -> None:
    images, labels = examples(4 * BATCH)
    data = Dataset({"x": images}, {"target": labels})
    run = TrainingRun(3, checkpoint=tmp_path / "run", resume=True)
    with hybridc.load_training(averaging) as session:
        whole = train(session, data, replace(run, checkpoint=None), data)
        loss = float(
            np.mean([session.evaluate(*data.batch(np.arange(BATCH) + i * BATCH)).loss for i in range(4)])
        )
        assert whole.evaluations[-1].loss == pytest.approx(loss, rel=1e-6)
    for epochs in (1, 3):
        with hybridc.load_training(averaging) as session:
            assert (
                train(session, data, replace(run, epochs=epochs), data).losses == whole.losses[: 4 * epochs]
            )
    found = read_checkpoint(tmp_path / "run")
    assert found is not None and found.progress.evaluations == whole.evaluations
    other = compiled(tmp_path / "other.hyb", ema=0.9)
    with (
        hybridc.load_training(other) as session,
        pytest.raises(UsageError, match=r"its ema is 0\.8, not 0\.9"),
    ):
        train(session, data, run)
