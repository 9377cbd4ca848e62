"""A loaded library with its arenas and lanes: everything of a run that is not about names and feeds."""

from __future__ import annotations

import functools
import mmap
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
from hybridc.ir import Device, Lane
from hybridc.ir.plan import DRIVER_PAGE_BYTES, align
from hybridc.runtime.emulation import emulated_gpu
from hybridc.runtime.libraries import limit_threads, load_runtime, no_gpu, on_persistent_thread
from hybridc.runtime.staging import available_host_bytes, choose_staging
from hybridc.runtime.tiles import enable_amx
from hybridc.scratch import scratch_folder

_CPU = 1  # kDLCPU
_NAIVE = 1  # AllocatorType::kNaive; the VM needs one, and never allocates from it
_GPU_INDEX = 0
_MAP_NORESERVE = 0x4000  # of Linux on x86; Python's mmap names it from 3.13 on


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes that were really allocated, or mapped from the artifact."""

    gpu_bytes: int
    host_bytes: int
    staging_bytes: int
    mapped_weight_bytes: int


class LoadedProgram:
    """The code of one artifact, and the arenas and lanes of its chosen plan.

    What it holds is freed by `close`, or when it is collected. Not safe for several threads at once.
    Raises DeviceError HC402 without the GPU that the plan needs, HC405 if the GPU has too little free memory,
    HC407 if it fails, HC408 if the host's memory may not hold what a run needs.
    """

    def __init__(
        self, artifact: Artifact, library: Any, threads: int, host_memory_bytes: int | None = None
    ) -> None:
        self._library = library
        self._threads = threads
        sizes = [w.size_bytes for w in artifact.stored_plan.streamed_weights]
        host_bytes = artifact.plan.arena_bytes(Device.CPU)
        self._staging = choose_staging(sizes, host_bytes, host_memory_bytes, available_host_bytes())
        self._gpu_arena = self._allocate_on_gpu(artifact) if artifact.needs_gpu else None
        _announce_plan(artifact, self._gpu_arena)
        with _device_errors():
            self._prepare(artifact)

    def _prepare(self, artifact: Artifact) -> None:
        """Allocate the host's arena, put weights in their places, and give the lanes their steps."""
        stored = artifact.stored_plan
        host_bytes = max(artifact.plan.arena_bytes(Device.CPU), 1)
        self._host_arena = self._helper("host_arena")(host_bytes, artifact.needs_gpu)
        self._weights = _map_weights(artifact.weights)
        self._pinned: Any = None
        self._upload(stored.gpu_weights)
        self._lanes = self._helper("open_lanes")(artifact.needs_gpu, _GPU_INDEX, stored.event_count)
        self._close_lanes = weakref.finalize(self, self._helper("close_lanes"), self._lanes)
        self._run_lanes = self._helper("run")
        self._machines: dict[Lane, Any] = {}
        self._is_traced = False
        weights = {
            Lane.CPU: [self._view(w, w.offset_bytes, self._weights) for w in stored.host_weights],
            Lane.H2D: self._stage(stored.streamed_weights),
        }
        for lane in {Lane.CPU, *(step.lane for step in artifact.plan.steps)}:
            arguments = (self._lanes, self._gpu_arena, self._host_arena, *weights.get(lane, ()))
            self._machines[lane] = self._new_machine()
            steps = self._machines[lane].get_function(lane.function(artifact.number))
            self._helper("set_steps")(self._lanes, lane.number, steps, arguments)

    @property
    def host_bytes(self) -> np.ndarray:
        """The host's arena as uint8: where inputs are put and outputs are found."""
        return np.from_dlpack(self._host_arena)

    def weight_bytes(self, weight: StoredWeight) -> np.ndarray:
        """The mapped bytes of a weight, as uint8."""
        return np.from_dlpack(self._weights)[weight.offset_bytes : weight.offset_bytes + weight.size_bytes]

    def put_on_gpu(self, offset_bytes: int, data: np.ndarray) -> None:
        """Write bytes into the GPU's arena. Raises DeviceError HC407 if the GPU fails."""
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        source = source if source.flags.writeable else source.copy()  # DLPack exports no read-only arrays
        self._copy(tvm_ffi.from_dlpack(source), self._bytes_on_gpu(offset_bytes, source.nbytes))

    def get_from_gpu(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """A copy of bytes of the GPU's arena. Raises DeviceError HC407 if the GPU fails."""
        data = np.empty(size_bytes, np.uint8)
        self._copy(self._bytes_on_gpu(offset_bytes, size_bytes), tvm_ffi.from_dlpack(data))
        return data

    def run(self) -> None:
        """Run the plan's steps; on return every lane is idle. Raises DeviceError HC407 if the GPU fails."""
        on_persistent_thread(self._run)

    def _run(self) -> None:
        limit_threads(self._threads)
        with _device_errors():
            self._run_lanes(self._lanes)

    def run_traced(self) -> dict[Lane, list[tuple[float, float]]]:
        """Run, and tell when the steps of each lane began and ended, in microseconds since the run's start.

        This run, and all later ones, are a little slower.
        """
        if not self._is_traced:
            for lane, machine in self._machines.items():
                machine.get_function("set_instrument")(self._helper("instrument")(self._lanes, lane.number))
            self._is_traced = True
        self.run()
        with _device_errors():
            times = {lane: list(self._helper("trace")(self._lanes, lane.number)) for lane in self._machines}
        return {lane: list(zip(marks[::2], marks[1::2], strict=True)) for lane, marks in times.items()}

    def allocated(self) -> Allocated:
        """Sizes of the allocations behind the arenas, and of the mapped weights file."""
        held = (self._gpu_arena, self._host_arena, self._pinned, self._weights)
        return Allocated(*(0 if tensor is None else int(tensor.shape[0]) for tensor in held))

    def close(self) -> None:
        """Free arenas, streams and events."""
        self._close_lanes()
        del self._gpu_arena, self._host_arena, self._pinned, self._weights

    def _helper(self, name: str) -> Any:
        return _helper(self._library, name)

    def _allocate_on_gpu(self, artifact: Artifact) -> Any:
        needed_bytes, free_bytes = artifact.plan.arena_bytes(Device.GPU), free_gpu_bytes(self._library)
        try:
            return self._helper("device_arena")(_GPU_INDEX, needed_bytes)
        except RuntimeError as error:
            what = f"the artifact needs {needed_bytes:,} bytes of GPU memory, but {free_bytes:,} are free"
            load = "load" if artifact.number else "compile"  # there are plans for less
            remedy = f"stop other programs on the GPU, or {load} with a smaller --gpu-memory"
            raise DeviceError("HC405", what, remedy=remedy) from error

    def _view(self, weight: StoredWeight, offset_bytes: int, arena: Any) -> Any:
        return self._helper("arena_view")(arena, offset_bytes, weight.shape, weight.dtype)

    def _upload(self, weights: tuple[StoredWeight, ...]) -> None:
        for weight in weights:
            assert weight.arena_offset_bytes is not None
            source = self._view(weight, weight.offset_bytes, self._weights)
            self._helper("upload")(source, self._view(weight, weight.arena_offset_bytes, self._gpu_arena))

    def _bytes_on_gpu(self, offset_bytes: int, size_bytes: int) -> Any:
        return self._helper("arena_view")(self._gpu_arena, offset_bytes, (size_bytes,), "uint8")

    def _copy(self, source: Any, target: Any) -> None:
        with _device_errors():
            self._helper("upload")(source, target)  # it goes by where the two are

    def _stage(self, weights: tuple[StoredWeight, ...]) -> list[Any]:
        """What each streamed weight is copied from: pinned memory, or the mapped file by way of slots."""
        if not weights:
            return []
        self._pinned = self._helper("host_arena")(self._staging.size_bytes, True)
        if self._staging.slot_count:
            self._helper("set_slots")(self._lanes, self._pinned, self._staging.slot_count)
            return [self._view(w, w.offset_bytes, self._weights) for w in weights]
        pinned, staged, offset = np.from_dlpack(self._pinned), [], 0
        for weight in weights:
            pinned[offset : offset + weight.size_bytes] = self.weight_bytes(weight)
            staged.append(self._view(weight, offset, self._pinned))
            offset += align(weight.size_bytes)
        return staged

    def _new_machine(self) -> Any:
        """A VM for one lane: one VM serves one thread at a time."""
        machine = self._library.get_function("vm_load_executable")()
        machine.get_function("vm_initialization")(_CPU, 0, _NAIVE)
        return machine


def open_library(artifact: Artifact) -> Any:
    """The code of an artifact, for `LoadedProgram`.

    Raises DeviceError HC402 where the NVIDIA driver or the CUDA runtime is missing and there is GPU code,
    HC410 where the system refuses tile registers that it needs; ArtifactError HC307 if the library cannot be
    loaded.
    """
    load_runtime(cuda=artifact.has_gpu_code)
    enable_amx(artifact.manifest.cpu_flags)
    _announce_image(artifact)
    return _load_library(artifact.library)


def free_gpu_bytes(library: Any) -> int:
    """Memory of the GPU that nobody holds. Raises DeviceError HC402 if there is no GPU."""
    try:
        return int(_helper(library, "free_device_bytes")(_GPU_INDEX))
    except RuntimeError as error:
        raise no_gpu(str(error).strip().splitlines()[-1]) from None


def gpu_page_bytes() -> int:
    """In which the GPU's driver reserves memory. CUDA does not tell; of an emulated GPU it is known."""
    gpu = emulated_gpu()
    return DRIVER_PAGE_BYTES if gpu is None else gpu.page_bytes


def _helper(library: Any, name: str) -> Any:
    return library.get_function(f"hybridc_{name}", query_imports=True)


@contextmanager
def _device_errors() -> Iterator[None]:
    """TVM and the helper report what CUDA refuses as RuntimeError, with CUDA's name of it at the end."""
    try:
        yield
    except RuntimeError as error:
        what = f"the device failed: {str(error).strip().splitlines()[-1]}"
        remedy = "check that the GPU works and has free memory; if so, this is a bug in hybridc"
        raise DeviceError("HC407", what, remedy=remedy) from error


def _announce_image(artifact: Artifact) -> None:
    gpu, source, key = emulated_gpu(), artifact.cuda_source(), artifact.manifest.cuda_image_key
    if gpu is not None and source is not None and key is not None:
        gpu.provide_kernels(key, source)


def _announce_plan(artifact: Artifact, arena: Any) -> None:
    gpu = emulated_gpu()
    if gpu is not None and arena is not None:
        gpu.guard_plan(artifact.graph, artifact.plan, arena.data_ptr())


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
    artifact was compiled again since.
    """
    with scratch_folder("hybridc-load-") as folder:
        link = folder / path.name
        link.symlink_to(path)
        return tvm_ffi.load_module(str(link))


def _map_weights(path: Path) -> Any:
    """The weights as one tensor of bytes whose pages are read when they are used.

    DLPack exports no read-only arrays, so the pages may be written, each then a copy of the process's own.
    The system would set memory aside for all of them, and refuse a file larger than that, but for NORESERVE.
    """
    if path.stat().st_size == 0:  # cannot be mapped; there may be weights without elements all the same
        return tvm_ffi.from_dlpack(np.empty(0, np.uint8))
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    with path.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, flags=flags, prot=access)
    return tvm_ffi.from_dlpack(np.frombuffer(pages, np.uint8))
