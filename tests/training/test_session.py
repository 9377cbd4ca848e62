"""Steps, states and exports of a compiled training step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import hybridc
from hybridc.errors import ArtifactError, DeviceError, UsageError
from hybridc.passes.training.spec import NEW
from hybridc.runtime import Session
from hybridc.training.artifact import ACCUMULATE, MANIFEST, STATES, STEP, open_training
from hybridc.training.session import TrainingSession
from tests.training.conftest import BATCH, CLASSES, LOSS, OPTIMIZER, examples, network

pytestmark = pytest.mark.isa("avx2")


@pytest.fixture
def session(step_artifact: Path) -> Iterator[TrainingSession]:
    with hybridc.load_training(step_artifact, seed=3) as opened:
        yield opened


def test_session_is_told_in_one_line(session: TrainingSession) -> None:
    assert repr(session).startswith(f"<TrainingSession {session.artifact.path.name}: ")
    assert repr(session).endswith(", 0 steps made>") and "states>" in repr(session.artifact)


def losses(session: TrainingSession, count: int, seed: int = 0) -> list[float]:
    images, labels = examples(BATCH * count, seed)
    return [session.step(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, len(images), BATCH)]


def test_network_learns(session: TrainingSession) -> None:
    first, *_, last = losses(session, 30)
    assert last < 0.3 * first and session.step_count == 30
    images, labels = examples(4 * BATCH, seed=1)
    evaluation = session.evaluate(images, labels)
    assert np.mean(evaluation.outputs["logits"].argmax(1) == labels) > 0.9
    assert evaluation.loss < 0.5 * first


def test_step_goes_on_from_loaded_states_as_if_nothing_had_been(session: TrainingSession) -> None:
    losses(session, 3)
    model, optimizer = session.state_dict(), session.optimizer_state_dict()
    expected = losses(session, 3, seed=1)
    assert losses(session, 3, seed=1) != expected
    session.load_state_dict(model)
    session.load_optimizer_state_dict(optimizer)
    assert session.step_count == 3
    assert losses(session, 3, seed=1) == expected


def test_dropout_depends_on_seed_and_step_alone(step_artifact: Path) -> None:
    found: dict[int, list[list[float]]] = {}
    for seed in (0, 0, 1):
        with hybridc.load_training(step_artifact, seed=seed) as session:
            images, labels = examples(BATCH)
            found.setdefault(seed, []).append([session.step(images, labels, lr=1e-30) for _ in range(3)])
    assert found[0][0] == found[0][1] != found[1][0]
    assert len(set(found[0][0])) == 3


def test_states_are_named_as_in_the_model(session: TrainingSession) -> None:
    names = {tensor.name for tensor in network().graph.initializer}
    assert set(session.state_dict()) == names
    moments = {f"{name}#momentum" for name in names if not name.endswith((".mean", ".variance"))}
    assert set(session.optimizer_state_dict()) == moments | {"step"}


def test_states_of_another_network_are_refused(session: TrainingSession) -> None:
    states = session.state_dict()
    name = next(iter(states))
    for wrong in ({}, states | {"more": states[name]}, states | {name: states[name].astype(np.float64)}):
        with pytest.raises(UsageError) as caught:
            session.load_state_dict(wrong)
        assert caught.value.code == "HC576"
    with pytest.raises(UsageError):
        session.load_optimizer_state_dict({})


def test_a_step_writes_new_states_where_the_old_ones_were(step_artifact: Path) -> None:
    with hybridc.load_training(step_artifact, seed=3) as session:
        images, labels = examples(BATCH)
        loss = session.step(images, labels)
        expected = session.state_dict() | session.optimizer_state_dict()
    training = open_training(step_artifact)
    old, images, labels = training.initial_values(), *examples(BATCH)
    rest = {"x": images, "target": labels, "learning_rate": np.float32(0.05)}
    with Session(step_artifact / STEP) as inner:
        outputs = [port.name for port in inner.artifact.manifest.outputs]
        places = inner.places({name: name + NEW for name in old if name + NEW in outputs})
        assert sum(array.size for array in places.values()) > 0.9 * sum(value.size for value in old.values())
        for name, array in places.items():
            array[...] = old[name]
        names = [port.name for port in inner.artifact.manifest.inputs if port.name not in places]
        given = old | rest | {training.manifest.seed: np.int64(3 << 32)}
        feeds = {name: np.asarray(given[name]) for name in names}
        (found,) = inner.run([training.manifest.loss], feeds, kept=places)
        assert found == np.float32(loss)
        for name, array in places.items():
            np.testing.assert_array_equal(array, expected[name])


@pytest.mark.usefixtures("interrupts_are_handled")
def test_an_interrupt_comes_when_the_step_is_whole(
    step_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = examples(BATCH)
    with hybridc.load_training(step_artifact) as session:
        session.step(images, labels)
        expected = session.state_dict()
    run = Session.run

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return run(*arguments, **options)

    with hybridc.load_training(step_artifact) as session:
        monkeypatch.setattr(Session, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.step(images, labels)
        assert session.step_count == 1
        for name, value in session.state_dict().items():
            np.testing.assert_array_equal(value, expected[name])


def test_batch_of_another_size_is_refused(session: TrainingSession) -> None:
    images, labels = examples(BATCH + 1)
    for inputs, targets in (
        (images, labels),
        (images[:BATCH], labels[: BATCH - 1]),
        (images[:0], labels[:0]),
    ):
        with pytest.raises(UsageError) as caught:
            session.step(inputs, targets)
        assert caught.value.code == "HC577"
    assert session.step_count == 0


def test_arrays_under_other_names_are_refused(session: TrainingSession) -> None:
    images, labels = examples(BATCH)
    for inputs, targets, code in (
        ({"x": images}, {"label": labels}, "HC551"),
        ({"x": images, "y": images}, labels, "HC551"),
        ({"x": images}, None, "HC552"),
        ({}, labels, "HC552"),
    ):
        for call in (session.step, session.evaluate):
            with pytest.raises(UsageError) as caught:
                call(inputs, targets)
            assert caught.value.code == code
    assert session.step_count == 0


def test_failed_step_changes_nothing(session: TrainingSession) -> None:
    images, labels = examples(BATCH)
    session.step(images, labels)
    before = session.state_dict()
    with pytest.raises(UsageError):
        session.step(images.astype(np.float64), labels)
    for name, value in session.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("label", [CLASSES, 10**6, -1])
def test_label_without_a_class_is_refused(session: TrainingSession, label: int) -> None:
    images, labels = examples(2 * BATCH)
    labels[BATCH + 3] = label
    with pytest.raises(UsageError) as caught:
        session.evaluate(images, labels)
    assert caught.value.code == "HC581" and f"label {label} at [{BATCH + 3}]" in caught.value.what
    with pytest.raises(UsageError, match=f"label {label} at \\[3\\]"):
        session.step(images[BATCH:], labels[BATCH:])
    assert session.step_count == 0


@pytest.fixture(scope="module")
def accumulating_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("accumulating") / "small.hyb"
    made = hybridc.compile_training(
        network(), path, loss=LOSS, optimizer=OPTIMIZER, batch=BATCH, accumulate=4, target="avx2"
    )
    return made.path


@pytest.mark.parametrize("failing", [ACCUMULATE, STEP])
@pytest.mark.parametrize("reload", [False, True])
def test_failed_part_of_a_batch_leaves_neither_sums_nor_statistics(
    accumulating_artifact: Path, monkeypatch: pytest.MonkeyPatch, failing: str, reload: bool
) -> None:
    with hybridc.load_training(accumulating_artifact) as session:
        expected_losses = losses(session, 3)
        expected = session.state_dict() | session.optimizer_state_dict()
    run, calls = Session.run, []

    def short_of_memory(self: Session, *arguments: Any, **options: Any) -> Any:
        kind = self.artifact.path.name
        calls.append(kind)
        if kind == failing and calls.count(kind) == (2 if failing == ACCUMULATE else 1):
            raise DeviceError("HC405", "another process has taken the GPU's memory")
        return run(self, *arguments, **options)

    with hybridc.load_training(accumulating_artifact) as session:
        before = session.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", short_of_memory)
            with pytest.raises(DeviceError):
                losses(session, 1, seed=5)
        assert failing in calls and session.step_count == 0
        after = session.state_dict()
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)
        if reload:
            session.load_state_dict(before)
        assert losses(session, 3) == expected_losses
        for name, value in (session.state_dict() | session.optimizer_state_dict()).items():
            np.testing.assert_array_equal(value, expected[name])


def test_export_for_training_is_the_users_model_with_other_weights(
    session: TrainingSession, tmp_path: Path
) -> None:
    losses(session, 5)
    session.export_onnx(tmp_path / "trained.onnx", for_training=True)
    trained, original = onnx.load(tmp_path / "trained.onnx"), network(dropout=0.1)
    states = session.state_dict()
    for tensor in trained.graph.initializer:
        if tensor.name in states:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), states[tensor.name])
    for model in (trained, original):
        del model.graph.initializer[:]
    assert trained == original
    images, labels = examples(BATCH)
    reference = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    (expected,) = reference.run(None, {"x": images})
    found = session.evaluate(images, labels).outputs["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_damaged_artifact_is_refused(step_artifact: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy.hyb"
    shutil.copytree(step_artifact, copy)
    states = (copy / STATES).read_bytes()
    (copy / STATES).write_bytes(states[:-1] + bytes([states[-1] ^ 1]))
    with pytest.raises(ArtifactError) as caught:
        hybridc.load_training(copy)
    assert caught.value.code == "HC312"
    (copy / MANIFEST).write_text((copy / MANIFEST).read_text().replace('"kind": "moment"', '"kind": "other"'))
    with pytest.raises(ArtifactError) as caught:
        hybridc.load_training(copy)
    assert caught.value.code == "HC311"
    with pytest.raises(ArtifactError) as caught:
        hybridc.load_training(tmp_path)
    assert caught.value.code == "HC310"
