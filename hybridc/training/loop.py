"""Train for some epochs, with checkpoints from which a run goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybridc.errors import UsageError
from hybridc.training.checkpoint import Checkpoint, Evaluated, Progress, read_checkpoint, write_checkpoint
from hybridc.training.data import Dataset
from hybridc.training.schedule import Schedule
from hybridc.training.session import TrainingSession


class Listener(Protocol):
    """Hears how a run goes on."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        """Epoch `epoch`, from 0, of `steps` steps, `done` of which were made before a resumption."""

    def stepped(self, loss: float, examples: int) -> None:
        """A step was made."""

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: Evaluated | None) -> None:
        """An epoch is complete."""


class Silence:
    """Hears nothing."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        pass

    def stepped(self, loss: float, examples: int) -> None:
        pass

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: Evaluated | None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Run:
    """How to train, apart from the step and the data."""

    epochs: int
    schedule: Schedule = field(default_factory=Schedule)
    lr: float | None = None
    """Instead of the optimizer's own."""
    seed: int = 0
    """Of the examples' order and of dropout."""
    checkpoint: Path | None = None
    """Folder; None: no checkpoints."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None: only at the end of an epoch."""
    resume: bool = False
    """Whether to go on from the folder's checkpoint, if it has one."""
    stop: Callable[[], bool] = field(default=lambda: False)
    """Asked after every step; true ends the run, with a checkpoint."""


def train(
    session: TrainingSession,
    data: Dataset,
    run: Run,
    validation: Dataset | None = None,
    listener: Listener | None = None,
) -> Progress:
    """Train on batches in a random order that is another in each epoch; what is left of one is left out.

    Returns where the run ended: with fewer complete epochs than asked for if it was stopped. A run that is
    resumed gives the losses that it would have given without the interruption. Raises UsageError HC579 for
    too few examples, for a checkpoint of another run, or one in the way.
    """
    return _Loop(session, data, run, validation, listener or Silence()).run()


class _Loop:
    def __init__(
        self,
        session: TrainingSession,
        data: Dataset,
        run: Run,
        validation: Dataset | None,
        listener: Listener,
    ) -> None:
        self.session, self.data, self.settings = session, data, run
        self.validation, self.listener = validation, listener
        self.steps = data.size // session.batch
        self.losses: list[float] = []
        self.progress = Progress(run.seed)
        if self.steps < 1:
            what = f"{data.size} examples are less than a batch of {session.batch}"
            raise UsageError("HC579", what, remedy="give more, or compile for a smaller --batch")

    def run(self) -> Progress:
        self._begin()
        while self.progress.epoch < self.settings.epochs:
            if not self._epoch():
                break
        return self._now()

    def _begin(self) -> None:
        folder = self.settings.checkpoint
        found = None if folder is None else read_checkpoint(folder)
        if found is None:
            return
        if not self.settings.resume:
            remedy = "continue from it with --resume, or choose another folder"
            raise UsageError("HC579", "a checkpoint already exists", where=str(folder), remedy=remedy)
        for name, value in self._identity().items():
            if found.identity.get(name) != value:
                other = found.identity.get(name)
                what = f"the checkpoint is of another run: its {name} is {other!r}, not {value!r}"
                raise UsageError("HC579", what, where=str(folder), remedy="resume with the same arguments")
        self.session.load_state_dict(found.model)
        self.session.load_optimizer_state_dict(found.optimizer)
        self.progress, self.losses = found.progress, list(found.progress.losses)

    def _epoch(self) -> bool:
        """Make what is left of the present epoch; False if it was stopped."""
        session, epoch, batch = self.session, self.progress.epoch, self.session.batch
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.data.size)
        self.listener.epoch_begins(epoch, self.steps, self.progress.position)
        for position in range(self.progress.position, self.steps):
            rows = order[position * batch : (position + 1) * batch]
            inputs, targets = self.data.batch(rows)
            self.losses.append(session.step(inputs, targets, self._rate()))
            self.listener.stepped(self.losses[-1], batch)
            self.progress = replace(self.progress, position=position + 1)
            if position + 1 < self.steps:
                if self.settings.stop():
                    self._save()
                    return False
                if self._is_due():
                    self._save()
        self._complete(epoch)
        return not self.settings.stop()

    def _complete(self, epoch: int) -> None:
        evaluated = None
        if self.validation is not None:
            evaluated = evaluate(self.session, self.validation)
            self.progress = replace(self.progress, evaluations=(*self.progress.evaluations, evaluated))
        self.progress = replace(self.progress, epoch=epoch + 1, position=0)
        self._save()
        self.listener.epoch_ended(epoch, float(np.mean(self.losses[-self.steps :])), evaluated)

    def _rate(self) -> float:
        base = self.session.spec.optimizer.lr if self.settings.lr is None else self.settings.lr
        step = self.progress.epoch * self.steps + self.progress.position
        return base * self.settings.schedule.factor_at(step, self.steps, self.settings.epochs)

    def _is_due(self) -> bool:
        every = self.settings.checkpoint_every
        return every is not None and len(self.losses) % every == 0

    def _save(self) -> None:
        if self.settings.checkpoint is None:
            return
        states = self.session.state_dict(), self.session.optimizer_state_dict()
        checkpoint = Checkpoint(*states, self._now(), self._identity())
        try:
            write_checkpoint(self.settings.checkpoint, checkpoint)
        except OSError as error:
            what = f"the checkpoint cannot be written: {error.strerror or error}"
            remedy = "free some space, or choose another --checkpoint folder"
            raise UsageError("HC562", what, where=str(self.settings.checkpoint), remedy=remedy) from None

    def _now(self) -> Progress:
        return replace(self.progress, losses=tuple(self.losses))

    def _identity(self) -> dict[str, Any]:
        manifest = self.session.artifact.manifest
        return {
            "model": manifest.model_sha256,
            "batch": self.session.batch,
            "examples": self.data.size,
            "seed": self.settings.seed,
        }


def evaluate(session: TrainingSession, data: Dataset) -> Evaluated:
    """Loss, and accuracy where the loss is one softmax cross entropy.

    The last batch is filled up with examples from the front, which count for the loss once more.
    """
    batch = session.batch // session.spec.accumulate
    losses, right = [], 0
    for first in range(0, data.size, batch):
        rows = np.arange(first, first + batch) % data.size
        inputs, targets = data.batch(rows)
        result = session.evaluate(inputs, targets)
        losses.append(result.loss)
        if _is_classifier(session):
            output = _classified(session, result.outputs)
            (target,) = targets.values()
            right += int(np.sum((output.argmax(axis=1) == target)[: data.size - first]))
    (shape,) = {array.shape[1:] for array in data.targets.values()} if _is_classifier(session) else {()}
    total = data.size * int(np.prod(shape))
    accuracy = right / total if _is_classifier(session) else None
    return Evaluated(session.step_count, float(np.mean(losses)), accuracy)


def _is_classifier(session: TrainingSession) -> bool:
    terms = session.spec.loss
    return len(terms) == 1 and terms[0].kind == "softmax_cross_entropy"


def _classified(session: TrainingSession, outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The output that the only term of the loss is about."""
    name = session.spec.loss[0].output
    return outputs[name] if name is not None else next(iter(outputs.values()))
