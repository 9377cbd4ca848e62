"""Write a bundle: a folder or an archive with all that a run needs but glibc and the NVIDIA driver."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
import zlib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tvm_ffi import libinfo

from hybridc.artifact import Artifact, open_artifact
from hybridc.artifact.load import check_versions
from hybridc.artifact.manifest import LIBRARY, WEIGHTS
from hybridc.artifact.store import put_in_place
from hybridc.bundle.build import HEADER, RUNNER, RUNTIME, build_runtime, compiler_library
from hybridc.bundle.program import program_to_json
from hybridc.bundle.readme import readme
from hybridc.errors import DeviceError, UsageError
from hybridc.runtime.libraries import cuda_runtime_file, tvm_folder
from hybridc.scratch import scratch_folder

PROGRAM = "program.json"
HASHES = "SHA256SUMS"
LIBRARIES = "lib"
_LICENSED = ("apache-tvm", "apache-tvm-ffi", "nvidia-cuda-runtime")
_EXAMPLE = Path(__file__).parent / "example"
_PART_BYTES = 1 << 20
_COMPRESSION = 6
"""What gzip does unless it is told: more takes several times as long for a percent."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was written."""

    path: Path
    """A folder, or with `archive` a .tar.gz file."""
    size_bytes: int
    """Of all files, before they are compressed."""
    weights_bytes: int
    has_gpu_code: bool
    """Whether a run needs a GPU, or may."""


def write_bundle(artifact: str | Path, output: str | Path, *, archive: bool = False) -> Bundle:
    """Write what runs an artifact to the folder `output`, or with `archive` to `output`.tar.gz.

    An older bundle there is replaced. The same artifact and packages give the same bytes.
    Raises ArtifactError and UsageError HC564 for the artifact, UsageError HC561 if something else than a
    bundle is at `output`, HC562 if it cannot be written; DeviceError HC403 without g++, HC433 where the CUDA
    runtime is not installed that GPU parts need.
    """
    destination = Path(f"{output}.tar.gz") if archive else Path(output)
    _check_destination(destination, archive)
    opened = open_artifact(artifact, check_host=False, every_instruction_set=True)
    try:
        check_versions(opened.path, opened.manifest.versions)
        program = program_to_json(opened)
        destination.absolute().parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(f".{destination.name}-", destination.absolute().parent) as scratch:
            folder = scratch / Path(output).name
            folder.mkdir(mode=0o755)
            _fill(folder, opened, program)
            size_bytes = sum(path.stat().st_size for path in _files(folder))
            made = Bundle(destination, size_bytes, opened.weights.size_bytes, opened.has_gpu_code)
            if archive:
                _pack(folder, packed := scratch / destination.name)
                os.replace(packed, destination)
            else:
                put_in_place(folder, destination)
    except OSError as error:
        what = f"the bundle cannot be written: {error.strerror or error}"
        raise UsageError("HC562", what, where=str(destination), remedy="choose another location") from None
    finally:
        opened.close()
    return made


def _check_destination(destination: Path, archive: bool) -> None:
    if destination.name in ("", ".."):
        what = "the output path has no file name"
        raise UsageError("HC561", what, where=str(destination), remedy="choose a name for the bundle")
    if archive:
        is_ours = not destination.exists() or _is_archive(destination)
    elif destination.is_dir() and not destination.is_symlink():
        is_ours = (destination / PROGRAM).is_file() or not any(destination.iterdir())
    else:
        is_ours = not destination.exists() and not destination.is_symlink()
    if not is_ours:
        what = "the output exists and is not a bundle"
        raise UsageError("HC561", what, where=str(destination), remedy="choose another name, or remove it")


def _is_archive(path: Path) -> bool:
    """Whether a file is what `_pack` writes, as far as its first members tell."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            folder, *files = (tar.next() for _ in range(3))
    except (OSError, EOFError, tarfile.TarError, zlib.error):
        return False
    return folder is not None and f"{folder.name}/{HASHES}" in [
        file.name for file in files if file is not None
    ]


def _fill(folder: Path, artifact: Artifact, program: dict[str, object]) -> None:
    """Write every file, their hashes last."""
    runtime = build_runtime(artifact.manifest.versions.tvm_ffi)
    for name in (LIBRARIES, "include", "example", "licenses"):
        (folder / name).mkdir()
    (folder / PROGRAM).write_text(json.dumps(program, separators=(",", ":")) + "\n")
    _write_executable(folder / LIBRARY, artifact.read_library())
    _copy_weights(folder / WEIGHTS, artifact)
    _write_executable(folder / RUNNER, runtime.runner)
    _write_executable(folder / LIBRARIES / RUNTIME, runtime.library)
    compiler = {name: compiler_library(name) for name in ("libstdc++.so.6", "libgcc_s.so.1")}
    for name, path in (compiler | libraries(artifact.has_gpu_code)).items():
        _write_executable(folder / LIBRARIES / name, path.read_bytes())
    (folder / "include" / HEADER.name).write_bytes(HEADER.read_bytes())
    for path in _EXAMPLE.iterdir():
        (folder / "example" / path.name).write_bytes(path.read_bytes())
    for name, text in licenses(artifact.has_gpu_code).items():
        (folder / "licenses" / name).write_text(text)
    (folder / "README.md").write_text(readme(artifact, _files(folder)))
    lines = [f"{_sha256(path)}  {path.relative_to(folder)}\n" for path in _files(folder)]
    (folder / HASHES).write_text("".join(lines))


def libraries(has_gpu_code: bool) -> dict[str, Path]:
    """TVM's runtime, and what it needs of NVIDIA's. Raises DeviceError HC433 where that is not installed."""
    ffi = Path(libinfo.find_libtvm_ffi())
    found = {ffi.name: ffi, "libtvm_runtime.so": tvm_folder() / "libtvm_runtime.so"}
    if not has_gpu_code:
        return found
    cuda = cuda_runtime_file()
    if cuda is None:
        what = "code for a GPU needs the CUDA runtime, which is not installed"
        raise DeviceError("HC433", what, remedy="pip install hybridc[cuda]")
    part = tvm_folder() / "libtvm_runtime_cuda.so"
    return found | {part.name: part, cuda.name: cuda}


def licenses(has_gpu_code: bool) -> dict[str, str]:
    """Texts of the packages whose libraries are in the bundle, by the names of files."""
    found = {}
    for package in _LICENSED if has_gpu_code else _LICENSED[:-1]:
        for file in distribution(package).files or ():
            if "licenses" in file.parts:
                found[f"{package}-{file.name}"] = file.read_text()
    return found


def _copy_weights(path: Path, artifact: Artifact) -> None:
    """What was hashed when the artifact was opened, if nobody wrote to it since."""
    with path.open("wb") as stream:
        offset = 0
        while offset < artifact.weights.size_bytes:
            count = os.sendfile(stream.fileno(), artifact.weights.handle, offset, _PART_BYTES)
            if count == 0:
                break
            offset += count
    artifact.check_weights()


def _write_executable(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pack(folder: Path, archive: Path) -> None:
    """As gzip and tar would, but without times and owners."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with (
        archive.open("wb") as stream,
        gzip.GzipFile("", "wb", _COMPRESSION, stream, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in [folder, *sorted(folder.rglob("*"))]:
            tar.add(path, str(path.relative_to(folder.parent)), recursive=False, filter=plain)
