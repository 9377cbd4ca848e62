"""What copies between host and GPU memory cost, through the CUDA runtime of this process."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from hybridc.errors import DeviceError
from hybridc.machine import Link
from hybridc.runtime.libraries import CUDA_RUNTIME

LARGE_BYTES = 1 << 26
_SMALL_BYTES = 4
_RUNS = 5
_SMALL_RUNS = 101
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: pointers tell the direction
_NON_BLOCKING = 1  # cudaStreamNonBlocking


@dataclass(frozen=True, slots=True)
class Direction:
    """A stream, and where its copies go from and to."""

    stream: ctypes.c_void_p
    target: ctypes.c_void_p
    source: ctypes.c_void_p

    def begin(self, size_bytes: int) -> None:
        """Copy without waiting."""
        size, kind = ctypes.c_size_t(size_bytes), ctypes.c_int(_MEMCPY_DEFAULT)
        _call("cudaMemcpyAsync", self.target, self.source, size, kind, self.stream)

    def end(self) -> None:
        """Wait for the copies."""
        _call("cudaStreamSynchronize", self.stream)


def measure_link(size_bytes: int = LARGE_BYTES, clock: Callable[[], float] = time.perf_counter) -> Link:
    """Bandwidths of copies of `size_bytes` from and to pinned memory, alone and in both directions at once,
    and the time that the smallest copy takes. Raises DeviceError HC407 where the device fails."""

    def seconds(directions: tuple[Direction, ...], size: int, runs: int) -> float:
        times = []
        for _ in range(runs + 1):
            start = clock()
            for direction in directions:
                direction.begin(size)
            for direction in directions:
                direction.end()
            times.append(clock() - start)
        return statistics.median(times[1:])

    with opened(size_bytes) as h2d, opened(size_bytes, to_host=True) as d2h:
        latency = statistics.mean(seconds((one,), _SMALL_BYTES, _SMALL_RUNS) for one in (h2d, d2h))
        alone = [seconds((one,), size_bytes, _RUNS) for one in (h2d, d2h)]
        both = seconds((h2d, d2h), size_bytes, _RUNS)
    h2d_gb_s, d2h_gb_s = (size_bytes / max(own - latency, own / 2) / 1e9 for own in alone)
    return Link(h2d_gb_s, d2h_gb_s, latency * 1e6, both_directions=min(max(alone) / both, 1.0))


@contextmanager
def opened(size_bytes: int, *, to_host: bool = False) -> Iterator[Direction]:
    """A stream with a buffer on the device and a pinned one on the host.

    Raises DeviceError HC407 where the device fails."""
    with ExitStack() as stack:

        def make(function: str, release: str, argument: ctypes.c_size_t | ctypes.c_uint) -> ctypes.c_void_p:
            handle = ctypes.c_void_p()
            _call(function, ctypes.byref(handle), argument)
            stack.callback(_call, release, handle)
            return handle

        device = make("cudaMalloc", "cudaFree", ctypes.c_size_t(size_bytes))
        host = make("cudaMallocHost", "cudaFreeHost", ctypes.c_size_t(size_bytes))
        stream = make("cudaStreamCreateWithFlags", "cudaStreamDestroy", ctypes.c_uint(_NON_BLOCKING))
        target, source = (host, device) if to_host else (device, host)
        yield Direction(stream, target, source)


def _call(function: str, *arguments: object) -> None:
    library = ctypes.CDLL(CUDA_RUNTIME)  # loaded already, NVIDIA's or the emulator's
    code = getattr(library, function)(*arguments)
    if code != 0:
        library.cudaGetErrorString.restype = ctypes.c_char_p
        reason = library.cudaGetErrorString(code).decode()
        remedy = "check that the GPU works and has free memory"
        raise DeviceError("HC407", f"the device failed: {function}: {reason}", remedy=remedy)
