"""The code of an artifact, loaded into this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import CUDA_SOURCE, LIBRARY
from hybridc.errors import ArtifactError, DeviceError, HybridcError
from hybridc.runtime.elf import fault_of_library
from hybridc.runtime.emulation import emulated_gpu
from hybridc.runtime.libraries import load_runtime
from hybridc.runtime.tiles import enable_amx
from hybridc.scratch import scratch_folder


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library.so."""

    path: Path
    module: Any

    def function(self, name: str) -> Any:
        """Raises ArtifactError HC307 if there is none of that name."""
        try:
            return self.module.get_function(name)
        except AttributeError:
            raise refused(self.path, f"the library has no {name}") from None

    def helper(self, name: str) -> Any:
        """A function of the runtime's helper. Raises ArtifactError HC307 if there is none of that name."""
        return self.function(f"hybridc_{name}")


def open_library(artifact: Artifact) -> Library:
    """The code of an artifact, for `LoadedProgram`.

    Raises DeviceError HC402 where the NVIDIA driver or the CUDA runtime is missing and there is GPU code,
    HC410 where the system refuses tile registers that it needs; ArtifactError HC307 if the library cannot be
    loaded, or an emulated GPU cannot compile the kernels.
    """
    load_runtime(cuda=artifact.has_gpu_code)
    enable_amx(artifact.manifest.cpu_flags)
    _announce_image(artifact)
    return _load_library(artifact)


def refused(where: Path, what: str) -> ArtifactError:
    """HC307: the code of an artifact is not what its other files expect."""
    return ArtifactError("HC307", what, where=str(where), remedy="compile the model again")


def missing_kernel(artifact: Artifact, error: RuntimeError) -> ArtifactError | None:
    """HC307 if a run failed because the GPU's code lacks a kernel: CUDA looks for it at its first launch."""
    reason = str(error).strip().splitlines()[-1]
    if "cuModuleGetFunction" not in reason or "CUDA_ERROR_NOT_FOUND" not in reason:
        return None
    kernel = reason.split("cuModuleGetFunction", 1)[1].split()[0]
    name = LIBRARY if emulated_gpu() is None else CUDA_SOURCE
    return refused(artifact.path / name, f"the GPU's code has no kernel {kernel}")


def _announce_image(artifact: Artifact) -> None:
    gpu, source, key = emulated_gpu(), artifact.cuda_source(), artifact.manifest.cuda_image_key
    if gpu is None or source is None or key is None:
        return
    try:
        gpu.provide_kernels(key, source)
    except DeviceError as error:
        if error.code != "HC423":  # g++ is there, and refuses the source
            raise
        what = "g++ cannot compile it for the emulated GPU"
        first = (error.where or "").partition("\n")[0]  # behind its place in a file that is no more
        raise refused(artifact.path / CUDA_SOURCE, f"{what}: {first.partition(': ')[2] or first}") from error


def _load_library(artifact: Artifact) -> Library:
    """A library of the same bytes is loaded once: TVM keeps what it loads, with the GPU's code in it, which
    for an emulated GPU is made from the CUDA source."""
    path, code = artifact.path / LIBRARY, (LIBRARY, CUDA_SOURCE)
    key = tuple(file.sha256 for file in artifact.manifest.files if file.name in code)
    if key not in _modules:
        try:
            with open(os.memfd_create("library"), "w+b") as copy:
                artifact.copy_library(copy)
                copy.flush()
                if fault := _fault_of(copy):
                    raise refused(path, f"the library cannot be loaded: {fault}")
                _modules[key] = _load_copy(copy)
        except HybridcError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[-1]
            raise refused(path, f"the library cannot be loaded: {reason}") from error
    return Library(path, _modules[key])


_modules: dict[tuple[str, ...], Any] = {}
"""By the hashes of what they are made of."""


def _fault_of(copy: BinaryIO) -> str | None:
    if copy.tell() == 0:
        return fault_of_library(b"")  # nothing that could be mapped
    with mmap(copy.fileno(), 0, access=ACCESS_READ) as content:
        return fault_of_library(content)


def _load_copy(copy: BinaryIO) -> Any:
    """Load a library from memory: the dynamic linker maps files, and the artifact's may change at any time.

    The linker takes a library for loaded when it knows the name, so it gets one that was never used before.
    """
    with scratch_folder("hybridc-load-") as folder:
        link = folder / LIBRARY  # TVM goes by the ending
        link.symlink_to(f"/proc/self/fd/{copy.fileno()}")
        return tvm_ffi.load_module(str(link))
