"""STEP.hyb/: ordinary artifacts of the step and the evaluation, and what belongs to training beside them.

training.json   what is trained and how; names of inputs, targets and states; hashes
states.bin      the states' initial values, one behind the other, zeros left out
model/          the user's model, with its external data
step/ evaluate/ ordinary artifacts; and accumulate/ where batches are gone through in parts
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.artifact.manifest import TRAINING_MANIFEST as MANIFEST
from hybridc.artifact.manifest import Port
from hybridc.errors import ArtifactError
from hybridc.json_values import JsonValueError, count, each, mapping, member, optional, text
from hybridc.passes.training.spec import TrainingSpec, spec_from_json, spec_to_json
from hybridc.passes.training.splits import SplitParameter, Splits, whole_names

FORMAT, SCHEMA_VERSION = "hybridc-training", 2
STATES, MODEL_FOLDER = "states.bin", "model"
STEP, EVALUATE, ACCUMULATE = "step", "evaluate", "accumulate"
KINDS = ("parameter", "statistic", "moment", "sum")
_AGAIN = "compile the model again with --train"


@dataclass(frozen=True, slots=True)
class StoredState:
    """A tensor that lives from step to step."""

    name: str
    kind: str
    """One of `KINDS`: moments and sums are zero at first, the others have values in states.bin."""
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_of_model(self) -> bool:
        """Whether the user's model has it."""
        return self.kind in ("parameter", "statistic")


@dataclass(frozen=True, slots=True)
class TrainingManifest:
    """training.json."""

    spec: TrainingSpec
    model: str
    """Name of the file in `model/`."""
    model_sha256: str
    """Of that file."""
    states_sha256: str
    inputs: tuple[str, ...]
    """The model's own."""
    targets: tuple[str, ...]
    loss: str
    """The output that is the loss."""
    scalars: Mapping[str, str]
    """Inputs of the step by the optimizer's names for them."""
    seed: str | None
    """The input that dropout draws from."""
    states: tuple[StoredState, ...]
    """As the step has them."""
    splits: Splits = field(default_factory=dict)
    """States that are parts of one that the user has."""

    @property
    def whole_states(self) -> tuple[StoredState, ...]:
        """As the user has them, without sums of gradients."""
        wholes, found = whole_names(self.splits), {}
        for state in self.states:
            name = wholes.get(state.name, state.name)
            if state.kind != "sum" and name not in found:
                found[name] = replace(state, name=name, shape=self._whole_shape(name, state.shape))
        return tuple(found.values())

    def _whole_shape(self, name: str, part: tuple[int, ...]) -> tuple[int, ...]:
        split = self.splits.get(name)
        return part if split is None else (*part[: split.axis], split.ends[-1], *part[split.axis + 1 :])


@dataclass(frozen=True, slots=True)
class TrainingArtifact:
    """A checked training artifact on disk; the ordinary ones in it are checked when they are opened."""

    path: Path
    manifest: TrainingManifest

    @property
    def model(self) -> Path:
        return self.path / MODEL_FOLDER / self.manifest.model

    def initial_values(self) -> dict[str, np.ndarray]:
        """Of all states, as the step has them, writable."""
        data, values, offset = (self.path / STATES).read_bytes(), {}, 0
        for state in self.manifest.states:
            if state.is_of_model:
                end = offset + state.size_bytes
                flat = np.frombuffer(data[offset:end], state.dtype)
                values[state.name], offset = flat.reshape(state.shape).copy(), end
            else:
                values[state.name] = np.zeros(state.shape, state.dtype)
        return values


def write_training(folder: Path, manifest: TrainingManifest) -> None:
    """The manifest, last of all files."""
    data = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **asdict(manifest),
        "spec": spec_to_json(manifest.spec),
    }
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n")


def is_training_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_training(path: str | Path) -> TrainingArtifact:
    """Read and check.

    Raises ArtifactError: HC310 not a training artifact or of another version, HC311 malformed, HC312 a file
    is missing or damaged.
    """
    folder = Path(path)
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        what = "this is not a compiled training step" if folder.exists() else "the artifact does not exist"
        remedy = "compile one: hybridc compile MODEL.onnx --train -o STEP.hyb"
        raise ArtifactError("HC310", what, where=str(folder), remedy=remedy)
    if data.get("schema_version") != SCHEMA_VERSION:
        what = f"schema {data.get('schema_version')!r}, but this hybridc reads {SCHEMA_VERSION}"
        raise ArtifactError("HC310", what, where=str(folder), remedy=_AGAIN)
    try:
        manifest = _manifest(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"malformed: {type(error).__name__}: {error}"
        raise ArtifactError("HC311", what, where=str(folder / MANIFEST), remedy=_AGAIN) from None
    artifact = TrainingArtifact(folder, manifest)
    _check_hash(artifact.model, manifest.model_sha256)
    _check_hash(folder / STATES, manifest.states_sha256)
    return artifact


def hash_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_hash(path: Path, expected: str) -> None:
    try:
        is_whole = not path.is_symlink() and hash_of(path) == expected
    except OSError:
        is_whole = False
    if not is_whole:
        what = "missing, or its content has changed"
        raise ArtifactError("HC312", what, where=str(path), remedy=f"copy the artifact again, or {_AGAIN}")


def _manifest(data: Any) -> TrainingManifest:
    manifest = TrainingManifest(
        spec=member(data, "spec", spec_from_json),
        model=member(data, "model", text),
        model_sha256=member(data, "model_sha256", text),
        states_sha256=member(data, "states_sha256", text),
        inputs=member(data, "inputs", each(text)),
        targets=member(data, "targets", each(text)),
        loss=member(data, "loss", text),
        scalars=member(data, "scalars", mapping(text)),
        seed=member(data, "seed", optional(text)),
        states=member(data, "states", each(_state)),
        splits=member(data, "splits", mapping(_split)),
    )
    names = {state.name for state in manifest.states}
    if not names.issuperset(whole_names(manifest.splits)):
        raise ValueError("a split state has parts that are not states")
    if Path(manifest.model).name != manifest.model:
        raise ValueError(f"{manifest.model!r} is not a file name")
    return manifest


def _state(data: Any) -> StoredState:
    name, kind = member(data, "name", text), member(data, "kind", text)
    if kind not in KINDS:
        raise JsonValueError(f"{kind!r} is not a kind of state", "kind")
    dtype = member(data, "dtype", lambda value: np.dtype(text(value)).name)
    return StoredState(name, kind, member(data, "shape", each(count)), dtype)


def _split(data: Any) -> SplitParameter:
    parts, ends = member(data, "parts", each(text)), member(data, "ends", each(count))
    if not 0 < len(parts) == len(ends):
        raise JsonValueError(f"{len(parts)} parts have {len(ends)} ends")
    return SplitParameter(member(data, "axis", count), parts, ends)


def named(ports: tuple[Port, ...], names: tuple[str, ...]) -> tuple[Port, ...]:
    """The ports of these names, in their order."""
    of_name = {port.name: port for port in ports}
    return tuple(of_name[name] for name in names)
