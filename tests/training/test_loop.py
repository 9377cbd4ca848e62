"""Runs of several epochs: the same losses whether they are interrupted or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hybridc
from hybridc.errors import UsageError
from hybridc.training.checkpoint import Progress
from hybridc.training.data import Dataset
from hybridc.training.loop import Run, Silence, train
from hybridc.training.schedule import parse_schedule
from tests.training.conftest import BATCH, examples

pytestmark = pytest.mark.isa("avx2")

STEPS = 5
RUN = Run(epochs=3, schedule=parse_schedule("cosine:warmup=1"), seed=11)


def dataset(count: int = STEPS * BATCH + 3, seed: int = 0) -> Dataset:
    images, labels = examples(count, seed)
    return Dataset({"x": images}, {"target": labels})


def trained(artifact: Path, run: Run = RUN, data: Dataset | None = None) -> Progress:
    with hybridc.load_training(artifact, seed=run.seed) as session:
        return train(session, data or dataset(), run, dataset(2 * BATCH + 5, seed=1))


@pytest.fixture(scope="module")
def uninterrupted(step_artifact: Path) -> Progress:
    return trained(step_artifact)


def test_run_makes_its_epochs_and_learns(uninterrupted: Progress) -> None:
    assert uninterrupted.epoch == 3 and len(uninterrupted.losses) == 3 * STEPS
    assert [e.step for e in uninterrupted.evaluations] == [STEPS, 2 * STEPS, 3 * STEPS]
    last = uninterrupted.evaluations[-1]
    assert last.loss < uninterrupted.evaluations[0].loss and last.accuracy is not None and last.accuracy > 0.6


@pytest.mark.parametrize("steps", [1, STEPS - 1, STEPS, STEPS + 2, 3 * STEPS - 1])
def test_stopped_run_goes_on_with_the_same_losses(
    step_artifact: Path, uninterrupted: Progress, tmp_path: Path, steps: int
) -> None:
    made: list[float] = []

    class Counter(Silence):
        def stepped(self, loss: float, examples: int) -> None:
            made.append(loss)

    run = replace(RUN, checkpoint=tmp_path, stop=lambda: len(made) >= steps)
    with hybridc.load_training(step_artifact, seed=RUN.seed) as session:
        stopped = train(session, dataset(), run, dataset(2 * BATCH + 5, seed=1), Counter())
    assert len(stopped.losses) == steps
    assert trained(step_artifact, replace(RUN, checkpoint=tmp_path, resume=True)) == uninterrupted


def test_finished_run_is_not_trained_again(
    step_artifact: Path, uninterrupted: Progress, tmp_path: Path
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
