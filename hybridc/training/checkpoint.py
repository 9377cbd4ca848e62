"""Checkpoints: everything that a run needs to go on exactly as if it had never stopped, in one file."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hybridc.errors import UsageError

FILE = "checkpoint.npz"
_HEADER = "header"
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
    _remove_abandoned(folder)
    header = {
        "format": _FORMAT,
        "model": list(checkpoint.model),
        "optimizer": list(checkpoint.optimizer),
        "progress": asdict(checkpoint.progress),
        "identity": dict(checkpoint.identity),
    }
    arrays = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    # numbered: names of a model may be anything, and those of a zip file may not
    arrays |= {f"m{i}": value for i, value in enumerate(checkpoint.model.values())}
    arrays |= {f"o{i}": value for i, value in enumerate(checkpoint.optimizer.values())}
    handle, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, folder / FILE)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(folder)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder; None if there is none. Raises UsageError HC578 if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(archive[_HEADER].tobytes())
            if header["format"] != _FORMAT:
                raise ValueError(f"format {header['format']!r}")
            progress = header["progress"]
            evaluations = tuple(Evaluated(**e) for e in progress.pop("evaluations"))
            losses = tuple(map(float, progress.pop("losses")))
            return Checkpoint(
                model={name: archive[f"m{i}"] for i, name in enumerate(header["model"])},
                optimizer={name: archive[f"o{i}"] for i, name in enumerate(header["optimizer"])},
                progress=TrainingProgress(**progress, losses=losses, evaluations=evaluations),
                identity=header["identity"],
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        what = f"the checkpoint cannot be read: {error}"
        raise UsageError(
            "HC578", what, where=str(path), remedy="remove it to start from the beginning"
        ) from None


def _remove_abandoned(folder: Path) -> None:
    """Half-written files of a run that was killed."""
    for path in folder.glob(f".{FILE}-*"):
        with suppress(OSError):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
