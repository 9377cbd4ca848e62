"""Open a model.hyb/ folder: nothing in it is believed before it is checked. No TVM inside."""

from __future__ import annotations

import hashlib
import importlib.metadata
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from hybridc.artifact.check import check_agreement, check_weight_tables
from hybridc.artifact.graphs import plans_from_json
from hybridc.artifact.manifest import (
    CUDA_SOURCE,
    FORMAT,
    LARGEST_JSON_BYTES,
    LIBRARY,
    MANIFEST,
    PLAN,
    SCHEMA_VERSION,
    TRAINING_MANIFEST,
    WEIGHTS,
    Interface,
    Manifest,
    StoredFile,
    StoredPlan,
    Versions,
    manifest_from_json,
)
from hybridc.artifact.signature import SIGNATURE_BYTES, SUFFIX, check_signature
from hybridc.errors import ArtifactError, DeviceError, HybridcError, UsageError, drop_locals
from hybridc.files import IrregularFileError, OpenFile, OpenFolder
from hybridc.ir import Device, Graph, Plan
from hybridc.ir.plan import DRIVER_PAGE_BYTES, reserved_bytes
from hybridc.json_values import LARGEST_SIZE, JsonValueError, is_sealed, parse
from hybridc.options import format_budget
from hybridc.targets import cpu_flags

_AGAIN = "compile the model again"
_LARGEST_BYTES = {PLAN: LARGEST_JSON_BYTES, CUDA_SOURCE: 1 << 28, LIBRARY: 1 << 32, WEIGHTS: LARGEST_SIZE}
"""Of every file that an artifact may have: what is read whole must fit memory."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading and comparing values raises that are not what they should be."""
_ATTEMPTS = 100
"""How often an artifact is opened again because another took its place meanwhile."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact on disk, of whose plans one is chosen."""

    path: Path
    manifest: Manifest
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    plans: tuple[Plan, ...]
    """One for each budget, smallest first; of each bucket of sizes, if there are several, that of the largest
    sizes last."""
    number: int
    """Position of the chosen plan."""
    files: Mapping[str, OpenFile] = field(default_factory=dict, repr=False, compare=False)
    """By name, as they were when they were checked; closed by `close`, or when they are collected."""
    sha256: str = ""
    """Of manifest.json, which has those of all other files."""

    def __repr__(self) -> str:
        return f"<Artifact {self.path.name}: {self.plan!r}, {self.number + 1} of {len(self.plans)}>"

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
        """What a run of the chosen plan needs."""
        return self.manifest.plans[self.number]

    @property
    def library(self) -> StoredFile:
        return self._stored(LIBRARY)

    @property
    def weights(self) -> OpenFile:
        """To be mapped."""
        return self.files[WEIGHTS]

    def check_weights(self) -> None:
        """Raises ArtifactError HC304 if anybody wrote to the weights, or cut them, since they were checked:
        they are mapped, so a run would compute with what is there now, or end with SIGBUS."""
        try:
            has_changed = self.weights.has_changed()
        except OSError as error:
            raise _unreadable(self.weights.path, error) from None
        if has_changed:
            what = "the file has been changed since it was loaded"
            raise ArtifactError("HC304", what, where=str(self.weights.path), remedy="load the artifact again")

    def read_library(self) -> bytes:
        """Raises ArtifactError HC304 if it was changed since it was opened."""
        return _read(self.files[LIBRARY], self.library)

    def copy_library(self, target: BinaryIO) -> None:
        """Write its bytes to a file. Raises ArtifactError HC304 if it was changed since it was opened."""
        file = self.files[LIBRARY]
        try:
            digest = file.copy(target)
        except OSError as error:
            raise _unreadable(file.path, error) from None
        if digest != self.library.sha256:
            raise _changed(file.path)

    def close(self) -> None:
        """Close the files; closing twice does no harm."""
        for file in self.files.values():
            file.close()

    @property
    def interface(self) -> Interface:
        """What the graph of the chosen plan takes and gives."""
        return self.manifest.interfaces[self.stored_plan.bucket]

    def for_instruction_set(self, position: int) -> Artifact:
        """With the plans of one of its instruction sets, of which it then has no other."""
        manifest = self.manifest
        kept = [number for number, plan in enumerate(manifest.plans) if plan.instruction_set == position]
        chosen = manifest.instruction_sets[position]
        gpu, plus, _ = manifest.target.rpartition("+")
        restricted = replace(
            manifest,
            target=f"{gpu}{plus}{chosen.name}",
            instruction_sets=(chosen,),
            plans=tuple(replace(manifest.plans[number], instruction_set=0) for number in kept),
        )
        return replace(
            self,
            manifest=restricted,
            graphs=tuple(self.graphs[number] for number in kept),
            plans=tuple(self.plans[number] for number in kept),
            number=len(kept) - 1,
        )

    def in_buckets(self) -> tuple[Artifact, ...]:
        """With the plan for the chosen budget in each bucket of sizes: one, unless dimensions are open."""
        of_each = self._budget_count
        first = self.number % of_each
        return tuple(replace(self, number=number) for number in range(first, len(self.plans), of_each))

    @property
    def has_smaller_plans(self) -> bool:
        """Whether there are plans for a smaller budget than the chosen one."""
        return self.number % self._budget_count > 0

    @property
    def _budget_count(self) -> int:
        return len(self.plans) // len(self.manifest.interfaces)

    @property
    def needs_gpu(self) -> bool:
        """Whether the chosen plan does."""
        return self.plan.arena_bytes(Device.GPU) > 0

    @property
    def has_gpu_code(self) -> bool:
        return any(plan.arena_bytes(Device.GPU) > 0 for plan in self.plans)

    @property
    def budgets(self) -> str:
        """What plans keep to, as values for `--gpu-memory`."""
        return ", ".join(format_budget(max(map(promised_bytes, plans))) for plans in self._by_budget())

    def _by_budget(self) -> list[tuple[Plan, ...]]:
        """The plans of all buckets for each budget."""
        return [self.plans[first :: self._budget_count] for first in range(self._budget_count)]

    def within(self, gpu_memory_bytes: int) -> Artifact:
        """With the plans of the largest budget of at most so many bytes. Raises UsageError HC558."""
        chosen = self._largest(lambda plan: promised_bytes(plan) <= gpu_memory_bytes)
        if chosen is None:
            what = f"no plan of the artifact fits {gpu_memory_bytes:,} bytes of GPU memory"
            remedy = f"its plans are for {self.budgets}; compile with a smaller --gpu-memory"
            raise UsageError("HC558", what, where=str(self.path), remedy=remedy)
        return chosen

    def fitting(self, free_bytes: int, page_bytes: int = DRIVER_PAGE_BYTES) -> Artifact:
        """With the plans of the largest budget whose arenas have so many bytes; else of the smallest.

        An arena needs what a driver that reserves pages of `page_bytes` reserves for it.
        """
        chosen = self._largest(
            lambda plan: reserved_bytes(plan.arena_bytes(Device.GPU), page_bytes) <= free_bytes
        )
        return chosen or replace(self, number=len(self.plans) - self._budget_count)

    def _largest(self, suits: Callable[[Plan], bool]) -> Artifact | None:
        """With the plan of the bucket of the largest sizes, for the largest budget whose plans all suit."""
        budgets = [budget for budget, plans in enumerate(self._by_budget()) if all(map(suits, plans))]
        last = len(self.plans) - self._budget_count
        return replace(self, number=last + budgets[-1]) if budgets else None

    def cuda_source(self) -> str | None:
        """CUDA C++ of the GPU's kernels, if there are any.

        Raises ArtifactError HC303 if it is no text, HC304 if it was changed since it was opened.
        """
        if CUDA_SOURCE not in self.files:
            return None
        try:
            return _read(self.files[CUDA_SOURCE], self._stored(CUDA_SOURCE)).decode()
        except UnicodeDecodeError as error:
            raise _malformed(self.path / CUDA_SOURCE, error) from None

    def _stored(self, name: str) -> StoredFile:
        return next(file for file in self.manifest.files if file.name == name)


def promised_bytes(plan: Plan) -> int:
    """GPU memory that a run of the plan never exceeds."""
    return plan.arena_bytes(Device.GPU) if plan.budget_bytes is None else plan.budget_bytes


def open_artifact(
    path: str | Path,
    *,
    check_weights: bool = True,
    check_host: bool = True,
    every_instruction_set: bool = False,
    trusted_keys: Sequence[str | Path] | None = None,
) -> Artifact:
    """Read and check an artifact.

    `check_weights=False` skips the hash of weights.bin, whose size is checked all the same.
    `check_host=False` lets it be inspected where it cannot run. Of several instruction sets the artifact has
    the plans of the richest that this processor has, of the poorest if it has none; with
    `every_instruction_set` those of all, and cannot be run. With `trusted_keys`, files with ed25519
    public keys, an owner of one of them must have signed it.

    Every file is opened once, and what is checked is what is used: an artifact that is replaced meanwhile is
    opened as it was before or is afterwards, never as a mixture.

    Raises ArtifactError: HC301 not an artifact, HC302 of another version, HC303 malformed, HC304 a file is
    missing or damaged, HC305 a file name that an artifact must not have, or no regular file, HC308 not
    signed, HC309 signed by nobody who is trusted; UsageError HC583 or HC584 for the trusted keys; DeviceError
    HC401 if this processor lacks the instruction set it was compiled for.
    """
    refusal: HybridcError
    for _ in range(_ATTEMPTS):
        with _folder(Path(path)) as folder:
            try:
                found = _open(folder, trusted_keys, check_weights=check_weights, check_host=check_host)
                return found if every_instruction_set else found.for_instruction_set(_chosen(found.manifest))
            except HybridcError as error:
                drop_locals(error)  # files among them
                if not isinstance(error, ArtifactError) or not folder.is_replaced():
                    raise
                refusal = error
    raise refusal


def _open(
    folder: OpenFolder, trusted_keys: Sequence[str | Path] | None, *, check_weights: bool, check_host: bool
) -> Artifact:
    manifest_file = _manifest_file(folder)
    content = _read_all(manifest_file, LARGEST_JSON_BYTES)
    if trusted_keys is not None:
        check_signature(content, _signature(folder), trusted_keys, folder.path)
    digest = hashlib.sha256(content).hexdigest()
    manifest = _read_manifest(folder.path, content)
    del content
    if check_host:
        check_versions(folder.path, manifest.versions)
        _check_processor(folder.path, manifest)
    files = {stored.name: _open_file(folder, stored) for stored in manifest.files}
    for stored in manifest.files:
        if stored.name != PLAN and (check_weights or stored.name != WEIGHTS):
            _check_hash(files[stored.name], stored)
    graphs, plans = _read_plans(files[PLAN], next(f for f in manifest.files if f.name == PLAN))
    try:
        check_agreement(manifest, graphs, plans)
        check_weight_tables(manifest)
    except _MALFORMED as error:
        raise _malformed(folder.path / MANIFEST, error) from None
    files.pop(PLAN).close()
    manifest_file.close()
    return Artifact(folder.path, manifest, graphs, plans, len(plans) - 1, files, digest)


def _read_manifest(folder: Path, content: bytes) -> Manifest:
    """By itself, as its JSON values take more memory than all that is kept of an artifact for many sizes."""
    data = _parse(folder / MANIFEST, content)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError("HC301", "this is not a compiled artifact", where=str(folder), remedy=_AGAIN)
    _check_schema(data, folder)
    manifest = _manifest(folder / MANIFEST, data)
    _check_names(folder / MANIFEST, manifest)
    return manifest


def installed_versions() -> Versions:
    """Versions of what is installed here."""
    names = ("hybridc", "apache-tvm", "apache-tvm-ffi")
    return Versions(*(importlib.metadata.version(name) for name in names))


def check_versions(folder: Path, written_by: Versions) -> None:
    """Raise ArtifactError HC302 if another TVM than that which wrote an artifact is installed."""
    here = installed_versions()
    for package, wanted, found in (
        ("apache-tvm", written_by.tvm, here.tvm),
        ("apache-tvm-ffi", written_by.tvm_ffi, here.tvm_ffi),
    ):
        if wanted != found:
            what = f"compiled with {package} {wanted}, but {found} is installed"
            remedy = f"pip install {package}=={wanted}, or {_AGAIN}"
            raise ArtifactError("HC302", what, where=str(folder), remedy=remedy)


def _malformed(where: Path, error: Exception) -> ArtifactError:
    what = f"malformed: {type(error).__name__}: {error}"
    return ArtifactError("HC303", what, where=str(where), remedy=_AGAIN)


def _damaged(where: Path, what: str) -> ArtifactError:
    return ArtifactError("HC304", what, where=str(where), remedy=f"copy the artifact again, or {_AGAIN}")


def _changed(where: Path) -> ArtifactError:
    return _damaged(where, "its content has changed (the SHA-256 hash differs)")


def _unreadable(where: Path, error: OSError) -> ArtifactError:
    if isinstance(error, IrregularFileError):
        what = f"a file of an artifact must not be {error.strerror}"
        return ArtifactError("HC305", what, where=str(where), remedy=_AGAIN)
    if isinstance(error, PermissionError):
        return ArtifactError("HC304", "permission denied", where=str(where), remedy="check its permissions")
    return _damaged(where, f"cannot be read: {error.strerror}")


def _folder(path: Path) -> OpenFolder:
    try:
        return OpenFolder(path)
    except (FileNotFoundError, NotADirectoryError):
        what = "this is not a compiled artifact" if path.exists() else "the artifact does not exist"
        raise ArtifactError("HC301", what, where=str(path), remedy="compile a model first") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _manifest_file(folder: OpenFolder) -> OpenFile:
    try:
        return folder.open(MANIFEST)
    except FileNotFoundError:
        what, remedy = f"not an artifact: {MANIFEST} is missing", "compile a model first"
        if (folder.path / TRAINING_MANIFEST).exists():
            what, remedy = "this is a training step", "use `hybridc train`, or load_training in Python"
        raise ArtifactError("HC301", what, where=str(folder.path), remedy=remedy) from None
    except OSError as error:
        raise _unreadable(folder.path / MANIFEST, error) from None


def _signature(folder: OpenFolder) -> bytes | None:
    """Of the manifest; None if it is not signed."""
    name = MANIFEST + SUFFIX
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(folder.path / name, error) from None
    return _read_all(file, SIGNATURE_BYTES)


def _open_file(folder: OpenFolder, stored: StoredFile) -> OpenFile:
    """The file, of the size that the manifest tells."""
    path = folder.path / stored.name
    try:
        file = folder.open(stored.name)
    except OSError as error:
        raise _unreadable(path, error) from None
    if file.size_bytes != stored.size_bytes:
        found, expected = file.size_bytes, stored.size_bytes
        raise _damaged(path, f"has {found:,} bytes, but {expected:,} are expected")
    return file


def _read(file: OpenFile, stored: StoredFile) -> bytes:
    """The bytes that have the hash of the manifest: no others are used, even if the file is changed."""
    content = _read_all(file, stored.size_bytes)
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise _changed(file.path)
    return content


def _read_all(file: OpenFile, most_bytes: int) -> bytes:
    try:
        return file.read(most_bytes)
    except OSError as error:
        raise _unreadable(file.path, error) from None


def _check_hash(file: OpenFile, stored: StoredFile) -> None:
    try:
        found = file.sha256()
    except OSError as error:
        raise _unreadable(file.path, error) from None
    if found != stored.sha256:
        raise _changed(file.path)


def _parse(where: Path, content: bytes) -> Any:
    try:
        return parse(content)
    except JsonValueError as error:
        raise _malformed(where, error) from None


def _manifest(where: Path, data: dict[str, Any]) -> Manifest:
    try:
        if not is_sealed(data):
            raise _changed(where)
        return manifest_from_json(data)
    except _MALFORMED as error:
        raise _malformed(where, error) from None


def _check_schema(data: dict[str, Any], folder: Path) -> None:
    if data.get("schema_version") != SCHEMA_VERSION:
        found = reprlib.repr(data.get("schema_version"))
        what = f"artifact schema {found}, but this hybridc reads {SCHEMA_VERSION}"
        raise ArtifactError("HC302", what, where=str(folder), remedy=_AGAIN)


def _check_names(where: Path, manifest: Manifest) -> None:
    names = [file.name for file in manifest.files]
    for file in manifest.files:
        if file.name not in _LARGEST_BYTES:
            what = f"unexpected file name {file.name!r}"
            raise ArtifactError("HC305", what, where=str(where), remedy=_AGAIN)
        if file.size_bytes > _LARGEST_BYTES[file.name]:
            what = f"{file.name} has {file.size_bytes:,} bytes, more than is read"
            raise _malformed(where, ValueError(what))
    if len(set(names)) != len(names) or not {PLAN, LIBRARY, WEIGHTS} <= set(names):
        raise _malformed(where, ValueError(f"the files are {', '.join(names) or 'none'}"))


def _chosen(manifest: Manifest) -> int:
    """Position of the richest instruction set that this processor has, of the poorest if it has none."""
    present = cpu_flags()
    runs = [number for number, each in enumerate(manifest.instruction_sets) if present >= {*each.cpu_flags}]
    return runs[-1] if runs else 0


def _check_processor(folder: Path, manifest: Manifest) -> None:
    present = cpu_flags()
    of_each = [[f for f in each.cpu_flags if f not in present] for each in manifest.instruction_sets]
    if of_each and all(of_each):
        missing, *_ = of_each
        what = f"this processor lacks {', '.join(missing)}, which target {manifest.target} needs"
        remedy = "compile for --target avx2, or for native on this machine"
        raise DeviceError("HC401", what, where=str(folder), remedy=remedy)


def _read_plans(file: OpenFile, stored: StoredFile) -> tuple[tuple[Graph, ...], tuple[Plan, ...]]:
    try:
        return plans_from_json(_read(file, stored).decode())
    except _MALFORMED as error:
        raise _malformed(file.path, error) from None
