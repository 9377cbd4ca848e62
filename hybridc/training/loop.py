"""Train for some epochs, with checkpoints from which a run goes on as if it had never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from hybridc.errors import UsageError
from hybridc.passes.training.spec import loss_to_text, optimizer_to_text
from hybridc.training.checkpoint import (
    Checkpoint,
    Evaluated,
    TrainingProgress,
    read_checkpoint,
    write_checkpoint,
)
from hybridc.training.data import Dataset
from hybridc.training.ranks.agreement import check_agreement
from hybridc.training.schedule import Schedule, schedule_to_text
from hybridc.training.session import Evaluation, TrainingSession


class TrainingCallback(Protocol):
    """What a training run reports as it goes on."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        """Epoch `epoch`, from 0, of `steps` steps, `done` of which were made before a resumption."""

    def stepped(self, loss: float, examples: int) -> None:
        """A step was made."""

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: Evaluated | None) -> None:
        """An epoch is complete."""


class NullCallback:
    """Does nothing."""

    def epoch_begins(self, epoch: int, steps: int, done: int) -> None:
        pass

    def stepped(self, loss: float, examples: int) -> None:
        pass

    def epoch_ended(self, epoch: int, mean_loss: float, evaluated: Evaluated | None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TrainingRun:
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
    run: TrainingRun,
    validation: Dataset | None = None,
    callback: TrainingCallback | None = None,
) -> TrainingProgress:
    """Train on batches in a random order that is another in each epoch.

    The last one has what is left; a step that is compiled for whole batches alone leaves it out, and so do
    several ranks where it has no example for each part of a batch.
    Returns where the run ended: with fewer complete epochs than asked for if it was stopped. A run that is
    resumed gives the losses that it would have given without the interruption. Raises UsageError HC579 for
    too few examples, for a checkpoint of another run, or one in the way.
    """
    return _Loop(session, data, run, validation, callback or NullCallback()).run()


class _Loop:
    def __init__(
        self,
        session: TrainingSession,
        data: Dataset,
        run: TrainingRun,
        validation: Dataset | None,
        callback: TrainingCallback,
    ) -> None:
        self.session, self.data, self.settings = session, data, run
        self.validation, self.callback = validation, callback
        whole, rest = divmod(data.size, session.batch)
        least = 1 if session.ranks is None else session.spec.accumulate
        self.steps = whole + (session.spec.is_partial and rest >= least)
        self.losses: list[float] = []
        self.progress = TrainingProgress(run.seed)
        if self.steps < 1:
            what = f"{data.size} examples are less than a batch of {session.batch}"
            raise UsageError("HC579", what, remedy=f"give more, or compile with --batch 1..{session.batch}")

    def run(self) -> TrainingProgress:
        self._begin()
        while self.progress.epoch < self.settings.epochs:
            if not self._epoch():
                break
        return self._now()

    def _begin(self) -> None:
        ranks = self.session.ranks
        if ranks is None:
            found = self._found()
        else:
            check_agreement(ranks, self._identity | self._course)
            found = ranks.from_first(ranks.together(self._found if ranks.rank == 0 else lambda: None))
        if found is None:
            return
        self.session.load_state_dict(found.model)
        self.session.load_optimizer_state_dict(found.optimizer)
        self.progress, self.losses = found.progress, list(found.progress.losses)

    def _found(self) -> Checkpoint | None:
        """What the run goes on from."""
        folder = self.settings.checkpoint
        found = None if folder is None else read_checkpoint(folder)
        if found is not None:
            if not self.settings.resume:
                remedy = "continue from it with --resume, or choose another folder"
                raise UsageError("HC579", "a checkpoint already exists", where=str(folder), remedy=remedy)
            self._check_identity(found.identity, str(folder))
        return found

    def _check_identity(self, found: Mapping[str, object], where: str) -> None:
        """Nothing is taken for granted that a checkpoint does not tell, as those of older versions."""
        missing = [name for name in self._identity if name not in found]
        if missing:
            what = f"the checkpoint does not tell its {', '.join(missing)}: an older hybridc wrote it"
            remedy = "finish the run with that version, or choose another folder to start a new one"
            raise UsageError("HC579", what, where=where, remedy=remedy)
        different = [
            f"its {name} is {found[name]!r}, not {value!r}"
            for name, value in self._identity.items()
            if found[name] != value
        ]
        if different:
            what = f"the checkpoint is of another run: {'; '.join(different)}"
            raise UsageError("HC579", what, where=where, remedy="resume with the same arguments")

    def _epoch(self) -> bool:
        """Make what is left of the present epoch; False if it was stopped."""
        session, epoch, batch = self.session, self.progress.epoch, self.session.batch
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.data.size)
        self.callback.epoch_begins(epoch, self.steps, self.progress.position)
        for position in range(self.progress.position, self.steps):
            rows = order[position * batch : (position + 1) * batch]
            inputs, targets = self.data.batch(rows[session.share_of(len(rows))])
            self.losses.append(session.step(inputs, targets, self._rate()))
            self.callback.stepped(self.losses[-1], len(rows))
            self.progress = replace(self.progress, position=position + 1)
            if position + 1 < self.steps:
                if self._is_stopped():
                    self._save()
                    return False
                if self._is_due():
                    self._save()
        self._complete(epoch)
        return not self._is_stopped()

    def _is_stopped(self) -> bool:
        """On all ranks after the same step, whichever was told to."""
        ranks, own = self.session.ranks, self.settings.stop()
        return own if ranks is None else any(ranks.gather(own))

    def _complete(self, epoch: int) -> None:
        evaluated = None
        if self.validation is not None:
            evaluated = evaluate(self.session, self.validation)
            self.progress = replace(self.progress, evaluations=(*self.progress.evaluations, evaluated))
        self.progress = replace(self.progress, epoch=epoch + 1, position=0)
        self._save()
        self.callback.epoch_ended(epoch, self._mean_loss(), evaluated)

    def _mean_loss(self) -> float:
        """Over the examples of the epoch that is complete."""
        last = min(self.data.size - (self.steps - 1) * self.session.batch, self.session.batch)
        examples = [self.session.batch] * (self.steps - 1) + [last]
        return float(np.average(self.losses[-self.steps :], weights=examples))

    def _rate(self) -> float:
        step = self.progress.epoch * self.steps + self.progress.position
        return self._base_rate() * self.settings.schedule.factor_at(step, self.steps, self.settings.epochs)

    def _base_rate(self) -> float:
        return self.session.spec.optimizer.lr if self.settings.lr is None else self.settings.lr

    def _is_due(self) -> bool:
        every = self.settings.checkpoint_every
        return every is not None and len(self.losses) % every == 0

    def _save(self) -> None:
        ranks, session = self.session.ranks, self.session
        is_first = ranks is None or ranks.rank == 0
        if self.settings.checkpoint is None or not (is_first or session.are_states_shared):
            return
        states = session.state_dict(), session.optimizer_state_dict()
        if not is_first:
            return
        checkpoint = Checkpoint(*states, self._now(), self._identity)
        try:
            write_checkpoint(self.settings.checkpoint, checkpoint)
        except OSError as error:
            what = f"the checkpoint cannot be written: {error.strerror or error}"
            remedy = "free some space, or choose another --checkpoint folder"
            raise UsageError("HC562", what, where=str(self.settings.checkpoint), remedy=remedy) from None

    def _now(self) -> TrainingProgress:
        return replace(self.progress, losses=tuple(self.losses))

    @cached_property
    def _identity(self) -> dict[str, str | int | float | None]:
        """All that the losses of a run follow from. More epochs are no other run."""
        spec = self.session.spec
        return {
            "model": self.session.artifact.manifest.model_sha256,
            "loss": loss_to_text(spec.loss),
            "optimizer": optimizer_to_text(replace(spec.optimizer, lr=self._base_rate())),
            "schedule": schedule_to_text(self.settings.schedule),
            "frozen": ", ".join(spec.freeze),
            "batch": f"1..{self.session.batch}" if spec.is_partial else self.session.batch,
            "accumulate": spec.accumulate,
            "clip norm": spec.clip_norm,
            "ema": spec.ema,
            "sync batchnorm": spec.sync_batchnorm,
            "examples": self.data.size,
            "data": self.data.digest(),
            "seed": self.settings.seed,
            "dropout seed": self.session.dropout_seed,
        }

    @property
    def _course(self) -> dict[str, object]:
        """What all ranks must have alike besides, to do the same at the same time."""
        validation, settings = self.validation, self.settings
        # else rank 0 alone need know of checkpoints
        checkpoints = (settings.checkpoint is not None, settings.checkpoint_every)
        return {
            "number of epochs": settings.epochs,
            "time of checkpoints": checkpoints if self.session.are_states_shared else None,
            "validation data": None if validation is None else (validation.size, validation.digest()),
        }


def evaluate(session: TrainingSession, data: Dataset) -> Evaluated:
    """Loss, and accuracy where the loss is one softmax cross entropy: every example counts once.

    The loss must be a mean over the batch of what each example adds, as those of `--loss` are. Several ranks
    take turns with the batches, and all of them get the result.
    """
    batch = session.batch // session.spec.accumulate

    def filled(rows: np.ndarray) -> Evaluation:
        """Of these examples, again and again if the batch must be whole."""
        return session.evaluate(*data.batch(rows if session.spec.is_partial else np.resize(rows, batch)))

    def total(rows: np.ndarray, loss: float) -> float:
        """The sum of these examples' losses; `loss` is that of the batch filled with them.

        It has all of them some times, and the first few once more. What these add is found in the same way:
        there are ever fewer, until they fit the batch a whole number of times.
        """
        if session.spec.is_partial:
            return len(rows) * loss
        times, rest = divmod(batch, len(rows))
        more = total(rows[:rest], filled(rows[:rest]).loss) if rest else 0.0
        return (batch * loss - more) / times

    totals: list[float] = []
    right: list[int] = []
    compared = 0
    ranks = session.ranks
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.count)
    for first in range(rank * batch, data.size, count * batch):
        rows = np.arange(first, min(first + batch, data.size))
        result = filled(rows)
        totals.append(total(rows, result.loss))
        if _is_classifier(session):
            (target,) = data.targets.values()
            classes = _classified(session, result.outputs).argmax(axis=1)
            right.append(int(np.count_nonzero(classes[: len(rows)] == target[rows])))
            compared += target[rows].size
    if ranks is not None:  # exactly the sums of one rank, which fsum does not round either
        found = ranks.gather((totals, right, compared))
        totals = [value for part, _, _ in found for value in part]
        right = [value for _, part, _ in found for value in part]
        compared = sum(part for _, _, part in found)
    accuracy = sum(right) / compared if right else None
    return Evaluated(session.step_count, math.fsum(totals) / data.size, accuracy)


def _is_classifier(session: TrainingSession) -> bool:
    terms = session.spec.loss
    return len(terms) == 1 and terms[0].kind == "softmax_cross_entropy"


def _classified(session: TrainingSession, outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The output that the only term of the loss is about."""
    name = session.spec.loss[0].output
    return outputs[name] if name is not None else next(iter(outputs.values()))
