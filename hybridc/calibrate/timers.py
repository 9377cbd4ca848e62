"""Times of single functions, and peaks, on the CPU and the GPU of this computer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import tvm
from tvm import te, tirx

from hybridc import emulator
from hybridc.calibrate.gpu_peak import multiply_adds
from hybridc.calibrate.peaks import copy_gb_s, copying, peak_gflops
from hybridc.codegen.cuda import compile_fatbin
from hybridc.codegen.library import CudaCompile, build_gpu_functions
from hybridc.errors import DeviceError
from hybridc.ir import Device
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import Target, missing_flags
from hybridc.tuning.measure import (
    Arguments,
    TimedKernel,
    arguments_bytes,
    call_times_ms,
    compiled,
    use_threads,
)

Clock = Callable[[], float]
"""Seconds."""

SECONDS_PER_KERNEL = 0.1
_CPU_COPY_BYTES = 1 << 24
_GPU_COPY_BYTES = 1 << 26
_CALLS_AT_ONCE = 20
_USABLE_SHARE = 0.75
"""Of the GPU's memory: other programs hold some, the driver more."""
_LEAST_BATCHES = 5


class Timer(Protocol):
    """Measures one processor."""

    device: Device

    def us(self, scheduled: Scheduled) -> float:
        """Microseconds of one call of a function, of many that follow one another, on cold buffers."""

    def fits(self, scheduled: Scheduled) -> bool:
        """Whether its memory holds what `us` needs for a function."""

    def peak_gflops(self) -> float:
        """Multiply-adds in registers, as two operations each, 1e9 a second."""

    def bandwidth_gb_s(self) -> float:
        """Bytes that a large copy reads and writes, 1e9 a second."""

    def copying(self) -> Callable[[], int]:
        """Copies much in the processor's own memory, to its end, and returns the bytes read and written."""


class CpuTimer:
    """Times the CPU, on as many threads as a session will have.

    Raises DeviceError HC401 if this processor lacks the target's instruction set.
    """

    device = Device.CPU

    def __init__(self, target: Target, threads: int) -> None:
        self._isa, self._threads = target.isa, threads
        missing = missing_flags(self._isa)
        if missing:
            what = f"this processor lacks {', '.join(missing)}, so {self._isa.name} cannot be measured on it"
            raise DeviceError("HC401", what, remedy="measure on a processor that has it")

    def fits(self, scheduled: Scheduled) -> bool:
        return True

    def us(self, scheduled: Scheduled) -> float:
        use_threads(self._threads)
        kernel = TimedKernel(compiled(scheduled, self._isa), Arguments(scheduled).sets_of(scheduled))
        [times_ms] = call_times_ms([kernel], SECONDS_PER_KERNEL)
        return _lower_quartile(times_ms) * 1e3

    def peak_gflops(self) -> float:
        use_threads(self._threads)
        return peak_gflops(self._isa, self._threads)

    def bandwidth_gb_s(self) -> float:
        use_threads(self._threads)
        return copy_gb_s(_CPU_COPY_BYTES, self._threads)

    def copying(self) -> Callable[[], int]:
        use_threads(self._threads)
        copy = copying(_CPU_COPY_BYTES, self._threads)
        return lambda: sum(copy() for _ in range(_CALLS_AT_ONCE))


class GpuTimer:
    """Times the GPU of this process. `clock` and `compile_cuda` are replaced by tests alone."""

    device = Device.GPU

    def __init__(
        self, target: Target, *, clock: Clock = time.perf_counter, compile_cuda: CudaCompile | None = None
    ) -> None:
        self._target, self._clock = target, clock
        self._compile = compile_cuda or partial(compile_fatbin, architectures=target.cuda_architectures)
        self._gpu = tvm.cuda(0)

    def fits(self, scheduled: Scheduled) -> bool:
        return arguments_bytes(scheduled) <= gpu_identity()[1] * _USABLE_SHARE

    def us(self, scheduled: Scheduled) -> float:
        call = self._compiled(scheduled.function)
        sets = Arguments(scheduled, device=self._gpu).sets_of(scheduled)
        self._seconds(call, sets, 1)
        times: list[float] = []
        end = self._clock() + SECONDS_PER_KERNEL
        while len(times) < _LEAST_BATCHES or self._clock() < end:
            times.append(self._seconds(call, sets, _CALLS_AT_ONCE) / _CALLS_AT_ONCE)
        return _lower_quartile(times) * 1e6

    def peak_gflops(self) -> float:
        function, flops = multiply_adds(self._target)
        return flops / self.us(function) / 1e3

    def bandwidth_gb_s(self) -> float:
        moved_bytes = 2 * _GPU_COPY_BYTES
        return moved_bytes / self.us(elementwise_copy(self._target, Device.GPU, _GPU_COPY_BYTES // 4)) / 1e3

    def copying(self) -> Callable[[], int]:
        scheduled = elementwise_copy(self._target, Device.GPU, _GPU_COPY_BYTES // 4)
        call = self._compiled(scheduled.function)
        sets = Arguments(scheduled, device=self._gpu).sets_of(scheduled)

        def copy() -> int:
            self._seconds(call, sets, _CALLS_AT_ONCE)
            return 2 * _GPU_COPY_BYTES * _CALLS_AT_ONCE

        return copy

    def _compiled(self, function: tirx.PrimFunc) -> Callable[..., None]:
        return build_gpu_functions({"main": function}, self._target, self._compile)["main"]

    def _seconds(
        self, call: Callable[..., None], sets: Sequence[Sequence[tvm.runtime.Tensor]], calls: int
    ) -> float:
        self._gpu.sync()
        start = self._clock()
        for turn in range(calls):
            call(*sets[turn % len(sets)])
        self._gpu.sync()
        return self._clock() - start


def elementwise_copy(target: Target, device: Device, elements: int) -> Scheduled:
    """A function that copies floats."""
    x = te.placeholder((elements,), "float32", "x")
    function = te.create_prim_func([x, te.compute((elements,), lambda i: x[i], "y")])
    made = schedule(Request(function, frozenset(), target), device)
    assert made is not None
    return made


def gpu_timer(target: Target) -> GpuTimer | None:
    """Of the NVIDIA GPU of this computer; None without one.

    Raises DeviceError HC409 if the GPU of this process is an emulated one.
    """
    if emulator.is_active():
        what = "an emulated GPU cannot be measured: its times do not represent any GPU"
        raise DeviceError("HC409", what, remedy="measure in a process that does not emulate one")
    if not emulator.has_real_driver():
        return None
    emulator.preload()  # with a driver on the machine this loads NVIDIA's own libraries
    return GpuTimer(target) if tvm.cuda(0).exist else None


def gpu_identity() -> tuple[str, int]:
    """Name and memory of the GPU of this process."""
    device = tvm.cuda(0)
    return str(device.device_name), int(device.total_global_memory)


def _lower_quartile(times: Sequence[float]) -> float:
    """Other programs make times longer, never shorter."""
    return statistics.quantiles(times)[0]
