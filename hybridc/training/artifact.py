"""STEP.hyb/: ordinary artifacts of the step and the evaluation, and what belongs to training beside them.

training.json   what is trained and how; names of inputs, targets and states; hashes
states.bin      the states' initial values, one behind the other, zeros left out
model/          the user's model, with its external data
step/ evaluate/ ordinary artifacts; and accumulate/ update/ where batches are gone through in parts
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.artifact import Artifact
from hybridc.artifact.manifest import LARGEST_JSON_BYTES, Port
from hybridc.artifact.manifest import TRAINING_MANIFEST as MANIFEST
from hybridc.errors import ArtifactError
from hybridc.files import OpenFile, OpenFolder, read_file
from hybridc.ir.graph import dtype_from_json
from hybridc.json_values import (
    LARGEST_SIZE,
    JsonValueError,
    each,
    hexadecimal,
    is_sealed,
    mapping,
    member,
    optional,
    parse,
    sealed,
    shape,
    size,
    text,
)
from hybridc.passes.training.spec import NEW, TrainingSpec, spec_from_json, spec_to_json
from hybridc.passes.training.splits import SplitParameter, Splits, whole_names

FORMAT, SCHEMA_VERSION = "hybridc-training", 6
STATES, MODEL_FOLDER = "states.bin", "model"
STEP, EVALUATE, ACCUMULATE, UPDATE = "step", "evaluate", "accumulate", "update"
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
    sizes: tuple[str, ...] = ()
    """Inputs that say how many examples there are; none if batches are whole."""
    share: str | None = None
    """The input that is a part's number of examples over the mean of all parts'."""
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By output of the evaluation, axes along which it has an entry for each example, and padding."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Of the folder of each ordinary artifact, the hash of its manifest."""

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

    def __repr__(self) -> str:
        return f"<TrainingArtifact {self.path.name}: {len(self.manifest.states)} states>"

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the ordinary artifacts in it."""
        return program_names(self.manifest.spec)

    @property
    def model(self) -> Path:
        return self.path / MODEL_FOLDER / self.manifest.model

    def initial_values(self) -> dict[str, np.ndarray]:
        """Of all states, as the step has them, writable. Raises ArtifactError HC312 if they were changed."""
        data, values, offset = self._read_states(), {}, 0
        for state in self.manifest.states:
            if state.is_of_model:
                end = offset + state.size_bytes
                flat = np.frombuffer(data[offset:end], state.dtype)
                values[state.name], offset = flat.reshape(state.shape).copy(), end
            else:
                values[state.name] = np.zeros(state.shape, state.dtype)
        return values

    def _read_states(self) -> bytes:
        path, size_bytes = self.path / STATES, _states_bytes(self.manifest)
        try:
            data = read_file(path, size_bytes)
        except OSError:
            raise _changed(path) from None
        if len(data) != size_bytes or hashlib.sha256(data).hexdigest() != self.manifest.states_sha256:
            raise _changed(path)
        return data


def program_names(spec: TrainingSpec) -> tuple[str, ...]:
    """Of the ordinary artifacts of a training step."""
    return (STEP, EVALUATE, ACCUMULATE, UPDATE) if spec.accumulate > 1 else (STEP, EVALUATE)


def write_training(folder: Path, manifest: TrainingManifest) -> None:
    """The manifest, last of all files."""
    data = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        **asdict(manifest),
        "spec": spec_to_json(manifest.spec),
    }
    (folder / MANIFEST).write_text(json.dumps(sealed(data), indent=1) + "\n")


def is_training_artifact(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_training(path: str | Path) -> TrainingArtifact:
    """Read and check.

    Raises ArtifactError: HC310 not a training artifact or of another version, HC311 malformed, HC312 a file
    is missing or damaged.
    """
    try:
        with OpenFolder(Path(path)) as folder:
            return _open(folder)
    except OSError:
        raise _no_artifact(Path(path)) from None


def _open(folder: OpenFolder) -> TrainingArtifact:
    where = folder.path / MANIFEST
    try:
        data = parse(folder.open(MANIFEST).read(LARGEST_JSON_BYTES))
    except (OSError, JsonValueError):
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _no_artifact(folder.path)
    if data.get("schema_version") != SCHEMA_VERSION:
        found = reprlib.repr(data.get("schema_version"))
        what = f"schema {found}, but this hybridc reads {SCHEMA_VERSION}"
        raise ArtifactError("HC310", what, where=str(folder.path), remedy=_AGAIN)
    try:
        if not is_sealed(data):
            raise JsonValueError("its content has changed (the SHA-256 hash differs)")
        manifest = _manifest(data)
    except (ValueError, RecursionError) as error:
        raise _malformed(where, error) from None
    artifact = TrainingArtifact(folder.path, manifest)
    with OpenFolder(folder.path / MODEL_FOLDER) as models:
        _check_file(models, manifest.model, manifest.model_sha256)
    _check_file(folder, STATES, manifest.states_sha256, _states_bytes(manifest))
    return artifact


def check_program(artifact: TrainingArtifact, name: str, program: Artifact) -> None:
    """Whether an ordinary artifact in the folder is the one that was compiled with it, and fits.

    Raises ArtifactError HC312 if another has taken its place, HC311 if training.json does not fit it.
    """
    manifest = artifact.manifest
    if manifest.programs.get(name) != program.sha256:
        raise _changed(program.path)
    given = {state.name: (state.shape, state.dtype) for state in manifest.states}
    own = {*manifest.inputs, *manifest.targets, *manifest.scalars.values(), manifest.seed}
    own |= {*manifest.sizes, manifest.share}
    inputs = {port.name: (port.shape, port.dtype) for port in program.manifest.inputs}
    outputs = {port.name: (port.shape, port.dtype) for port in program.manifest.outputs}
    wrong = [name for name, kind in inputs.items() if name not in own and given.get(name) != kind]
    renewed = {name.removesuffix(NEW): kind for name, kind in outputs.items() if name.endswith(NEW)}
    wrong += [name for name, kind in renewed.items() if given.get(name) != kind]
    loss_shape, loss_dtype = outputs.get(manifest.loss, ((0,), ""))
    if name == UPDATE:
        wrong += [name for name in inputs if name in (*manifest.inputs, *manifest.targets)]
    elif math.prod(loss_shape) != 1 or loss_dtype != "float32":
        wrong.append(manifest.loss)
    if name == STEP:
        fresh = [state.name for state in manifest.states if not state.is_of_model]
        wrong += [name for name in (*manifest.inputs, *manifest.targets, *fresh) if name not in inputs]
    if wrong:
        error = ValueError(f"{wrong[0]!r} is not what {program.path.name} reads or writes")
        raise _malformed(artifact.path / MANIFEST, error)


def hash_of(path: Path) -> str:
    """Of a file's bytes. Raises OSError."""
    return OpenFile(path).sha256()


def _no_artifact(folder: Path) -> ArtifactError:
    what = "this is not a compiled training step" if folder.exists() else "the artifact does not exist"
    remedy = "compile one: hybridc compile MODEL.onnx --train -o STEP.hyb"
    return ArtifactError("HC310", what, where=str(folder), remedy=remedy)


def _malformed(where: Path, error: Exception) -> ArtifactError:
    return ArtifactError("HC311", f"malformed: {error}", where=str(where), remedy=_AGAIN)


def _changed(path: Path) -> ArtifactError:
    what = "missing, or its content has changed"
    return ArtifactError("HC312", what, where=str(path), remedy=f"copy the artifact again, or {_AGAIN}")


def _check_file(folder: OpenFolder, name: str, sha256: str, size_bytes: int | None = None) -> None:
    try:
        file = folder.open(name)
        is_whole = size_bytes in (None, file.size_bytes) and file.sha256() == sha256
    except OSError:
        is_whole = False
    if not is_whole:
        raise _changed(folder.path / name)


def _states_bytes(manifest: TrainingManifest) -> int:
    """Of states.bin."""
    return sum(state.size_bytes for state in manifest.states if state.is_of_model)


def _manifest(data: Any) -> TrainingManifest:
    manifest = TrainingManifest(
        spec=member(data, "spec", spec_from_json),
        model=member(data, "model", _file_name),
        model_sha256=member(data, "model_sha256", hexadecimal(64)),
        states_sha256=member(data, "states_sha256", hexadecimal(64)),
        inputs=member(data, "inputs", each(text)),
        targets=member(data, "targets", each(text)),
        loss=member(data, "loss", text),
        scalars=member(data, "scalars", mapping(text)),
        seed=member(data, "seed", optional(text)),
        states=member(data, "states", each(_state)),
        splits=member(data, "splits", mapping(_split)),
        sizes=member(data, "sizes", each(text)),
        share=member(data, "share", optional(text)),
        cuts=member(data, "cuts", mapping(each(size))),
        programs=member(data, "programs", mapping(hexadecimal(64))),
    )
    if bool(manifest.sizes) != manifest.spec.has_padding or (manifest.share is None) == (
        manifest.spec.is_partial and manifest.spec.accumulate > 1
    ):
        raise JsonValueError("does not fit a batch that is always whole, or one that is not", "sizes")
    states = {state.name: state for state in manifest.states}
    if len(states) != len(manifest.states) or _states_bytes(manifest) > LARGEST_SIZE:
        raise JsonValueError("a name stands for two states, or they are larger than any memory", "states")
    if not manifest.spec.scalar_values(0.0, 1).keys() <= manifest.scalars.keys():
        raise JsonValueError("lacks a value that the optimizer needs", "scalars")
    for name, split in manifest.splits.items():
        parts = [states[part] for part in split.parts if part in states]
        if len(parts) != len(split.parts) or not _are_parts(parts, split):
            raise JsonValueError("has parts that are not states, or do not fit together", f"splits.{name}")
    return manifest


def _are_parts(parts: list[StoredState], split: SplitParameter) -> bool:
    """Whether the states are those that an array of their sum along the axis is cut into."""
    axis, begins = split.axis, (0, *split.ends)
    others = {(p.kind, p.dtype, p.shape[:axis], p.shape[axis + 1 :]) for p in parts if axis < len(p.shape)}
    return len(others) == 1 and all(
        axis < len(part.shape) and part.shape[axis] == end - begin
        for part, begin, end in zip(parts, begins, split.ends, strict=False)
    )


def _file_name(value: Any) -> str:
    name = text(value)
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise JsonValueError(f"{reprlib.repr(name)} is not a file name")
    return name


def _state(data: Any) -> StoredState:
    name, kind = member(data, "name", text), member(data, "kind", text)
    if kind not in KINDS:
        raise JsonValueError(f"{kind!r} is not a kind of state", "kind")
    dtype = member(data, "dtype", lambda value: np.dtype(dtype_from_json(value)).name)
    return StoredState(name, kind, member(data, "shape", shape), dtype)


def _split(data: Any) -> SplitParameter:
    parts, ends = member(data, "parts", each(text)), member(data, "ends", each(size))
    if not 0 < len(parts) == len(ends):
        raise JsonValueError(f"{len(parts)} parts have {len(ends)} ends")
    return SplitParameter(member(data, "axis", size), parts, ends)


def named(ports: tuple[Port, ...], names: tuple[str, ...]) -> tuple[Port, ...]:
    """The ports of these names, in their order."""
    of_name = {port.name: port for port in ports}
    return tuple(of_name[name] for name in names)
