"""Write a model.hyb/ folder: complete or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridc.artifact.graphs import plans_to_json
from hybridc.artifact.load import installed_versions
from hybridc.artifact.manifest import (
    CUDA_SOURCE,
    FORMAT,
    LARGEST_JSON_BYTES,
    LIBRARY,
    MANIFEST,
    PLAN,
    WEIGHT_ALIGNMENT_BYTES,
    WEIGHTS,
    InstructionSet,
    Interface,
    Manifest,
    OpenDimension,
    Port,
    Source,
    StoredFile,
    StoredFunction,
    StoredPlan,
    StoredWeight,
    manifest_to_json,
)
from hybridc.errors import InternalError, UsageError
from hybridc.files import read_file
from hybridc.ir import Graph, Plan
from hybridc.ir.bind import Binding, Weight
from hybridc.json_values import JsonValueError, parse
from hybridc.scratch import scratch_folder
from hybridc.targets import Target

if TYPE_CHECKING:
    from hybridc.machine import Machine
    from hybridc.passes.lower.lower import Lowered
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
    lowered: Lowered
    """What the plans run."""
    target: Target
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    source: Source
    machine: Machine
    host_memory_bytes: int | None = None
    cuda_source: str | None = None
    cuda_image_key: str | None = None
    cuda_image_bytes: int | None = None
    threads: int | None = None
    counts: tuple[Port, ...] = ()
    dimensions: tuple[OpenDimension, ...] = ()
    buckets: tuple[Interface, ...] = ()
    """If there are open dimensions; plans are listed by the target's instruction sets, then by buckets, as
    many for each."""


Weights = Mapping[str, np.ndarray]
"""By the names of tensors."""


def store(
    path: str | Path, weights: Weights | Sequence[Weights], build: Callable[[Path], Contents]
) -> Manifest:
    """Write an artifact to `path`, replacing an older one there.

    `weights` holds the arrays of the graphs' weights as the model has them, if there are buckets of sizes or
    several instruction sets for each of them; those that are the same array are stored once. `build(folder)`
    is called with the folder that becomes the artifact, puts the library there, and tells the rest.

    Raises UsageError HC561 if `path` is something else than an artifact, HC562 if it cannot be written.
    In both cases, and whenever `build` fails, `path` is left as it was.
    """
    destination = Path(path)
    check_destination(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{destination.name}-", destination.parent) as scratch:
            of_networks = (weights,) if isinstance(weights, Mapping) else tuple(weights)
            manifest = _fill(scratch, build(scratch), of_networks)
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
        data = parse(read_file(destination / MANIFEST, LARGEST_JSON_BYTES))
        is_artifact = isinstance(data, dict) and data.get("format") == FORMAT
    except (OSError, JsonValueError):
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


def _fill(folder: Path, contents: Contents, weights: tuple[Weights, ...]) -> Manifest:
    """Write every file but the library, the manifest last."""
    of_each, bucket_count = len(contents.plans) // len(weights), len(contents.buckets) or 1
    networks = [number // of_each for number in range(len(contents.plans))]
    places = [divmod(network, bucket_count) for network in networks]
    _write_json(folder / PLAN, plans_to_json(contents.graphs, contents.plans))
    names = [PLAN, LIBRARY, WEIGHTS]
    if contents.cuda_source is not None:
        (folder / CUDA_SOURCE).write_text(contents.cuda_source)
        names.append(CUDA_SOURCE)
    offsets = _write_weights(folder / WEIGHTS, contents.lowered, [weights[network] for network in networks])
    manifest = Manifest(
        versions=installed_versions(),
        target=str(contents.target),
        instruction_sets=tuple(
            InstructionSet(target.isa.name, target.isa.cpu_flags) for target in contents.target.of_each
        ),
        cuda_architectures=contents.target.cuda_architectures,
        threads=contents.threads,
        inputs=contents.inputs,
        outputs=contents.outputs,
        source=contents.source,
        machine=contents.machine,
        host_memory_bytes=contents.host_memory_bytes,
        functions=tuple(
            StoredFunction(name, device, parameters)
            for (name, device), parameters in contents.lowered.signatures.items()
        ),
        plans=tuple(
            _stored_plan(*parts)
            for parts in zip(contents.lowered.plans, offsets, contents.pins, places, strict=True)
        ),
        cuda_image_key=contents.cuda_image_key,
        cuda_image_bytes=contents.cuda_image_bytes,
        files=tuple(_describe(folder / name) for name in sorted(names)),
        counts=contents.counts,
        dimensions=contents.dimensions,
        buckets=contents.buckets,
    )
    _write_json(folder / MANIFEST, manifest_to_json(manifest))
    return manifest


def _write_json(path: Path, data: object) -> None:
    content = (json.dumps(data, indent=1) + "\n").encode()
    if len(content) > LARGEST_JSON_BYTES:
        what = f"{path.name} has {len(content):,} bytes, more than the {LARGEST_JSON_BYTES:,} that are read"
        raise UsageError("HC562", what, remedy="compile for fewer budgets")
    path.write_bytes(content)


def _describe(path: Path) -> StoredFile:
    with path.open("rb") as stream:
        return StoredFile(path.name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


Offsets = dict[tuple[str, int], int]
"""Where the bytes of each weight and layout begin."""


def _stored_plan(binding: Binding, offsets: Offsets, pins: Pins, place: tuple[int, int]) -> StoredPlan:
    instruction_set, bucket = place
    return StoredPlan(
        host_weights=tuple(_stored(weight, offsets) for weight in binding.host_weights),
        streamed_weights=tuple(_stored(weight, offsets) for weight in binding.streamed_weights),
        gpu_weights=tuple(_stored(r.weight, offsets, r.offset_bytes) for r in binding.resident_weights),
        pins=dict(pins),
        bucket=bucket,
        instruction_set=instruction_set,
    )


def _weights(binding: Binding) -> list[Weight]:
    resident = (r.weight for r in binding.resident_weights)
    return [*binding.host_weights, *binding.streamed_weights, *resident]


def _stored(weight: Weight, offsets: Offsets, arena_offset_bytes: int | None = None) -> StoredWeight:
    return StoredWeight(
        tensor=weight.tensor,
        dtype=weight.dtype,
        shape=weight.shape,
        offset_bytes=offsets[weight.tensor, weight.layout],
        size_bytes=weight.size_bytes,
        layout=weight.layout,
        arena_offset_bytes=arena_offset_bytes,
    )


def _write_weights(path: Path, lowered: Lowered, arrays: Sequence[Weights]) -> list[Offsets]:
    """Write each weight once for each layout, whatever plans it is for; its shape does not matter.

    Plans of buckets may have different arrays of one name.
    """
    found: list[Offsets] = []
    written: dict[tuple[str, int, int], int] = {}
    with path.open("wb") as stream:
        for binding, own in zip(lowered.plans, arrays, strict=True):
            offsets: Offsets = {}
            for weight in _weights(binding):
                key = weight.tensor, weight.layout, id(own[weight.tensor])
                if key not in written:
                    stream.write(bytes(-stream.tell() % WEIGHT_ALIGNMENT_BYTES))
                    written[key] = stream.tell()
                    packed = _packed(weight, lowered.packings[weight.layout], own[weight.tensor])
                    stream.write(packed.reshape(-1).view(np.uint8).data)
                offsets[weight.tensor, weight.layout] = written[key]
            found.append(offsets)
    return found


def _packed(weight: Weight, packing: Packing | None, array: np.ndarray) -> np.ndarray:
    packed = np.ascontiguousarray(array) if packing is None else packing.apply(array)
    if packed.dtype.name != weight.dtype or packed.nbytes != weight.size_bytes:
        wanted, found = f"{weight.dtype}{list(weight.shape)}", f"{packed.dtype}{list(packed.shape)}"
        what = f"a kernel expects {wanted}, the weight is {found}"
        raise InternalError("HC913", what, where=weight.tensor)
    return packed
