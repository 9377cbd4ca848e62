"""A loaded library with its arenas and lanes: everything of a run that is not about names and feeds."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.artifact.load import Artifact
from hybridc.artifact.manifest import StoredWeight
from hybridc.errors import ArtifactError, DeviceError
from hybridc.files import OpenFile
from hybridc.ir import Device, Lane
from hybridc.ir.bind import Binding, FaultRows, Operand, View, Weight
from hybridc.ir.plan import DRIVER_PAGE_BYTES, align
from hybridc.runtime.code import Library, missing_kernel
from hybridc.runtime.emulation import emulated_gpu
from hybridc.runtime.faults import Faults
from hybridc.runtime.libraries import check_gpu, no_gpu
from hybridc.runtime.staging import available_host_bytes, check_room, choose_staging, host_room_bytes

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
    HC407 if it fails, HC408 if the host's memory may not hold what a run needs, HC413 if the artifact's code
    is for other GPUs.
    """

    def __init__(
        self,
        artifact: Artifact,
        binding: Binding,
        library: Library,
        threads: int,
        host_memory_bytes: int | None = None,
    ) -> None:
        if artifact.needs_gpu:
            check_gpu(artifact)
        self._library = library
        sizes = [w.size_bytes for w in artifact.stored_plan.streamed_weights]
        host_bytes = artifact.plan.arena_bytes(Device.CPU)
        self._staging = choose_staging(sizes, host_bytes, host_memory_bytes, available_host_bytes())
        check_room(host_bytes + self._staging.size_bytes, host_room_bytes())
        self._gpu_arena = self._allocate_on_gpu(artifact) if artifact.needs_gpu else None
        _announce_plan(artifact, self._gpu_arena)
        with _device_errors(), _step_errors(artifact):
            self._prepare(artifact, binding, threads)

    def _prepare(self, artifact: Artifact, binding: Binding, threads: int) -> None:
        """Allocate the host's arena, put weights in their places, and give the lanes their steps."""
        stored = artifact.stored_plan
        artifact.check_weights()
        host_bytes = max(artifact.plan.arena_bytes(Device.CPU), 1)
        self._host_arena = self._helper("host_arena")(host_bytes, artifact.needs_gpu)
        self._weights = _map_weights(artifact.weights)
        self._artifact = artifact
        self._pinned: Any = None
        self._upload(stored.gpu_weights)
        self._lanes = self._helper("open_lanes")(artifact.needs_gpu, _GPU_INDEX, threads)
        self._close_lanes = weakref.finalize(self, self._helper("close_lanes"), self._lanes)
        self._run_lanes = self._helper("run")
        self._faults: Faults | None = None
        if binding.checks:
            pinned = artifact.needs_gpu
            self._faults = Faults(self._helper, binding.checks, pinned=pinned, gpu=_GPU_INDEX)
            self._faults.watch(self._lanes)
        self._used_lanes = frozenset(step.lane for step in binding.steps)
        read = {w.weight: self._view(w, w.offset_bytes, self._weights) for w in stored.host_weights}
        self._add_steps(binding, read, self._stage(stored.streamed_weights))

    def _add_steps(
        self, binding: Binding, read: Mapping[Weight, Any], streamed: Mapping[Weight, Any]
    ) -> None:
        """Give the lanes their steps. Arrays that several steps touch are made once."""
        arenas = {Device.GPU: self._gpu_arena, Device.CPU: self._host_arena}

        @functools.cache
        def made(operand: View | FaultRows) -> Any:
            if isinstance(operand, FaultRows):
                assert self._faults is not None
                return self._faults.array(operand)
            where = arenas[operand.device], operand.offset_bytes
            return self._helper("arena_view")(*where, operand.shape, operand.dtype)

        def array(operand: Operand, weights: Mapping[Weight, Any]) -> Any:
            return weights[operand] if isinstance(operand, Weight) else made(operand)

        for step in binding.steps:
            event = -1 if step.event is None else step.event
            if step.function is not None:
                function = self._library.function(step.function)
                arrays = [array(operand, read) for operand in step.operands]
                self._helper("add_call")(self._lanes, step.lane.number, step.waits, function, arrays, event)
                continue
            source, target = (array(operand, streamed) for operand in step.operands)
            if isinstance(step.operands[0], Weight):
                self._helper("add_stream")(self._lanes, step.waits, source, target, event)
            else:
                self._helper("add_copy")(self._lanes, step.lane.number, step.waits, source, target, event)

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
        with _device_errors():
            self._helper("upload")(source, target)  # it goes by where the two are

    def run(self) -> None:
        """Run the plan's steps; on return every lane is idle.

        Raises DeviceError HC407 if the GPU fails, ArtifactError HC304 if the weights' file was changed,
        UsageError HC560 if a kernel has found a value that its node does not allow: the next run starts
        afresh.
        """
        self._artifact.check_weights()
        try:
            with _device_errors(), _step_errors(self._artifact):
                fault = self._run_lanes(self._lanes)
            if self._faults is not None and fault >= 0:
                raise self._faults.error(fault)
        except BaseException:
            if self._faults is not None:
                self._faults.clear()
            raise

    def run_traced(self) -> dict[Lane, list[tuple[float, float]]]:
        """Run, and tell when the steps of each lane began and ended, in microseconds since the run's start.

        This run, and all later ones, are a little slower.
        """
        self._helper("start_tracing")(self._lanes)
        self.run()
        with _device_errors():
            times = {lane: list(self._helper("trace")(self._lanes, lane.number)) for lane in self._used_lanes}
        return {lane: list(zip(marks[::2], marks[1::2], strict=True)) for lane, marks in times.items()}

    def allocated(self) -> Allocated:
        """Sizes of the allocations behind the arenas, and of the mapped weights file."""
        held = (self._gpu_arena, self._host_arena, self._pinned, self._weights)
        return Allocated(*(0 if tensor is None else int(tensor.shape[0]) for tensor in held))

    def close(self) -> None:
        """Free arenas, streams and events."""
        self._close_lanes()
        del self._gpu_arena, self._host_arena, self._pinned, self._weights, self._faults

    def _helper(self, name: str) -> Any:
        return self._library.helper(name)

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

    def _stage(self, weights: tuple[StoredWeight, ...]) -> dict[Weight, Any]:
        """What each streamed weight is copied from: pinned memory, or the mapped file by way of slots."""
        if not weights:
            return {}
        self._pinned = self._helper("host_arena")(self._staging.size_bytes, True)
        if self._staging.slot_count:
            self._helper("set_slots")(self._lanes, self._pinned, self._staging.slot_count)
            return {w.weight: self._view(w, w.offset_bytes, self._weights) for w in weights}
        pinned, staged, offset = np.from_dlpack(self._pinned), {}, 0
        for weight in weights:
            pinned[offset : offset + weight.size_bytes] = self.weight_bytes(weight)
            staged[weight.weight] = self._view(weight, offset, self._pinned)
            offset += align(weight.size_bytes)
        return staged


def free_gpu_bytes(library: Library) -> int:
    """Memory of the GPU that nobody holds. Raises DeviceError HC402 if there is no GPU."""
    try:
        return int(library.helper("free_device_bytes")(_GPU_INDEX))
    except RuntimeError as error:
        raise no_gpu(str(error).strip().splitlines()[-1]) from None


def gpu_page_bytes() -> int:
    """In which the GPU's driver reserves memory. CUDA does not tell; of an emulated GPU it is known."""
    gpu = emulated_gpu()
    return DRIVER_PAGE_BYTES if gpu is None else gpu.page_bytes


@contextmanager
def _device_errors() -> Iterator[None]:
    """TVM and the helper report what CUDA refuses as RuntimeError, with CUDA's name of it."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).partition("// CUDA Source")[0]  # which may be thousands of lines
        what = f"the device failed: {' '.join(told.split())}"
        remedy = "check that the GPU works and has free memory; if so, this is a bug in hybridc"
        raise DeviceError("HC407", what, remedy=remedy) from error


@contextmanager
def _step_errors(artifact: Artifact) -> Iterator[None]:
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


def _announce_plan(artifact: Artifact, arena: Any) -> None:
    gpu = emulated_gpu()
    if gpu is not None and arena is not None:
        gpu.guard_plan(artifact.graph, artifact.plan, arena.data_ptr())


def _map_weights(file: OpenFile) -> Any:
    """The weights as one tensor of bytes whose pages are read when they are used.

    DLPack exports no read-only arrays, so the pages may be written, each then a copy of the process's own.
    The system would set memory aside for all of them, and refuse a file larger than that, but for NORESERVE.
    """
    if file.size_bytes == 0:  # cannot be mapped; there may be weights without elements all the same
        return tvm_ffi.from_dlpack(np.empty(0, np.uint8))
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    pages = mmap.mmap(file.handle, file.size_bytes, flags=flags, prot=access)
    return tvm_ffi.from_dlpack(np.frombuffer(pages, np.uint8))
