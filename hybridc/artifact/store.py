"""Write a model.hyb/ folder: complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridc.artifact.graphs import plans_to_json
from hybridc.artifact.load import installed_versions
from hybridc.artifact.manifest import (
    CUDA_SOURCE,
    FORMAT,
    LIBRARY,
    MANIFEST,
    PLAN,
    WEIGHT_ALIGNMENT_BYTES,
    WEIGHTS,
    Manifest,
    Port,
    Source,
    StoredFile,
    StoredPlan,
    StoredWeight,
    manifest_to_json,
)
from hybridc.errors import InternalError, UsageError
from hybridc.ir import Graph, Plan
from hybridc.scratch import scratch_folder
from hybridc.targets import Target

if TYPE_CHECKING:
    from hybridc.machine import Machine
    from hybridc.passes.lower.bind import WeightLayout
    from hybridc.passes.lower.lower import LoweredPlan
    from hybridc.passes.planner.model.pins import Pins
    from hybridc.schedules.packing import Packing


_WORKING_FOLDER = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into an artifact, apart from the weights' bytes and the library."""

    graphs: tuple[Graph, ...]
    """What each plan is of."""
    plans: tuple[Plan, ...]
    """One for each budget, smallest first."""
    pins: tuple[Pins, ...]
    """What each plan keeps to."""
    lowered: tuple[LoweredPlan, ...]
    """For each plan."""
    target: Target
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    source: Source
    machine: Machine
    host_memory_bytes: int | None = None
    cuda_source: str | None = None
    cuda_image_key: str | None = None
    threads: int | None = None


def store(path: str | Path, weights: Mapping[str, np.ndarray], build: Callable[[Path], Contents]) -> Manifest:
    """Write an artifact to `path`, replacing an older one there.

    `weights` holds the arrays of the graphs' weights as the model has them. `build(folder)` is called with
    the folder that becomes the artifact, puts the library there, and tells the rest.

    Raises UsageError HC561 if `path` is something else than an artifact, HC562 if it cannot be written.
    In both cases, and whenever `build` fails, `path` is left as it was.
    """
    destination = Path(path)
    check_destination(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{destination.name}-", destination.parent) as scratch:
            manifest = _fill(scratch, build(scratch), weights)
            scratch.chmod(0o755)
            put_in_place(scratch, destination)
    except OSError as error:
        raise cannot_write(destination, error) from None
    return manifest


def cannot_write(destination: Path, error: OSError) -> UsageError:
    what = f"the artifact cannot be written: {error.strerror or error}"
    no_space = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = "free space there and for temporary files, or " * no_space
    return UsageError("HC562", what, where=str(destination), remedy=f"{free}choose another location")


def check_destination(destination: Path) -> None:
    """Raise UsageError HC561 if something else than an artifact or an empty folder is there, HC562 if no
    folder can be made there."""
    if destination.name in ("", ".."):
        what = "the output path has no file name"
        raise UsageError("HC561", what, where=str(destination), remedy="choose a name for the artifact")
    try:
        _try_place(destination.absolute().parent)
        if not destination.exists() and not destination.is_symlink():
            return
    except OSError as error:
        raise cannot_write(destination, error) from None
    try:
        data = json.loads((destination / MANIFEST).read_bytes())
        is_artifact = isinstance(data, dict) and data.get("format") == FORMAT
    except (OSError, ValueError, RecursionError):
        is_artifact = destination.is_dir() and not any(destination.iterdir())
    if destination.is_symlink() or not is_artifact:
        what = "the output exists and is not a compiled artifact"
        raise UsageError("HC561", what, where=str(destination), remedy="choose another name, or remove it")


def _try_place(folder: Path) -> None:
    """Raise OSError unless a folder can be made in `folder`, which need not be there yet."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    with scratch_folder(".hybridc-", existing):
        pass


def put_in_place(scratch: Path, destination: Path) -> None:
    """Rename into place. `scratch` may be the old artifact afterwards."""
    try:
        os.rename(scratch, destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(scratch, destination):
            _replace(scratch, destination)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step: who opens the artifact meanwhile finds the old or the new.

    Some file systems, such as NFS, cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    return bool(libc.renameat2(_WORKING_FOLDER, names[0], _WORKING_FOLDER, names[1], _RENAME_EXCHANGE) == 0)


def _replace(scratch: Path, destination: Path) -> None:
    """In two steps: the old artifact is moved aside, and back if the second step fails."""
    aside = scratch.with_name(f"{scratch.name}-old")
    os.rename(destination, aside)
    try:
        os.rename(scratch, destination)
    except BaseException:
        os.rename(aside, destination)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fill(folder: Path, contents: Contents, weights: Mapping[str, np.ndarray]) -> Manifest:
    """Write every file but the library, the manifest last."""
    _write_json(folder / PLAN, plans_to_json(contents.graphs, contents.plans))
    names = [PLAN, LIBRARY, WEIGHTS]
    if contents.cuda_source is not None:
        (folder / CUDA_SOURCE).write_text(contents.cuda_source)
        names.append(CUDA_SOURCE)
    offsets = _write_weights(folder / WEIGHTS, map(_layouts, contents.lowered), weights)
    manifest = Manifest(
        versions=installed_versions(),
        target=str(contents.target),
        cpu_flags=contents.target.isa.cpu_flags,
        cuda_architectures=contents.target.cuda_architectures,
        threads=contents.threads,
        inputs=contents.inputs,
        outputs=contents.outputs,
        source=contents.source,
        machine=contents.machine,
        host_memory_bytes=contents.host_memory_bytes,
        plans=tuple(
            _stored_plan(lowered, offsets, pins)
            for lowered, pins in zip(contents.lowered, contents.pins, strict=True)
        ),
        cuda_image_key=contents.cuda_image_key,
        files=tuple(_describe(folder / name) for name in sorted(names)),
    )
    _write_json(folder / MANIFEST, manifest_to_json(manifest))
    return manifest


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def _describe(path: Path) -> StoredFile:
    with path.open("rb") as stream:
        return StoredFile(path.name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


Offsets = dict[tuple[str, "Packing | None"], int]


def _stored_plan(lowered: LoweredPlan, offsets: Offsets, pins: Pins) -> StoredPlan:
    return StoredPlan(
        event_count=lowered.event_count,
        host_weights=tuple(_stored(layout, offsets) for layout in lowered.host_weights),
        streamed_weights=tuple(_stored(layout, offsets) for layout in lowered.streamed_weights),
        gpu_weights=tuple(_stored(r.layout, offsets, r.offset_bytes) for r in lowered.resident_weights),
        pins=dict(pins),
    )


def _layouts(lowered: LoweredPlan) -> list[WeightLayout]:
    resident = (r.layout for r in lowered.resident_weights)
    return [*lowered.host_weights, *lowered.streamed_weights, *resident]


def _stored(layout: WeightLayout, offsets: Offsets, arena_offset_bytes: int | None = None) -> StoredWeight:
    return StoredWeight(
        tensor=layout.tensor,
        dtype=layout.dtype,
        shape=layout.shape,
        offset_bytes=offsets[layout.tensor, layout.packing],
        size_bytes=layout.size_bytes,
        packed=layout.packing is not None,
        arena_offset_bytes=arena_offset_bytes,
    )


def _write_weights(
    path: Path, layouts: Iterable[Iterable[WeightLayout]], weights: Mapping[str, np.ndarray]
) -> Offsets:
    """Write each weight once for each packing, whatever plans it is for; its shape does not matter."""
    offsets: Offsets = {}
    with path.open("wb") as stream:
        for layout in chain.from_iterable(layouts):
            key = layout.tensor, layout.packing
            if key in offsets:
                continue
            stream.write(bytes(-stream.tell() % WEIGHT_ALIGNMENT_BYTES))
            offsets[key] = stream.tell()
            stream.write(_packed(layout, weights[layout.tensor]).reshape(-1).view(np.uint8).data)
    return offsets


def _packed(layout: WeightLayout, array: np.ndarray) -> np.ndarray:
    packed = np.ascontiguousarray(array) if layout.packing is None else layout.packing.apply(array)
    if packed.dtype.name != layout.dtype or packed.nbytes != layout.size_bytes:
        wanted, found = f"{layout.dtype}{list(layout.shape)}", f"{packed.dtype}{list(packed.shape)}"
        what = f"a kernel expects {wanted}, the weight is {found}"
        raise InternalError("HC913", what, where=layout.tensor)
    return packed
