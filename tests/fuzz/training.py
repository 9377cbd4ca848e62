"""Damaged training steps and checkpoints: refused, or a run goes on as it would have.

Changed bytes must not change what a file says. Edits with hashes that fit may; then no oracle knows the
losses.

python -m tests.fuzz.training --minutes 20 --seed 1
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from hybridc.json_values import sealed
from hybridc.models.builder import GraphBuilder
from hybridc.options import CompileOptions
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.targets import parse_target
from hybridc.training.artifact import MANIFEST, STATES
from hybridc.training.checkpoint import FILE
from hybridc.training.compile import compile_training
from hybridc.training.data import Dataset
from hybridc.training.loop import TrainingRun, train
from hybridc.training.session import TrainingSession
from tests.fuzz.driver import Harness, Outcome, Verdict, main
from tests.support.file_edits import damaged, edited

BATCH, CLASSES, FEATURES = 4, 3, 5
EPOCHS = 2
STEPS = 3
"""Of an epoch. The checkpoint that is damaged lies between the second and the third."""


@dataclass(frozen=True)
class Files:
    """A training step's files, a checkpoint's bytes, and the losses of a run that goes on from it."""

    step: dict[str, bytes]
    checkpoint: bytes
    losses: tuple[float, ...]


def check(random: Random, folder: Path) -> Verdict:
    """A run is resumed with a damaged file."""
    whole = files()
    step, checkpoint = dict(whole.step), whole.checkpoint
    kind = random.random()
    is_edited = kind < 0.6
    if kind < 0.35:
        step[MANIFEST] = _text(edited(json.loads(step[MANIFEST]), random))
    elif kind < 0.6:
        checkpoint = _edited_checkpoint(whole.checkpoint, random, folder)
    elif kind < 0.75:
        checkpoint = damaged(checkpoint, random)
    else:
        name = random.choice((MANIFEST, STATES, *(name for name, data in step.items() if data)))
        step[name] = damaged(step[name], random)
    path, saved = folder / "step.hyb", folder / "saved"
    for name, data in step.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    saved.mkdir()
    (saved / FILE).write_bytes(checkpoint)
    losses = _resumed(path, saved)
    same = np.array_equal(losses, whole.losses, equal_nan=True)
    if same or is_edited:
        return Verdict(Outcome.RIGHT if same else Outcome.ACCEPTED)
    return Verdict(Outcome.WRONG, f"losses {losses} instead of {whole.losses}")


@cache
def files() -> Files:
    """Compiled once in a process."""
    with tempfile.TemporaryDirectory(prefix="hybridc-fuzz-") as name:
        folder = Path(name)
        spec = TrainingSpec(
            parse_loss("softmax_cross_entropy"), parse_optimizer("adam:lr=0.01"), BATCH, 1, ()
        )
        options = CompileOptions(target=parse_target("avx2"))
        compile_training(network(), folder / "step.hyb", options, spec)
        with TrainingSession(folder / "step.hyb", threads=1) as session:
            stops = iter([False, True])
            run = TrainingRun(1, checkpoint=folder / "saved", stop=lambda: next(stops, True))
            train(session, examples(), run)
        files = [file for file in (folder / "step.hyb").rglob("*") if file.is_file()]
        step = {str(file.relative_to(folder / "step.hyb")): file.read_bytes() for file in files}
        checkpoint = (folder / "saved" / FILE).read_bytes()
        return Files(step, checkpoint, _resumed(folder / "step.hyb", folder / "saved"))


def network() -> Any:
    """One hidden layer with BatchNorm: parameters, statistics, and Adam's moments."""
    g = GraphBuilder("small", 3)
    return g.model(y=g.gemm(g.relu(g.batch_norm(g.gemm(g.input("x", ("N", FEATURES)), 4))), CLASSES))


def examples() -> Dataset:
    random, count = np.random.default_rng(0), STEPS * BATCH
    x = random.standard_normal((count, FEATURES)).astype(np.float32)
    return Dataset({"x": x}, {"target": random.integers(0, CLASSES, count)})


def _resumed(path: Path, saved: Path) -> tuple[float, ...]:
    with TrainingSession(path, threads=1) as session:
        return train(session, examples(), TrainingRun(EPOCHS, checkpoint=saved, resume=True)).losses


def _text(data: Any) -> bytes:
    return json.dumps(sealed(data) if isinstance(data, dict) else data).encode()


def _edited_checkpoint(whole: bytes, random: Random, folder: Path) -> bytes:
    """With another header, or other arrays, and sums that fit."""
    path = folder / "edited.npz"
    path.write_bytes(whole)
    with np.load(path) as archive:
        arrays = dict(archive)
    if random.random() < 0.6:
        header = edited(json.loads(arrays["header"].tobytes()), random)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    else:
        name = random.choice([name for name in arrays if name != "header"])
        arrays[name] = _other_array(arrays[name], random)
    np.savez(path, allow_pickle=False, **arrays)
    return path.read_bytes()


def _other_array(array: np.ndarray, random: Random) -> np.ndarray:
    changed = np.array(array)
    kind = random.randrange(6)
    if kind == 0:
        return changed.astype(random.choice(("float64", "float16", "int32", "complex64", ">f4", "S4")))
    if kind == 1:
        return changed[..., None]
    if kind == 2:
        return changed.reshape(-1)[: random.randrange(changed.size + 1)]
    if kind == 3:
        return np.asfortranarray(changed)
    value = random.choice((math.nan, math.inf, 1e38, 0.0, -1.0))
    if changed.dtype.kind in "iu":
        value = random.choice((-1, 0, 2**31, 2**62))
    changed.reshape(-1)[random.randrange(changed.size)] = value
    return changed


HARNESS = Harness("training", check, seconds=60)

if __name__ == "__main__":
    raise SystemExit(main(HARNESS))
