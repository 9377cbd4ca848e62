"""Runs of several epochs: the same losses whether they are interrupted or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import hybridc
from hybridc.errors import UsageError
from hybridc.json_values import sealed
from hybridc.passes.training.spec import TrainingSpec, parse_loss
from hybridc.training.artifact import MANIFEST
from hybridc.training.checkpoint import TrainingProgress, read_checkpoint, write_checkpoint
from hybridc.training.data import Dataset
from hybridc.training.loop import NullCallback, TrainingRun, evaluate, train
from hybridc.training.schedule import parse_schedule
from hybridc.training.session import Evaluation
from tests.training.conftest import BATCH, examples, network

pytestmark = pytest.mark.isa("avx2")

STEPS = 5
RUN = TrainingRun(epochs=3, schedule=parse_schedule("cosine:warmup=1"), seed=11)


def dataset(count: int = STEPS * BATCH + 3, seed: int = 0) -> Dataset:
    images, labels = examples(count, seed)
    return Dataset({"x": images}, {"target": labels})


def trained(artifact: Path, run: TrainingRun = RUN, data: Dataset | None = None) -> TrainingProgress:
    with hybridc.load_training(artifact, seed=run.seed) as session:
        return train(session, data or dataset(), run, dataset(2 * BATCH + 5, seed=1))


@pytest.fixture(scope="module")
def uninterrupted(step_artifact: Path) -> TrainingProgress:
    return trained(step_artifact)


def test_run_makes_its_epochs_and_learns(uninterrupted: TrainingProgress) -> None:
    assert uninterrupted.epoch == 3 and len(uninterrupted.losses) == 3 * STEPS
    assert [e.step for e in uninterrupted.evaluations] == [STEPS, 2 * STEPS, 3 * STEPS]
    last = uninterrupted.evaluations[-1]
    assert last.loss < uninterrupted.evaluations[0].loss and last.accuracy is not None and last.accuracy > 0.6


@pytest.mark.parametrize("steps", [1, STEPS - 1, STEPS, STEPS + 2, 3 * STEPS - 1])
def test_stopped_run_goes_on_with_the_same_losses(
    step_artifact: Path, uninterrupted: TrainingProgress, tmp_path: Path, steps: int
) -> None:
    made: list[float] = []

    class Counter(NullCallback):
        def stepped(self, loss: float, examples: int) -> None:
            made.append(loss)

    run = replace(RUN, checkpoint=tmp_path, stop=lambda: len(made) >= steps)
    with hybridc.load_training(step_artifact, seed=RUN.seed) as session:
        stopped = train(session, dataset(), run, dataset(2 * BATCH + 5, seed=1), Counter())
    assert len(stopped.losses) == steps
    assert trained(step_artifact, replace(RUN, checkpoint=tmp_path, resume=True)) == uninterrupted


def test_finished_run_is_not_trained_again(
    step_artifact: Path, uninterrupted: TrainingProgress, tmp_path: Path
) -> None:
    run = replace(RUN, checkpoint=tmp_path, resume=True)
    assert trained(step_artifact, run) == uninterrupted
    assert trained(step_artifact, run) == uninterrupted
    assert trained(step_artifact, replace(run, epochs=4)).epoch == 4


def test_checkpoint_in_the_way_or_of_another_run_is_refused(step_artifact: Path, tmp_path: Path) -> None:
    run = replace(RUN, epochs=1, checkpoint=tmp_path)
    trained(step_artifact, run)
    with pytest.raises(UsageError, match="a checkpoint already exists"):
        trained(step_artifact, run)
    with pytest.raises(UsageError, match="its seed is 11, not 12"):
        trained(step_artifact, replace(run, resume=True, seed=12))
    with pytest.raises(UsageError, match="its examples is"):
        trained(step_artifact, replace(run, resume=True), dataset(2 * BATCH))


def with_spec(artifact: Path, copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a training artifact that says it was compiled otherwise: its states are the same."""
    shutil.copytree(artifact, copy)
    data = json.loads((copy / MANIFEST).read_text())
    change(data["spec"])
    (copy / MANIFEST).write_text(json.dumps(sealed(data)))
    return copy


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss", lambda spec: spec["loss"][0].update(label_smoothing=0.1)),
        ("optimizer", lambda spec: spec["optimizer"].update(momentum=0.8)),
        ("optimizer", lambda spec: spec["optimizer"].update(weight_decay=0.001)),
        ("optimizer", lambda spec: spec["optimizer"].update(lr=0.04)),
        ("frozen", lambda spec: spec.update(freeze=["nothing"])),
        ("accumulate", lambda spec: spec.update(accumulate=2, batch=2 * BATCH)),
        ("clip norm", lambda spec: spec.update(clip_norm=1.0)),
    ],
)
def test_checkpoint_of_a_step_compiled_otherwise_is_refused(
    step_artifact: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    run = replace(RUN, epochs=1, checkpoint=tmp_path / "run")
    trained(step_artifact, run)
    other = with_spec(step_artifact, tmp_path / "other.hyb", change)
    with pytest.raises(UsageError, match=f"of another run: .*its {name} is .*, not ") as caught:
        trained(other, replace(run, resume=True, epochs=2))
    assert caught.value.code == "HC579"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("schedule", {"schedule": parse_schedule("cosine")}),
        ("optimizer", {"lr": 0.01}),
        ("seed", {"seed": 1}),
    ],
)
def test_checkpoint_of_a_run_with_other_arguments_is_refused(
    step_artifact: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    run = replace(RUN, epochs=1, checkpoint=tmp_path)
    trained(step_artifact, run)
    with pytest.raises(UsageError, match=f"its {name} is") as caught:
        trained(step_artifact, replace(run, resume=True, epochs=2, **changes))
    assert caught.value.code == "HC579"


def test_checkpoint_of_a_run_on_other_data_of_that_size_is_refused(
    step_artifact: Path, tmp_path: Path
) -> None:
    run = replace(RUN, epochs=1, checkpoint=tmp_path)
    trained(step_artifact, run)
    data = dataset()
    data.inputs["x"][7, 0, 3, 4] += 0.5
    with pytest.raises(UsageError, match=r"of another run: its data is '[0-9a-f]+', not '[0-9a-f]+'\n"):
        trained(step_artifact, replace(run, resume=True, epochs=2), data)
    assert trained(step_artifact, replace(run, resume=True, epochs=2)).epoch == 2


def test_checkpoint_that_does_not_tell_its_run_is_refused(step_artifact: Path, tmp_path: Path) -> None:
    run = replace(RUN, epochs=1, checkpoint=tmp_path)
    trained(step_artifact, run)
    found = read_checkpoint(tmp_path)
    assert found is not None
    old = {name: found.identity[name] for name in ("model", "batch", "examples", "seed")}
    write_checkpoint(tmp_path, replace(found, identity=old))
    with pytest.raises(UsageError, match=r"does not tell its loss, optimizer, schedule.* older") as caught:
        trained(step_artifact, replace(run, resume=True))
    assert caught.value.code == "HC579" and "new" in caught.value.remedy


def losses_of(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Softmax cross entropy of each example, in float64."""
    shifted = outputs.astype(np.float64) - outputs.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


@pytest.mark.parametrize("count", [130, 128, 127, 300])
def test_every_example_of_an_evaluation_counts_once(step_of_128: Path, tmp_path: Path, count: int) -> None:
    data = dataset(count, seed=5)
    (images,), (labels,) = data.inputs.values(), data.targets.values()
    with hybridc.load_training(step_of_128) as session:
        session.step(*examples(128))
        found = evaluate(session, data)
        session.export_onnx(tmp_path / "trained.onnx")
    reference = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (outputs,) = reference.run(None, {"x": images})
    assert found.loss == pytest.approx(np.mean(losses_of(outputs, labels)), rel=2e-6)
    assert found.accuracy == pytest.approx(np.mean(outputs.argmax(axis=1) == labels), abs=1e-12)


@pytest.fixture(scope="module")
def step_of_128(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("of_128") / "small.hyb"
    made = hybridc.compile_training(
        network(), path, loss="softmax_cross_entropy", optimizer="sgd:lr=0.05", batch=128, target="avx2"
    )
    return made.path


class MeanOfInputs:
    """A session whose loss is the mean of a batch's inputs, in float32."""

    spec, step_count, ranks = TrainingSpec(parse_loss("mse")), 0, None

    def __init__(self, batch: int) -> None:
        self.batch, self.evaluations = batch, 0

    def evaluate(self, inputs: dict[str, np.ndarray], targets: dict[str, np.ndarray]) -> Evaluation:
        assert len(inputs["x"]) == self.batch
        self.evaluations += 1
        return Evaluation(float(inputs["x"].mean(dtype=np.float32)), {})


@pytest.mark.parametrize("batch", [1, 7, 12, 97, 100])
def test_evaluation_of_any_number_of_examples_is_their_mean(batch: int) -> None:
    for count in range(1, 2 * batch + 1):
        values = np.random.default_rng(count).uniform(1, 2, count).astype(np.float32)
        session: Any = MeanOfInputs(batch)
        found = evaluate(session, Dataset({"x": values}, {"target": values}))
        assert found.loss == pytest.approx(np.mean(values, dtype=np.float64), rel=1e-6)
        assert found.accuracy is None
        assert session.evaluations <= -(-count // batch) + 8


def test_fewer_examples_than_a_batch_are_refused(step_artifact: Path) -> None:
    with pytest.raises(UsageError) as caught:
        trained(step_artifact, data=dataset(BATCH - 1))
    assert caught.value.code == "HC579"


def test_every_example_of_an_epoch_is_seen_at_most_once_in_another_order(step_artifact: Path) -> None:
    seen: list[np.ndarray] = []
    with hybridc.load_training(step_artifact) as session:
        data = dataset()
        session.step = lambda inputs, targets, lr: seen.append(inputs["x"]) or 0.0  # type: ignore
        train(session, data, replace(RUN, epochs=2))
    epochs = [np.concatenate(seen[:STEPS]), np.concatenate(seen[STEPS:])]
    for epoch in epochs:
        assert len(np.unique(epoch.reshape(len(epoch), -1), axis=0)) == STEPS * BATCH
    assert not np.array_equal(epochs[0], epochs[1])
