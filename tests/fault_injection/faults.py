"""Which calls fail, and how: those of CUDA in the emulated driver, those of the system in Python."""

from __future__ import annotations

import errno
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hybridc import emulator, files
from hybridc.runtime import code, memory

KINDS = {
    "allocation": ("cudaMalloc", "cudaHostAlloc"),
    "copy": ("cudaMemcpyAsync",),
    "launch": ("cuLaunchKernelEx", "cudaGraphLaunch", "cuFuncSetAttribute"),
    "event": (
        *("cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize", "cudaEventElapsedTime"),
        "cudaStreamWaitEvent",
    ),
    "stream": ("cudaStreamCreateWithFlags", "cudaStreamSynchronize"),
    "graph": ("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"),
    "code": ("cuModuleLoadData", "cuModuleGetFunction"),
    "device": ("cudaGetDeviceCount", "cudaSetDevice", "cudaDeviceGetAttribute", "cudaMemGetInfo"),
    "file": ("open", "pread", "fstat", "mmap", "memfd_create"),
}
SYSTEM_CALLS = KINDS["file"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Call number `ordinal` of `function` fails; `is_lasting`: the device is lost with it."""

    function: str
    ordinal: int
    is_lasting: bool = False

    def __str__(self) -> str:
        return f"{self.function}[{self.ordinal}]{'!' * self.is_lasting}"

    @property
    def cuda_error(self) -> emulator.Fault:
        """What CUDA says: calls that make something run out of memory."""
        if self.is_lasting:
            return emulator.Fault.LAUNCH_FAILURE
        makes = any(
            word in self.function for word in ("Malloc", "Alloc", "Create", "Instantiate", "LoadData")
        )
        return emulator.Fault.OUT_OF_MEMORY if makes else emulator.Fault.UNKNOWN


def kind_of(function: str) -> str:
    """Raises StopIteration for a function that no kind has."""
    return next(kind for kind, functions in KINDS.items() if function in functions)


class _System:
    """A module whose calls are counted, and one of them fails."""

    def __init__(self, module: Any, counts: Counter[str], fault: Fault | None) -> None:
        self._module, self._counts, self._fault = module, counts, fault

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name not in SYSTEM_CALLS:
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            ordinal, fault = self._counts[name], self._fault
            self._counts[name] += 1
            if fault is not None and (fault.function, fault.ordinal) == (name, ordinal):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return value(*arguments, **options)

        return call


@contextmanager
def injected(fault: Fault | None) -> Iterator[Counter[str]]:
    """Let one call fail; counts them all meanwhile, by their names, which is complete at the end."""
    counts: Counter[str] = Counter()
    if fault is None or fault.function in SYSTEM_CALLS:
        emulator.fail_call()
    else:
        emulator.fail_call(fault.function, fault.ordinal, fault.cuda_error)
    with (
        mock.patch.object(files, "os", _System(os, counts, fault)),
        mock.patch.object(code, "os", _System(os, counts, fault)),
        mock.patch.object(memory, "mmap", _System(mmap, counts, fault)),
    ):
        yield counts
        counts.update(emulator.count_calls())
        emulator.fail_call()
