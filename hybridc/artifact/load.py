"""Open a model.hyb/ folder: nothing in it is believed before it is checked. No TVM inside."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridc.artifact.graphs import plans_from_json
from hybridc.artifact.manifest import (
    CUDA_SOURCE,
    FORMAT,
    LIBRARY,
    MANIFEST,
    PLAN,
    SCHEMA_VERSION,
    TRAINING_MANIFEST,
    WEIGHT_ALIGNMENT_BYTES,
    WEIGHTS,
    Manifest,
    StoredFile,
    StoredPlan,
    StoredWeight,
    Versions,
    manifest_from_json,
)
from hybridc.errors import ArtifactError, DeviceError, UsageError
from hybridc.ir import BufferKind, Device, Graph, Plan, Role
from hybridc.ir.graph import dtype_bits
from hybridc.ir.plan import DRIVER_PAGE_BYTES, reserved_bytes
from hybridc.options import format_budget
from hybridc.targets import cpu_flags

_AGAIN = "compile the model again"
_FILES = frozenset({PLAN, LIBRARY, CUDA_SOURCE, WEIGHTS})
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading and comparing values raises that are not what they should be."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact on disk, of whose plans one is chosen."""

    path: Path
    manifest: Manifest
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    plans: tuple[Plan, ...]
    """One for each budget, smallest first."""
    number: int
    """Position of the chosen plan."""

    @property
    def plan(self) -> Plan:
        """The chosen one: at first that of the largest budget."""
        return self.plans[self.number]

    @property
    def graph(self) -> Graph:
        """That of the chosen plan."""
        return self.graphs[self.number]

    @property
    def stored_plan(self) -> StoredPlan:
        """What the library needs for the chosen plan."""
        return self.manifest.plans[self.number]

    @property
    def library(self) -> Path:
        return self.path / LIBRARY

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    @property
    def needs_gpu(self) -> bool:
        """Whether the chosen plan does."""
        return self.plan.arena_bytes(Device.GPU) > 0

    @property
    def has_gpu_code(self) -> bool:
        return any(plan.arena_bytes(Device.GPU) > 0 for plan in self.plans)

    @property
    def budgets(self) -> str:
        """What each plan keeps to, as values for `--gpu-memory`."""
        return ", ".join(format_budget(promised_bytes(plan)) for plan in self.plans)

    def within(self, gpu_memory_bytes: int) -> Artifact:
        """With the plan of the largest budget of at most so many bytes. Raises UsageError HC558."""
        chosen = self._largest(lambda plan: promised_bytes(plan) <= gpu_memory_bytes)
        if chosen is None:
            what = f"no plan of the artifact fits {gpu_memory_bytes:,} bytes of GPU memory"
            remedy = f"its plans are for {self.budgets}; compile with a smaller --gpu-memory"
            raise UsageError("HC558", what, where=str(self.path), remedy=remedy)
        return chosen

    def fitting(self, free_bytes: int, page_bytes: int = DRIVER_PAGE_BYTES) -> Artifact:
        """With the plan of the largest budget whose arena has so many bytes; else with the smallest.

        An arena needs what a driver that reserves pages of `page_bytes` reserves for it.
        """
        chosen = self._largest(
            lambda plan: reserved_bytes(plan.arena_bytes(Device.GPU), page_bytes) <= free_bytes
        )
        return chosen or replace(self, number=0)

    def _largest(self, suits: Callable[[Plan], bool]) -> Artifact | None:
        numbers = [number for number, plan in enumerate(self.plans) if suits(plan)]
        return replace(self, number=numbers[-1]) if numbers else None

    def cuda_source(self) -> str | None:
        """CUDA C++ of the GPU's kernels, if there are any."""
        path = self.path / CUDA_SOURCE
        return path.read_text() if any(f.name == CUDA_SOURCE for f in self.manifest.files) else None


def promised_bytes(plan: Plan) -> int:
    """GPU memory that a run of the plan never exceeds."""
    return plan.arena_bytes(Device.GPU) if plan.budget_bytes is None else plan.budget_bytes


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
    except _MALFORMED as error:
        raise _malformed(folder / MANIFEST, error) from None
    _check_names(folder, manifest)
    if check_host:
        _check_versions(folder, manifest.versions)
        _check_processor(folder, manifest)
    for file in manifest.files:
        _check_file(folder, file, check_hash=check_weights or file.name != WEIGHTS)
    _check_weight_tables(folder, manifest)
    graphs, plans = _read_plans(folder)
    _check_agreement(folder / MANIFEST, manifest, graphs, plans)
    return Artifact(folder, manifest, graphs, plans, len(plans) - 1)


def installed_versions() -> Versions:
    """Versions of what is installed here."""
    names = ("hybridc", "apache-tvm", "apache-tvm-ffi")
    return Versions(*(importlib.metadata.version(name) for name in names))


def _malformed(where: Path, error: Exception) -> ArtifactError:
    what = f"malformed: {type(error).__name__}: {error}"
    return ArtifactError("HC303", what, where=str(where), remedy=_AGAIN)


def _damaged(where: Path, what: str) -> ArtifactError:
    return ArtifactError("HC304", what, where=str(where), remedy=f"copy the artifact again, or {_AGAIN}")


def _unreadable(where: Path, error: OSError) -> ArtifactError:
    if isinstance(error, PermissionError):
        return ArtifactError("HC304", "permission denied", where=str(where), remedy="check its permissions")
    return _damaged(where, f"cannot be read: {error.strerror}")


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "the artifact does not exist" if not folder.exists() else f"not an artifact: {name} is missing"
        remedy = "compile a model first"
        if (folder / TRAINING_MANIFEST).exists():
            what, remedy = "this is a training step", "use `hybridc train`, or load_training in Python"
        raise ArtifactError("HC301", what, where=str(folder), remedy=remedy) from None
    except OSError as error:
        raise _unreadable(folder / name, error) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(folder / name, error) from None


def _check_schema(data: dict[str, Any], folder: Path) -> None:
    if data.get("schema_version") != SCHEMA_VERSION:
        found = reprlib.repr(data.get("schema_version"))
        what = f"artifact schema {found}, but this hybridc reads {SCHEMA_VERSION}"
        raise ArtifactError("HC302", what, where=str(folder), remedy=_AGAIN)


def _check_names(folder: Path, manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    for name in names:
        if name not in _FILES:
            raise ArtifactError(
                "HC305", f"unexpected file name {name!r}", where=str(folder / MANIFEST), remedy=_AGAIN
            )
        if (folder / name).is_symlink():
            what = "a file of an artifact must not be a link"
            raise ArtifactError("HC305", what, where=str(folder / name), remedy=_AGAIN)
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
            raise _damaged(path, f"has {found:,} bytes, but {file.size_bytes:,} are expected")
        if not check_hash:
            return
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest != file.sha256:
        raise _damaged(path, "its content has changed (the SHA-256 hash differs)")


def _check_weight_tables(folder: Path, manifest: Manifest) -> None:
    file_bytes = next(f.size_bytes for f in manifest.files if f.name == WEIGHTS)

    def check(weight: StoredWeight) -> None:
        if weight.size_bytes * 8 != math.prod(weight.shape) * dtype_bits(weight.dtype):
            raise ValueError(f"weight {weight.tensor!r} has a size that does not match its shape")
        end = weight.offset_bytes + weight.size_bytes
        if weight.offset_bytes % WEIGHT_ALIGNMENT_BYTES or end > file_bytes:
            raise ValueError(f"weight {weight.tensor!r} lies outside {WEIGHTS} or is not aligned")

    try:
        for plan in manifest.plans:
            for weight in (*plan.host_weights, *plan.streamed_weights, *plan.gpu_weights):
                check(weight)
    except _MALFORMED as error:
        raise _malformed(folder / MANIFEST, error) from None


def _read_plans(folder: Path) -> tuple[tuple[Graph, ...], tuple[Plan, ...]]:
    data = _read_json(folder, PLAN)
    try:
        graphs, plans = plans_from_json(data)
        budgets = [plan.budget_bytes or 0 for plan in plans]
        if not budgets or budgets != sorted(set(budgets)):
            raise ValueError("the plans must be for increasing budgets")
        return graphs, plans
    except _MALFORMED as error:
        raise _malformed(folder / PLAN, error) from None


def _check_agreement(
    where: Path, manifest: Manifest, graphs: tuple[Graph, ...], plans: tuple[Plan, ...]
) -> None:
    """Manifest and plans have the same inputs, outputs, and weights on the GPU."""
    try:
        for stored, graph, plan in zip(manifest.plans, graphs, plans, strict=True):
            _check_ports(manifest, graph)
            _check_stored_plan(stored, graph, plan)
    except _MALFORMED as error:
        raise _malformed(where, error) from None


def _check_ports(manifest: Manifest, graph: Graph) -> None:
    for ports, names in ((manifest.inputs, graph.inputs), (manifest.outputs, graph.outputs)):
        tensors = [graph.tensor[name] for name in names]
        # a port may see its tensor through a reshape, so only the number of elements must agree
        types = [(math.prod(t.shape), t.dtype) for t in tensors]
        if types != [(math.prod(p.shape), p.dtype) for p in ports]:
            raise ValueError("its inputs and outputs do not match the plan")


def _check_stored_plan(stored: StoredPlan, graph: Graph, plan: Plan) -> None:
    uploads = sorted((w.tensor, w.arena_offset_bytes or 0, w.size_bytes) for w in stored.gpu_weights)
    weights = [b for b in plan.buffers if b.kind is BufferKind.WEIGHT and b.device is Device.GPU]
    resident = [b for b in weights if b.first_step < 0]
    if uploads != sorted((b.tensor, b.offset_bytes, b.size_bytes) for b in resident):
        raise ValueError("its GPU weights do not match the plan")
    streamed = [(w.tensor, w.size_bytes) for w in stored.streamed_weights]
    if sorted(streamed) != sorted({(b.tensor, b.size_bytes) for b in weights if b.first_step >= 0}):
        raise ValueError("its streamed weights do not match the plan")
    plain = {w.tensor for w in stored.host_weights if not w.packed}
    if any(graph.tensor[n].role is Role.WEIGHT and n not in plain for n in graph.outputs):
        raise ValueError("a weight that is an output is missing")
    if any(w.arena_offset_bytes is None for w in stored.gpu_weights):
        raise ValueError("a GPU weight has no place in the arena")
    if stored.event_count > len(plan.steps):
        raise ValueError(f"{stored.event_count} events for {len(plan.steps)} steps")
