"""A loaded library with its arenas and lanes: everything of a run that is not about names and feeds."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredWeight
from hybridc.errors import ArtifactError, DeviceError
from hybridc.ir import Device
from hybridc.runtime.libraries import limit_threads, load_runtime, no_gpu, on_lasting_thread
from hybridc.scratch import scratch_folder

_CPU = 1  # kDLCPU
_NAIVE = 1  # AllocatorType::kNaive; the VM needs one, and never allocates from it
_GPU_INDEX = 0


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes that were really allocated, or mapped from the artifact."""

    gpu_bytes: int
    host_bytes: int
    mapped_weight_bytes: int


class Program:
    """The VM of one artifact, its arenas and its lanes.

    What it holds is freed by `close`, or when it is collected. Not safe for several threads at once.
    Raises DeviceError HC402 without the GPU that the artifact needs, HC405 if the GPU has too little free
    memory, HC407 if it fails; ArtifactError HC307 if the library cannot be loaded.
    """

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self._threads = threads
        load_runtime(cuda=artifact.needs_gpu)
        _offer_kernels_to_emulator(artifact)
        self._library = _load_library(artifact.library)
        gpu_bytes = artifact.plan.arena_bytes(Device.GPU)
        self._gpu_arena = self._allocate_on_gpu(gpu_bytes) if artifact.needs_gpu else None
        with _device_errors():
            self._prepare(artifact)

    def _prepare(self, artifact: Artifact) -> None:
        """Allocate the host's arena, upload the GPU's weights, open the lanes, start the VM."""
        host_bytes = max(artifact.plan.arena_bytes(Device.CPU), 1)
        self._host_arena = self._helper("host_arena")(host_bytes, artifact.needs_gpu)
        self._weights = _map_weights(artifact.weights)
        self._upload(artifact.manifest.gpu_weights)
        self._lanes = self._helper("open_lanes")(
            artifact.needs_gpu, _GPU_INDEX, artifact.manifest.event_count
        )
        self._close_lanes = weakref.finalize(self, self._helper("close_lanes"), self._lanes)
        weights = [self._view(w, w.offset_bytes, self._weights) for w in artifact.manifest.host_weights]
        self._arguments = (self._lanes, self._gpu_arena, self._host_arena, *weights)
        self._main = self._start_vm()

    @property
    def host_bytes(self) -> np.ndarray:
        """The host's arena as uint8: where inputs are put and outputs are found."""
        return np.from_dlpack(self._host_arena)

    def weight_bytes(self, weight: StoredWeight) -> np.ndarray:
        """The mapped bytes of a weight, as uint8."""
        return np.from_dlpack(self._weights)[weight.offset_bytes : weight.offset_bytes + weight.size_bytes]

    def run(self) -> None:
        """Run the plan's steps; on return every lane is idle. Raises DeviceError HC407 if the GPU fails."""
        on_lasting_thread(self._run)

    def _run(self) -> None:
        limit_threads(self._threads)
        with _device_errors():
            self._helper("enter_lanes")(self._lanes)
            try:
                self._main(*self._arguments)
            finally:
                self._helper("leave_lanes")(self._lanes)

    def allocated(self) -> Allocated:
        """Sizes of the allocations behind the arenas, and of the mapped weights file."""
        gpu, host, weights = self._gpu_arena, self._host_arena, self._weights
        return Allocated(*(0 if tensor is None else int(tensor.shape[0]) for tensor in (gpu, host, weights)))

    def close(self) -> None:
        """Free arenas, streams and events."""
        self._close_lanes()
        del self._main, self._arguments, self._gpu_arena, self._host_arena, self._weights

    def _helper(self, name: str) -> Any:
        return self._library.get_function(f"hybridc_{name}", query_imports=True)

    def _allocate_on_gpu(self, needed_bytes: int) -> Any:
        try:
            free_bytes = self._helper("free_device_bytes")(_GPU_INDEX)
        except RuntimeError as error:
            raise no_gpu(str(error).strip().splitlines()[-1]) from None
        try:
            return self._helper("device_arena")(_GPU_INDEX, needed_bytes)
        except RuntimeError as error:
            what = f"the artifact needs {needed_bytes:,} bytes of GPU memory, and {free_bytes:,} are free"
            remedy = "end other programs on the GPU, or compile with a smaller --gpu-memory"
            raise DeviceError("HC405", what, remedy=remedy) from error

    def _view(self, weight: StoredWeight, offset_bytes: int, arena: Any) -> Any:
        return self._helper("arena_view")(arena, offset_bytes, weight.shape, weight.dtype)

    def _upload(self, weights: tuple[StoredWeight, ...]) -> None:
        for weight in weights:
            assert weight.arena_offset_bytes is not None
            source = self._view(weight, weight.offset_bytes, self._weights)
            self._helper("upload")(source, self._view(weight, weight.arena_offset_bytes, self._gpu_arena))

    def _start_vm(self) -> Any:
        machine = self._library.get_function("vm_load_executable")()
        machine.get_function("vm_initialization")(_CPU, 0, _NAIVE)
        return machine.get_function("main")


@contextmanager
def _device_errors() -> Iterator[None]:
    """TVM and the helper report what CUDA refuses as RuntimeError, with CUDA's name of it at the end."""
    try:
        yield
    except RuntimeError as error:
        what = f"the device failed: {str(error).strip().splitlines()[-1]}"
        remedy = "see whether the GPU is in order and has free memory; if so, this is a fault of hybridc"
        raise DeviceError("HC407", what, remedy=remedy) from error


def _offer_kernels_to_emulator(artifact: Artifact) -> None:
    """Let the emulated GPU, if it is what runs here, know the source of the image it is about to get."""
    emulator = sys.modules.get("hybridc.emulator")  # not imported: not active
    source = artifact.cuda_source()
    key = artifact.manifest.cuda_image_key
    if emulator is not None and emulator.is_active() and source is not None and key is not None:
        emulator.provide_kernels(key, source)


def _load_library(path: Path) -> Any:
    try:
        status = path.stat()
        return _load_once(path.resolve(), status.st_dev, status.st_ino, status.st_mtime_ns)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise ArtifactError(
            "HC307",
            f"the library cannot be loaded: {reason}",
            where=str(path),
            remedy="compile the model again",
        ) from error


@functools.cache
def _load_once(path: Path, *_identity: int) -> Any:
    """Load a library under a name that was never used before.

    TVM keeps what it loads, with the GPU's code in it, until the process ends: the same file is loaded
    once. But the dynamic linker takes a library for loaded when it knows the name, even where the
    artifact was compiled anew since.
    """
    with scratch_folder("hybridc-load-") as folder:
        link = folder / path.name
        link.symlink_to(path)
        return tvm_ffi.load_module(str(link))


def _map_weights(path: Path) -> Any:
    """The weights as one tensor of bytes whose pages are read when they are used."""
    if path.stat().st_size == 0:  # cannot be mapped; there may be weights without elements all the same
        return tvm_ffi.from_dlpack(np.empty(0, np.uint8))
    return tvm_ffi.from_dlpack(
        np.memmap(path, dtype=np.uint8, mode="c")
    )  # "c": DLPack exports no read-only arrays
