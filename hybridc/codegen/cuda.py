"""CUDA C from TVM becomes one fat binary: NVRTC and nvFatbin from wheels, no toolkit and no driver."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import tvm_ffi

from hybridc.errors import DeviceError, InternalError

FATBIN_MAGIC = 0xBA55ED50
_CALLBACK = "tvm_callback_cuda_compile"

_PREAMBLE = """\
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""
"""What TVM's source takes from <math.h>, which NVRTC does not have."""


def compile_fatbin(source: str, architectures: tuple[str, ...]) -> bytes:
    """Compile CUDA C to one image: a cubin for each architecture, and PTX of the oldest for newer GPUs.

    `architectures` are names such as `sm_80`. No fast math: divisions and square roots are rounded
    to nearest, denormals are kept.

    Raises DeviceError HC401 if the wheels of the extra `cuda` are missing, InternalError HC902 with
    NVRTC's log if the source is refused.
    """
    _require_wheels()
    with ThreadPoolExecutor(len(architectures)) as pool:  # NVRTC runs without the interpreter's lock
        images = list(pool.map(lambda arch: _compile(source, arch), architectures))
    oldest = min(range(len(architectures)), key=lambda i: _number(architectures[i]))
    return _pack(architectures, [cubin for cubin, _ in images], _number(architectures[oldest]), images[oldest][1])


class CudaCapture:
    """While open, TVM's CUDA code generation leaves its source here and embeds our fat binary.

    with CudaCapture(("sm_80",)) as capture: library = tvm.compile(...)
    capture.source  # the CUDA C of everything compiled inside
    """

    def __init__(self, architectures: tuple[str, ...]) -> None:
        self.architectures = architectures
        self.sources: list[str] = []

    @property
    def source(self) -> str:
        return "\n".join(self.sources)

    def compile(self, source: str) -> bytes:
        """Keep the source and compile it; what TVM calls."""
        self.sources.append(str(source))
        return compile_fatbin(str(source), self.architectures)

    def __enter__(self) -> CudaCapture:
        self._previous = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
        tvm_ffi.register_global_func(_CALLBACK, self.compile, override=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            tvm_ffi.remove_global_func(_CALLBACK)
        else:
            tvm_ffi.register_global_func(_CALLBACK, self._previous, override=True)


def include_paths() -> tuple[Path, ...]:
    """Folders of the CUDA headers, from wheels. Raises DeviceError HC401 if they are not installed."""
    for root in _nvidia_folders():
        if (root / "cu13" / "include" / "cuda_fp16.h").is_file():
            include = root / "cu13" / "include"
            return tuple(path for path in (include, include / "cccl") if path.is_dir())
    raise _missing("nvidia-cuda-runtime (CUDA headers)")


def _nvidia_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def _require_wheels() -> None:
    try:
        import cuda.bindings.nvfatbin
        import cuda.bindings.nvrtc
    except ImportError as error:
        raise _missing("cuda-bindings") from error
    include_paths()


def _missing(package: str) -> DeviceError:
    return DeviceError(
        "HC401", f"compiling for CUDA needs {package}", remedy="pip install 'hybridc[cuda]'"
    )


def _number(architecture: str) -> int:
    return int("".join(c for c in architecture if c.isdigit()))


def _compile(source: str, architecture: str) -> tuple[bytes, bytes]:
    """The cubin and the PTX of a source."""
    from cuda.bindings import nvrtc

    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-default-device",
        "--device-int128",
        *(f"--include-path={path}" for path in include_paths()),
    ]
    encoded = [option.encode() for option in options]
    status, program = nvrtc.nvrtcCreateProgram((_PREAMBLE + source).encode(), b"kernels.cu", 0, None, None)
    _check(nvrtc, status)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n")
            raise InternalError("HC902", f"NVRTC refuses the generated CUDA source for {architecture}:\n{log}")
        return _read(nvrtc, program, "CUBIN"), _read(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    """One of a program's results, by NVRTC's pair of functions for its size and its bytes."""
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, status)
    buffer = bytes(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status)
    return buffer


def _check(nvrtc: Any, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InternalError("HC902", f"NVRTC failed: {status.name}")


def _pack(architectures: tuple[str, ...], cubins: list[bytes], ptx_architecture: int, ptx: bytes) -> bytes:
    from cuda.bindings import nvfatbin

    options = ["-64", "-host=linux"]
    handle = nvfatbin.create(options, len(options))
    try:
        for architecture, cubin in zip(architectures, cubins, strict=True):
            nvfatbin.add_cubin(handle, cubin, len(cubin), architecture.removeprefix("sm_"), "kernels")
        nvfatbin.add_ptx(handle, ptx, len(ptx), str(ptx_architecture), "kernels", "")
        image = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, image)
    finally:
        nvfatbin.destroy(handle)
    return bytes(image)
