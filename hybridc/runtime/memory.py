"""What a session holds: an arena on each device, the mapped weights, and pinned memory to stream them from.

Plans for several buckets of sizes take turns in the same arenas, of which each is as large as the largest of
them needs.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredWeight
from hybridc.errors import ArtifactError, DeviceError, drop_locals
from hybridc.files import OpenFile
from hybridc.ir import Device, Plan
from hybridc.ir.plan import DRIVER_PAGE_BYTES, align
from hybridc.runtime.code import Library, missing_kernel
from hybridc.runtime.emulation import emulated_gpu
from hybridc.runtime.libraries import check_gpu, no_gpu
from hybridc.runtime.staging import available_host_bytes, check_room, choose_staging, host_room_bytes

GPU_INDEX = 0
_MAP_NORESERVE = 0x4000  # of Linux on x86; Python's mmap names it from 3.13 on


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes that were really allocated, or mapped from the artifact."""

    gpu_bytes: int
    host_bytes: int
    staging_bytes: int
    mapped_weight_bytes: int


HostPlace = tuple[int, int, np.dtype, tuple[int, ...]]
"""Begin and end in the host's arena, type and shape."""
_Resident = tuple[int, int | None, int]
"""A weight's place in the file and in the GPU's arena, and its bytes."""


class Memory:
    """Memory for the plans of an artifact, one for each bucket of sizes. Allocated once.

    With `gpu_arena` the GPU's arena is one that others use, too. Freed by `close`, or when it is collected.
    Raises DeviceError HC402 without the GPU that a plan needs, HC405 if the GPU has too little free memory,
    HC407 if it fails, HC408 if the host's memory may not hold what a run needs, HC413 if the artifact's code
    is for other GPUs.
    """

    def __init__(
        self,
        plans: Sequence[Artifact],
        library: Library,
        host_memory_bytes: int | None = None,
        gpu_arena: Any = None,
    ) -> None:
        self.library = library
        self.needs_gpu = any(each.needs_gpu for each in plans)
        self.host_arena: Any = None
        self.host_bytes: Any = None
        """The host's arena as uint8: where inputs are put and outputs are found."""
        self._arrays: dict[HostPlace, np.ndarray] = {}
        self.weights: Any = None
        self.pinned: Any = None
        if self.needs_gpu:
            with device_errors():
                check_gpu(plans[-1])
        streamed = {w.offset_bytes: w for each in plans for w in each.stored_plan.streamed_weights}
        sizes = [weight.size_bytes for weight in streamed.values()]
        host_bytes = max(each.plan.arena_bytes(Device.CPU) for each in plans)
        self.staging = choose_staging(sizes, host_bytes, host_memory_bytes, available_host_bytes())
        check_room(host_bytes + self.staging.size_bytes, host_room_bytes())
        self._resident: frozenset[_Resident] = frozenset()
        self._free: dict[tuple[int, _Resident], bool] = {}
        self.gpu_arena: Any = gpu_arena
        try:
            if self.needs_gpu and gpu_arena is None:
                self.gpu_arena = self._allocate_on_gpu(plans)
            self._allocate_on_host(plans[-1], host_bytes, list(streamed.values()))
        except BaseException:
            self.close()
            raise

    def helper(self, name: str) -> Any:
        """A function of the runtime's helper."""
        return self.library.helper(name)

    def mapped(self, weight: StoredWeight) -> Any:
        """A weight in the artifact's file."""
        return self.view(self.weights, weight, weight.offset_bytes)

    def staged(self, weight: StoredWeight) -> Any:
        """What a streamed weight is copied from: pinned memory, or the mapped file by way of slots."""
        if self.staging.slot_count:
            return self.mapped(weight)
        return self.view(self.pinned, weight, self._staged[weight.offset_bytes])

    def view(self, arena: Any, weight: StoredWeight, offset_bytes: int) -> Any:
        """A weight at a place of an arena."""
        return self.helper("arena_view")(arena, offset_bytes, weight.shape, weight.dtype)

    def hold(self, artifact: Artifact) -> None:
        """Have the resident weights of a plan in the GPU's arena: those that are not there yet are copied.

        Of those that are there only those are left that lie where the plan has them, or where it has nothing.
        """
        weights = artifact.stored_plan.gpu_weights
        wanted = frozenset((w.offset_bytes, w.arena_offset_bytes, w.size_bytes) for w in weights)
        left = frozenset(each for each in self._resident - wanted if self._is_free(artifact.plan, each))
        held = self._resident = self._resident & wanted | left  # also if a copy fails: others are overwritten
        for weight in weights:
            assert weight.arena_offset_bytes is not None
            if (weight.offset_bytes, weight.arena_offset_bytes, weight.size_bytes) not in held:
                target = self.view(self.gpu_arena, weight, weight.arena_offset_bytes)
                with device_errors(f"weight {weight.tensor!r}, which is copied to the GPU once"):
                    self.helper("upload")(self.mapped(weight), target)
        self._resident = wanted | left
        gpu = emulated_gpu()
        if gpu is not None and self.gpu_arena is not None:
            gpu.guard_plan(artifact.graph, artifact.plan, self.gpu_arena.data_ptr())

    def _is_free(self, plan: Plan, weight: _Resident) -> bool:
        """Whether a plan has nothing in the bytes of a weight that another one has there."""
        key = id(plan), weight
        if key not in self._free:
            _, start, size_bytes = weight
            self._free[key] = start is not None and not any(
                each.device is Device.GPU
                and each.offset_bytes < start + size_bytes
                and start < each.end_bytes
                for each in plan.buffers
            )
        return self._free[key]

    def weight_bytes(self, weight: StoredWeight) -> np.ndarray:
        """The mapped bytes of a weight, as uint8."""
        return np.from_dlpack(self.weights)[weight.offset_bytes : weight.offset_bytes + weight.size_bytes]

    def array(self, place: HostPlace) -> np.ndarray:
        """Bytes of the host's arena as an array, which is made once."""
        found = self._arrays.get(place)
        if found is None:
            begin, end, dtype, shape = place
            found = self._arrays[place] = self.host_bytes[begin:end].view(dtype).reshape(shape)
        return found

    def put_on_gpu(self, offset_bytes: int, data: np.ndarray) -> None:
        """Write bytes into the GPU's arena. Raises DeviceError HC407 if the GPU fails."""
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        source = source if source.flags.writeable else source.copy()  # DLPack exports no read-only arrays
        self.copy(tvm_ffi.from_dlpack(source), self._bytes_on_gpu(offset_bytes, source.nbytes))

    def get_from_gpu(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """A copy of bytes of the GPU's arena. Raises DeviceError HC407 if the GPU fails."""
        data = np.empty(size_bytes, np.uint8)
        self.copy(self._bytes_on_gpu(offset_bytes, size_bytes), tvm_ffi.from_dlpack(data))
        return data

    def copy(self, source: Any, target: Any) -> None:
        """Copy an array of tvm_ffi to another of the same size, on the host or the GPU.

        Raises DeviceError HC407 if the GPU fails.
        """
        with device_errors():
            self.helper("upload")(source, target)  # it goes by where the two are

    def allocated(self) -> Allocated:
        """Sizes of the allocations behind the arenas, and of the mapped weights file."""
        held = (self.gpu_arena, self.host_arena, self.pinned, self.weights)
        return Allocated(*(0 if tensor is None else int(tensor.shape[0]) for tensor in held))

    def close(self) -> None:
        """Free the arenas."""
        self._arrays.clear()
        self.gpu_arena = self.host_arena = self.host_bytes = self.pinned = self.weights = None

    def _allocate_on_gpu(self, plans: Sequence[Artifact]) -> Any:
        needed_bytes = max(each.plan.arena_bytes(Device.GPU) for each in plans)
        free_bytes = free_gpu_bytes(self.library)
        try:
            return self.helper("device_arena")(GPU_INDEX, needed_bytes)
        except RuntimeError as error:
            what = f"the artifact needs {needed_bytes:,} bytes of GPU memory, but {free_bytes:,} are free"
            load = "load" if plans[-1].has_smaller_plans else "compile"
            remedy = f"stop other programs on the GPU, or {load} with a smaller --gpu-memory"
            raise DeviceError("HC405", what, remedy=remedy) from error

    def _allocate_on_host(
        self, artifact: Artifact, host_bytes: int, streamed: Sequence[StoredWeight]
    ) -> None:
        arena_bytes, staging_bytes = max(host_bytes, 1), self.staging.size_bytes
        with step_errors(artifact):
            artifact.check_weights()
            with device_errors(f"the arena on the host, of {arena_bytes:,} pinned bytes"):
                self.host_arena = self.helper("host_arena")(arena_bytes, self.needs_gpu)
            self.host_bytes = np.from_dlpack(self.host_arena)
            self.weights = _map_weights(artifact.weights)
            with device_errors(f"the staging of streamed weights, of {staging_bytes:,} pinned bytes"):
                self.pinned = self.helper("host_arena")(staging_bytes, True) if streamed else None
            self._staged = self._stage(streamed)

    def _bytes_on_gpu(self, offset_bytes: int, size_bytes: int) -> Any:
        return self.helper("arena_view")(self.gpu_arena, offset_bytes, (size_bytes,), "uint8")

    def _stage(self, weights: Sequence[StoredWeight]) -> dict[int, int]:
        """Where in the pinned memory each weight is, by its place in the file, if all of them are."""
        if not weights or self.staging.slot_count:
            return {}
        places, offset = {}, 0
        pinned: Any = np.from_dlpack(self.pinned)
        for weight in weights:
            pinned[offset : offset + weight.size_bytes] = self.weight_bytes(weight)
            places[weight.offset_bytes] = offset
            offset += align(weight.size_bytes)
        return places


def free_gpu_bytes(library: Library) -> int:
    """Memory of the GPU that nobody holds. Raises DeviceError HC402 if there is no GPU."""
    try:
        return int(library.helper("free_device_bytes")(GPU_INDEX))
    except RuntimeError as error:
        raise no_gpu(str(error).strip().splitlines()[-1]) from None


def gpu_page_bytes() -> int:
    """In which the GPU's driver reserves memory. CUDA does not tell; of an emulated GPU it is known."""
    gpu = emulated_gpu()
    return DRIVER_PAGE_BYTES if gpu is None else gpu.page_bytes


@contextmanager
def device_errors(where: str | Callable[[], str] = "") -> Iterator[None]:
    """TVM and the helper report what CUDA refuses as RuntimeError, with CUDA's name of it.

    `where` says what it was for, once it has failed.
    """
    try:
        yield
    except RuntimeError as error:
        drop_locals(error)
        told = str(error).partition("// CUDA Source")[0]  # which may be thousands of lines
        what = f"the device failed: {' '.join(told.split())}"
        remedy = "check that the GPU works and has free memory; if so, this is a bug in hybridc"
        place = where if isinstance(where, str) else where()
        raise DeviceError("HC407", what, where=place, remedy=remedy) from error


@contextmanager
def step_errors(artifact: Artifact) -> Iterator[None]:
    """What the helper and the kernels refuse to do: they check every size, place and number again."""
    try:
        yield
    except RuntimeError as error:
        refusal = missing_kernel(artifact, error)
        if refusal is None:
            raise
        raise refusal from error
    except (TypeError, ValueError) as error:
        artifact.check_weights()  # a file that was cut a moment ago cannot be mapped
        what = f"its plan cannot be run: {' '.join(str(error).split())}"
        raise ArtifactError(
            "HC306", what, where=str(artifact.path), remedy="compile the model again"
        ) from error


def _map_weights(file: OpenFile) -> Any:
    """The weights as one tensor of bytes whose pages are read when they are used.

    DLPack exports no read-only arrays, so the pages may be written, each then a copy of the process's own.
    The system would set memory aside for all of them, and refuse a file larger than that, but for NORESERVE.
    """
    if file.size_bytes == 0:  # cannot be mapped; there may be weights without elements all the same
        return tvm_ffi.from_dlpack(np.empty(0, np.uint8))
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        pages = mmap.mmap(file.handle, file.size_bytes, flags=flags, prot=access)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # which is told as that of any other part
            raise
        what = f"the weights cannot be mapped: {error.strerror}"
        remedy = "copy the artifact to another file system, or compile the model again"
        raise ArtifactError("HC304", what, where=str(file.path), remedy=remedy) from error
    return tvm_ffi.from_dlpack(np.frombuffer(pages, np.uint8))
