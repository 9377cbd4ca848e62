"""Training with states that stay in the memory of an emulated GPU between steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import emulator
from hybridc.artifact.load import open_artifact
from hybridc.errors import DeviceError
from hybridc.ir import Copy, Device
from hybridc.ir.plan import resident_pairs
from hybridc.passes.training.spec import NEW
from hybridc.runtime import Session
from hybridc.training.artifact import EVALUATE, STEP, open_training
from hybridc.training.session import TrainingSession
from tests.support.machines import EAGER_GPU
from tests.training.conftest import BATCH, LOSS, OPTIMIZER, examples, network

pytestmark = pytest.mark.isa("avx2")

GPU_BYTES = 1 << 24


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    emulator.start(GPU_BYTES)
    yield
    emulator.reset()


@pytest.fixture(scope="session")
def gpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    onnx.save(network(dropout=0.1), folder / "small.onnx")
    made = hybridc.compile_training(
        folder / "small.onnx",
        folder / "small.hyb",
        loss=LOSS,
        optimizer=OPTIMIZER,
        batch=BATCH,
        target="cuda:sm_75+avx2",
        machine=EAGER_GPU,
        plan_seconds=0.5,
    )
    return made.path


def train(session: TrainingSession, count: int, seed: int = 0) -> list[float]:
    images, labels = examples(BATCH * count, seed)
    return [session.step(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, len(images), BATCH)]


def states_of(session: TrainingSession) -> dict[str, np.ndarray]:
    return session.state_dict() | session.optimizer_state_dict()


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_states_stay_on_the_gpu_and_are_those_of_a_cpu(gpu_artifact: Path, step_artifact: Path) -> None:
    artifact = open_artifact(gpu_artifact / STEP)
    states = len(open_training(gpu_artifact).manifest.states)
    assert len(resident_pairs(artifact.graph, artifact.plan.steps)) == states
    copied = {step.tensor for step in artifact.plan.steps if isinstance(step, Copy)}
    assert len(copied) == 5  # images, labels, rate, seed and loss
    with hybridc.load_training(gpu_artifact) as on_gpu, hybridc.load_training(step_artifact) as on_cpu:
        np.testing.assert_allclose(train(on_gpu, 5), train(on_cpu, 5), rtol=1e-5)
        assert_same(states_of(on_gpu), states_of(on_cpu), 1e-5)
    assert emulator.statistics().launches > 0


def test_other_programs_take_the_memory_and_change_nothing(gpu_artifact: Path) -> None:
    sizes = [open_artifact(gpu_artifact / kind).plan.arena_bytes(Device.GPU) for kind in (STEP, EVALUATE)]
    emulator.start(max(sizes))
    emulator.reset_peak()
    with hybridc.load_training(gpu_artifact) as session:
        expected = train(session, 2) + train(session, 2, seed=1)
    with hybridc.load_training(gpu_artifact) as session:
        found = train(session, 2)
        before = states_of(session)
        images, labels = examples(BATCH, seed=5)
        first = session.evaluate(images, labels)
        assert session.evaluate(images, labels).loss == first.loss
        assert_same(states_of(session), before)
        found += train(session, 2, seed=1)
    assert found == expected
    assert emulator.statistics().peak_bytes == max(sizes)


def test_loaded_states_go_to_the_gpu(gpu_artifact: Path) -> None:
    with hybridc.load_training(gpu_artifact) as session:
        train(session, 2)
        model, optimizer = session.state_dict(), session.optimizer_state_dict()
        expected = train(session, 2, seed=1)
        assert train(session, 2, seed=1) != expected
        session.load_state_dict(model)  # one after the other: what is not replaced is kept
        session.load_optimizer_state_dict(optimizer)
        assert train(session, 2, seed=1) == expected


def test_states_are_there_when_the_session_is_closed(gpu_artifact: Path) -> None:
    with hybridc.load_training(gpu_artifact) as session:
        initial = session.state_dict()
        train(session, 1)
        expected = states_of(session)
        session.close()
        assert_same(states_of(session), expected)
        assert any((value != initial[name]).any() for name, value in session.state_dict().items())


def test_step_is_an_ordinary_program_for_others(gpu_artifact: Path) -> None:
    training, (images, labels) = open_training(gpu_artifact), examples(BATCH)
    with hybridc.load_training(gpu_artifact, seed=3) as session:
        loss = session.step(images, labels)
        expected = states_of(session)
    scalars = {"learning_rate": np.float32(0.05), training.manifest.seed: np.int64(3 << 32)}
    feeds = training.initial_values() | {"x": images, "target": labels} | scalars
    with Session(gpu_artifact / STEP) as inner:
        for _ in range(2):  # nothing is left from the first time
            arrays = {port.name: np.asarray(feeds[port.name]) for port in inner.artifact.manifest.inputs}
            names = [port.name for port in inner.artifact.manifest.outputs]
            results = dict(zip(names, inner.run(None, arrays), strict=True))
            assert results[training.manifest.loss] == np.float32(loss)
            for name, value in results.items():
                if name.endswith(NEW):
                    np.testing.assert_array_equal(value, expected[name.removesuffix(NEW)])


def test_failed_step_leaves_states_that_the_host_has_and_tells_when_it_has_not(
    gpu_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any, **options: Any) -> Any:
        raise DeviceError("HC407", "the device failed")

    with hybridc.load_training(gpu_artifact) as session:
        initial = states_of(session)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", failing)
            with pytest.raises(DeviceError):
                train(session, 1)
        assert_same(states_of(session), initial)
        train(session, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", failing)
            with pytest.raises(DeviceError):
                train(session, 1)
        for use in (session.state_dict, lambda: train(session, 1)):
            with pytest.raises(DeviceError, match="only copy") as error:
                use()
            assert error.value.code == "HC411"
