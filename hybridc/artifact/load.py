"""Open a model.hyb/ folder: nothing in it is believed before it is checked. No TVM inside."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridc.artifact.manifest import (
    CUDA_SOURCE,
    FORMAT,
    LIBRARY,
    MANIFEST,
    PLAN,
    SCHEMA_VERSION,
    WEIGHT_ALIGNMENT_BYTES,
    WEIGHTS,
    Manifest,
    StoredFile,
    StoredWeight,
    Versions,
    manifest_from_json,
)
from hybridc.errors import ArtifactError, DeviceError
from hybridc.ir import BufferKind, Device, Graph, Plan, Role
from hybridc.ir.graph import dtype_bits, graph_from_json
from hybridc.ir.plan import plan_from_json
from hybridc.targets import cpu_flags

_AGAIN = "compile the model again"
_FILES = frozenset({PLAN, LIBRARY, CUDA_SOURCE, WEIGHTS})


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact on disk."""

    path: Path
    manifest: Manifest
    graph: Graph
    plan: Plan

    @property
    def library(self) -> Path:
        return self.path / LIBRARY

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def needs_gpu(self) -> bool:
        return self.plan.arena_bytes(Device.GPU) > 0

    def cuda_source(self) -> str | None:
        """CUDA C++ of the GPU's kernels, if there are any."""
        path = self.path / CUDA_SOURCE
        return path.read_text() if any(f.name == CUDA_SOURCE for f in self.manifest.files) else None


def open_artifact(path: str | Path, *, check_weights: bool = True, check_host: bool = True) -> Artifact:
    """Read and check an artifact.

    `check_weights=False` skips the hash of weights.bin, whose size is checked all the same.
    `check_host=False` lets it be inspected where it cannot run.

    Raises ArtifactError: HC301 not an artifact, HC302 of another version, HC303 malformed, HC304 a file is
    missing or damaged, HC305 a file name that leaves the folder; DeviceError HC401 if this processor lacks
    the instruction set it was compiled for.
    """
    folder = Path(path)
    data = _read_json(folder, MANIFEST)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError("HC301", "this is not a compiled artifact", where=str(folder), remedy=_AGAIN)
    _check_schema(data, folder)
    try:
        manifest = manifest_from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(folder / MANIFEST, error) from None
    _check_names(folder, manifest)
    if check_host:
        _check_versions(folder, manifest.versions)
        _check_processor(folder, manifest)
    for file in manifest.files:
        _check_file(folder, file, check_hash=check_weights or file.name != WEIGHTS)
    _check_weight_tables(folder, manifest)
    graph, plan = _read_plan(folder)
    artifact = Artifact(folder, manifest, graph, plan)
    _check_agreement(artifact)
    return artifact


def installed_versions() -> Versions:
    """Versions of what is installed here."""
    names = ("hybridc", "apache-tvm", "apache-tvm-ffi")
    return Versions(*(importlib.metadata.version(name) for name in names))


def _malformed(where: Path, error: Exception) -> ArtifactError:
    what = f"malformed: {type(error).__name__}: {error}"
    return ArtifactError("HC303", what, where=str(where), remedy=_AGAIN)


def _damaged(where: Path, what: str) -> ArtifactError:
    return ArtifactError("HC304", what, where=str(where), remedy=f"copy the artifact again, or {_AGAIN}")


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "there is no such artifact" if not folder.exists() else f"no artifact: it has no {name}"
        raise ArtifactError("HC301", what, where=str(folder), remedy="compile a model first") from None
    except OSError as error:
        raise _damaged(folder / name, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(folder / name, error) from None


def _check_schema(data: dict[str, Any], folder: Path) -> None:
    if data.get("schema_version") != SCHEMA_VERSION:
        what = f"artifact schema {data.get('schema_version')!r}, but this hybridc reads {SCHEMA_VERSION}"
        raise ArtifactError("HC302", what, where=str(folder), remedy=_AGAIN)


def _check_names(folder: Path, manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    for name in names:
        if name not in _FILES:
            raise ArtifactError(
                "HC305", f"unexpected file name {name!r}", where=str(folder / MANIFEST), remedy=_AGAIN
            )
        if (folder / name).is_symlink():
            raise ArtifactError("HC305", "a file of an artifact must not be a link", where=str(folder / name))
    if len(set(names)) != len(names) or not {PLAN, LIBRARY, WEIGHTS} <= set(names):
        raise _malformed(folder / MANIFEST, ValueError(f"the files are {', '.join(names) or 'none'}"))


def _check_versions(folder: Path, written_by: Versions) -> None:
    here = installed_versions()
    for package, wanted, found in (
        ("apache-tvm", written_by.tvm, here.tvm),
        ("apache-tvm-ffi", written_by.tvm_ffi, here.tvm_ffi),
    ):
        if wanted != found:
            what = f"compiled with {package} {wanted}, but {found} is installed"
            remedy = f"pip install {package}=={wanted}, or {_AGAIN}"
            raise ArtifactError("HC302", what, where=str(folder), remedy=remedy)


def _check_processor(folder: Path, manifest: Manifest) -> None:
    present = cpu_flags()
    missing = [flag for flag in manifest.cpu_flags if flag not in present]
    if missing:
        what = f"this processor lacks {', '.join(missing)}, which target {manifest.target} needs"
        remedy = "compile for --target avx2, or for native on this machine"
        raise DeviceError("HC401", what, where=str(folder), remedy=remedy)


def _check_file(folder: Path, file: StoredFile, *, check_hash: bool) -> None:
    path = folder / file.name
    try:
        found = path.stat().st_size
        if found != file.size_bytes:
            raise _damaged(path, f"has {found:,} bytes, but {file.size_bytes:,} were written")
        if not check_hash:
            return
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from None
    if digest != file.sha256:
        raise _damaged(path, "its bytes are not those that were written (SHA-256 differs)")


def _check_weight_tables(folder: Path, manifest: Manifest) -> None:
    file_bytes = next(f.size_bytes for f in manifest.files if f.name == WEIGHTS)

    def check(weight: StoredWeight) -> None:
        if weight.size_bytes * 8 != math.prod(weight.shape) * dtype_bits(weight.dtype):
            raise ValueError(f"weight {weight.tensor!r} has not the bytes of its shape")
        end = weight.offset_bytes + weight.size_bytes
        if weight.offset_bytes % WEIGHT_ALIGNMENT_BYTES or end > file_bytes:
            raise ValueError(f"weight {weight.tensor!r} lies outside {WEIGHTS} or is not aligned")

    try:
        for weight in (*manifest.host_weights, *manifest.gpu_weights):
            check(weight)
    except ValueError as error:
        raise _malformed(folder / MANIFEST, error) from None


def _read_plan(folder: Path) -> tuple[Graph, Plan]:
    data = _read_json(folder, PLAN)
    try:
        return graph_from_json(data["graph"]), plan_from_json(data["plan"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(folder / PLAN, error) from None


def _check_agreement(artifact: Artifact) -> None:
    """Manifest and plan name the same inputs, outputs and resident weights."""
    manifest, graph, plan = artifact.manifest, artifact.graph, artifact.plan

    def refuse(what: str) -> ArtifactError:
        return _malformed(artifact.path / MANIFEST, ValueError(what))

    for ports, names in ((manifest.inputs, graph.inputs), (manifest.outputs, graph.outputs)):
        tensors = [graph.tensor.get(port.tensor) for port in ports]
        # a port may see its tensor through a reshape, so only the number of elements must agree
        types = [(math.prod(t.shape), t.dtype) for t in tensors if t is not None]
        expected = [(math.prod(p.shape), p.dtype) for p in ports]
        if tuple(p.tensor for p in ports) != names or types != expected:
            raise refuse("its inputs and outputs are not those of the plan")
    uploads = sorted((w.tensor, w.arena_offset_bytes or 0, w.size_bytes) for w in manifest.gpu_weights)
    resident = [b for b in plan.buffers if b.kind is BufferKind.WEIGHT and b.device is Device.GPU]
    if uploads != sorted((b.tensor, b.offset_bytes, b.size_bytes) for b in resident):
        raise refuse("its GPU weights are not those of the plan")
    plain = {w.tensor for w in manifest.host_weights if not w.packed}
    if any(graph.tensor[n].role is Role.WEIGHT and n not in plain for n in graph.outputs):
        raise refuse("a weight that is an output is missing")
    if any(w.arena_offset_bytes is None for w in manifest.gpu_weights):
        raise refuse("a GPU weight has no place in the arena")
    if manifest.event_count > len(plan.steps):
        raise refuse(f"{manifest.event_count} events for {len(plan.steps)} steps")
