"""A model with its own loss: labels that are fed, and the inference graph that is exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.cli import main
from hybridc.errors import UsageError
from hybridc.training.session import TrainingSession
from tests.training.conftest import BATCH, CLASSES, examples, network_with_loss

pytestmark = pytest.mark.isa("avx2")


@pytest.fixture
def session(own_loss_artifact: Path) -> Iterator[TrainingSession]:
    with hybridc.load_training(own_loss_artifact) as opened:
        yield opened


def batch(labels: np.ndarray | None = None) -> dict[str, np.ndarray]:
    images, right = examples(BATCH)
    return {"x": images, "labels": right if labels is None else labels}


@pytest.mark.parametrize("label", [CLASSES, 10**6, -1, -101])
def test_label_without_a_class_is_refused_and_changes_nothing(session: TrainingSession, label: int) -> None:
    feeds = batch()
    feeds["labels"][BATCH - 2] = label  # in the second part: the first must not be gone through
    before = session.state_dict()
    for refuse in (session.step, session.evaluate):
        with pytest.raises(UsageError) as caught:
            refuse(feeds)
        assert caught.value.code == "HC581"
        assert f"'labels' has the label {label} at [{BATCH - 2}]" in caught.value.what
    assert session.step_count == 0
    for name, value in session.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_ignored_labels_do_not_count(session: TrainingSession) -> None:
    """As many in both parts, so that the mean of the parts is that of the batch."""
    feeds = batch()
    ignored = np.arange(BATCH) % 4 == 0
    full = session.evaluate(feeds)
    feeds["labels"][ignored] = -100
    found = session.evaluate(feeds)
    logits = full.outputs["logits"].astype(np.float64)
    chosen = np.take_along_axis(logits, np.maximum(feeds["labels"], 0)[:, None], 1)[:, 0]
    losses = np.log(np.exp(logits).sum(1)) - chosen
    assert found.loss == pytest.approx(losses[~ignored].mean(), rel=1e-5)
    assert np.isfinite(session.step(feeds)) and session.step_count == 1
    assert np.isnan(session.evaluate(batch(np.full(BATCH, -100))).loss)


def test_command_names_the_label_in_the_data(
    own_loss_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, labels = examples(3 * BATCH)
    labels[2 * BATCH + 1] = 10**6
    np.savez(tmp_path / "train.npz", x=images, labels=labels)
    assert main(["train", str(own_loss_artifact), "--data", str(tmp_path / "train.npz")]) == 2
    message = capsys.readouterr().err
    assert f"error[HC581]: input 'labels' has the label 1000000 at [{2 * BATCH + 1}]" in message
    assert "train.npz" in message and f"0 to {CLASSES - 1}, or -100" in message


def test_trained_model_compiles_again_and_computes_what_was_evaluated(
    session: TrainingSession, tmp_path: Path
) -> None:
    for _ in range(2):
        session.step(batch())
    exported, feeds = tmp_path / "trained.onnx", batch()
    expected = session.evaluate(feeds).outputs["logits"]
    session.export_onnx(exported)
    model = onnx.load(exported)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["logits"]
    made = hybridc.compile(exported, tmp_path / "trained.hyb", target="avx2", dims={"N": BATCH})
    assert made.path is not None
    with hybridc.load(made.path) as inference:
        (found,) = inference.run(None, {"x": feeds["x"]})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    reference = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(reference.run(None, {"x": feeds["x"]})[0], expected, rtol=1e-4, atol=1e-5)


def test_training_graph_is_exported_if_asked_for(session: TrainingSession, tmp_path: Path) -> None:
    session.export_onnx(tmp_path / "graph.onnx", for_training=True)
    found, original = onnx.load(tmp_path / "graph.onnx"), network_with_loss()
    for model in (found, original):
        del model.graph.initializer[:]
    assert found == original
