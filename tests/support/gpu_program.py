"""A small CUDA host program: what the tests need of the runtime and driver libraries, through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybridc import emulator

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
BLOCKING, NON_BLOCKING = 0, 1


class CudaError(Exception):
    """A non-zero code of a CUDA call, with its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcudart.so.13")  # the emulator's, already loaded under this name
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def call(function: str, *arguments: object) -> None:
    """Call a runtime function; raises CudaError unless it returns 0."""
    code = getattr(_library(), function)(*arguments)
    if code != 0:
        raise CudaError(code, _library().cudaGetErrorString(code).decode())


def create(function: str, *arguments: object) -> ctypes.c_void_p:
    """Call a runtime function that stores a new handle or pointer through its first argument."""
    handle = ctypes.c_void_p()
    call(function, ctypes.byref(handle), *arguments)
    return handle


_allocated: list[ctypes.c_void_p] = []


def allocate(size_bytes: int) -> ctypes.c_void_p:
    pointer = create("cudaMalloc", ctypes.c_size_t(size_bytes))
    _allocated.append(pointer)
    return pointer


def release(pointer: ctypes.c_void_p) -> None:
    _allocated.remove(pointer)
    call("cudaFree", pointer)


def release_all() -> None:
    """Free what `allocate` and `upload` gave out: other tests of this process count the device's bytes."""
    while _allocated:
        call("cudaFree", _allocated.pop())


def copy(
    target: ctypes.c_void_p,
    source: ctypes.c_void_p,
    size_bytes: int,
    kind: int,
    stream: ctypes.c_void_p | None = None,
) -> None:
    call("cudaMemcpyAsync", target, source, ctypes.c_size_t(size_bytes), kind, stream)


def address(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def upload(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """A device copy of `array`."""
    pointer = allocate(array.nbytes)
    copy(pointer, address(array), array.nbytes, HOST_TO_DEVICE)
    return pointer


def download(
    pointer: ctypes.c_void_p, count: int, stream: ctypes.c_void_p | None = None
) -> NDArray[np.float32]:
    """`count` float32 values, after the work of `stream`."""
    result = np.zeros(count, np.float32)
    copy(address(result), pointer, result.nbytes, DEVICE_TO_HOST, stream)
    return result


@dataclass
class Program:
    """CUDA source, compiled for the emulated device and loaded as the module of an invented image."""

    source: str
    _module: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)

    def __post_init__(self) -> None:
        image = b"image " + hashlib.sha256(self.source.encode()).hexdigest().encode()
        emulator.provide_kernels(emulator.image_key(image), self.source)
        code = _library().cuModuleLoadData(ctypes.byref(self._module), image)
        assert code == 0, code

    def launch(
        self,
        kernel: str,
        arguments: Sequence[object],
        *,
        grid: int = 1,
        block: int | tuple[int, int] = 32,
        shared_bytes: int = 0,
        stream: ctypes.c_void_p | None = None,
    ) -> int:
        """Launch on `stream`; returns the driver's code."""
        function = ctypes.c_void_p()
        code = _library().cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode())
        assert code == 0, code
        extent = (block, 1) if isinstance(block, int) else block
        config = _LaunchConfig((grid, 1, 1), (*extent, 1), shared_bytes, stream, None, 0)
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments)  # type: ignore[arg-type]
        )
        return int(_library().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))
