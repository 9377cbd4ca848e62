"""Checkpoints: everything that a run needs to go on exactly as if it had never stopped, in one file."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.array_files import ArrayFile, open_arrays, write_arrays
from hybridc.errors import UsageError
from hybridc.json_values import JsonValueError, count, each, mapping, member, number, optional, text

FILE = "checkpoint.npz"
_FORMAT = "hybridc-checkpoint-1"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation on held-out examples said."""

    step: int
    """Steps that had been made."""
    loss: float
    accuracy: float | None
    """None where outputs are not classes."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a run is. Examples of an epoch are in an order that follows from seed and epoch alone."""

    seed: int
    epoch: int = 0
    """Epochs that are complete."""
    position: int = 0
    """Steps of the present epoch that are done."""
    losses: tuple[float, ...] = ()
    """Of every step so far."""
    evaluations: tuple[Evaluated, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """States and progress of a run."""

    model: Mapping[str, np.ndarray]
    optimizer: Mapping[str, np.ndarray]
    progress: TrainingProgress
    identity: Mapping[str, object] = field(default_factory=dict)
    """What must be the same when the run goes on: the model, the data's size and so on."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint in `folder`: at any moment, even of a power failure, one is whole.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "format": _FORMAT,
        "model": list(checkpoint.model),
        "optimizer": list(checkpoint.optimizer),
        "progress": asdict(checkpoint.progress),
        "identity": dict(checkpoint.identity),
    }
    # numbered: names of a model may be anything, and those of a zip file may not
    arrays = {f"m{i}": value for i, value in enumerate(checkpoint.model.values())}
    arrays |= {f"o{i}": value for i, value in enumerate(checkpoint.optimizer.values())}
    write_arrays(folder / FILE, header, arrays)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder; None if there is none. Raises UsageError HC578 if it is damaged."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        with open_arrays(path) as stored:
            header = stored.header
            if member(header, "format", text) != _FORMAT:
                raise ValueError(f"format {header['format']!r}")
            return Checkpoint(
                model=_arrays(stored, "m", member(header, "model", each(text))),
                optimizer=_arrays(stored, "o", member(header, "optimizer", each(text))),
                progress=member(header, "progress", _progress),
                identity=member(header, "identity", mapping(lambda value: value)),
            )
    except Exception as error:  # zipfile and numpy tell what they cannot read by a dozen of them
        what = f"the checkpoint cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(
            "HC578", what, where=str(path), remedy="remove it to start from the beginning"
        ) from None


def _arrays(stored: ArrayFile, prefix: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    if len(set(names)) != len(names):
        raise ValueError("a name stands for two states")
    return {name: stored.array(f"{prefix}{i}") for i, name in enumerate(names)}


def _progress(data: Any) -> TrainingProgress:
    return TrainingProgress(
        seed=member(data, "seed", _seed),
        epoch=member(data, "epoch", count),
        position=member(data, "position", count),
        losses=member(data, "losses", each(_loss)),
        evaluations=member(data, "evaluations", each(_evaluated)),
    )


def _evaluated(data: Any) -> Evaluated:
    accuracy = member(data, "accuracy", optional(number))
    return Evaluated(member(data, "step", count), member(data, "loss", _loss), accuracy)


def _loss(value: Any) -> float:
    """A number, which is none in a run that diverged: Python writes and reads NaN and infinity in JSON."""
    return value if isinstance(value, float) and not math.isfinite(value) else float(number(value))


def _seed(value: Any) -> int:
    """Of any size."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise JsonValueError(f"{reprlib.repr(value)} is not a seed")
    return value
