"""CUDA C from TVM becomes one fat binary: NVRTC and nvFatbin from wheels, no toolkit and no driver."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridc.codegen.cuda_headers import HEADERS
from hybridc.errors import DeviceError, InternalError, UsageError

_PREAMBLE = """\
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""
"""What TVM's source takes from <math.h>, which NVRTC does not have."""


@dataclass(frozen=True, slots=True)
class _Image:
    """Machine code of one architecture, and the PTX it was made from."""

    architecture: str
    cubin: bytes
    ptx: bytes


def check_architectures(architectures: tuple[str, ...]) -> None:
    """Raise UsageError HC501 for one that NVRTC cannot compile for, DeviceError HC431 without NVRTC."""
    nvrtc, _, _ = _wheels()
    status, known = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, status)
    for name in architectures:
        if int(re.sub(r"\D", "", name)) not in known:
            remedy = f"it supports {', '.join(f'sm_{number}' for number in known)}"
            raise UsageError("HC501", f"the installed NVRTC cannot compile for {name}", remedy=remedy)


def compile_fatbin(source: str, architectures: tuple[str, ...]) -> bytes:
    """Compile CUDA C to one image: a cubin for each architecture, and PTX of the oldest for newer GPUs.

    `architectures` are names such as `sm_80`. No fast math: divisions and square roots are rounded
    to nearest, denormals are kept.

    Raises DeviceError HC431 if the wheels of the extra `cuda` are missing, InternalError HC920 with
    NVRTC's errors if the source is refused.
    """
    nvrtc, nvfatbin, includes = _wheels()
    with ThreadPoolExecutor(len(architectures)) as pool:  # NVRTC runs without the interpreter's lock
        images = list(pool.map(lambda arch: _compile(nvrtc, source, arch, includes), architectures))
    return _pack(nvfatbin, images)


def compile_cubin(source: str, architecture: str, include: Sequence[Path] = ()) -> bytes:
    """Compile CUDA C++ for one architecture; `include` are further folders of headers. Raises as
    `compile_fatbin` does."""
    nvrtc, _, includes = _wheels()
    return _compile(nvrtc, source, architecture, (*includes, *include)).cubin


def _wheels() -> tuple[Any, Any, tuple[Path, ...]]:
    """NVRTC, nvFatbin and the folders of the CUDA headers."""
    try:
        from cuda.bindings import nvfatbin, nvrtc

        nvrtc.nvrtcVersion()  # the bindings load the libraries at their first call
        nvfatbin.version()
    except (ImportError, RuntimeError, OSError) as error:
        raise _missing("NVRTC and nvFatbin") from error
    return nvrtc, nvfatbin, _include_paths()


def _include_paths() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        include = Path(root) / "cu13" / "include"
        if (include / "cuda_fp16.h").is_file() and (include / "cccl").is_dir():
            return include, include / "cccl"
    raise _missing("the CUDA headers")


def _missing(what: str) -> DeviceError:
    remedy = "pip install 'hybridc[cuda]'"
    return DeviceError("HC431", f"compiling for CUDA requires {what}, which are not installed", remedy=remedy)


def _compile(nvrtc: Any, source: str, architecture: str, includes: tuple[Path, ...]) -> _Image:
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-default-device",
        "--device-int128",
        *(f"--include-path={path}" for path in includes),
    ]
    names, headers = ([text.encode() for text in part] for part in zip(*HEADERS.items(), strict=True))
    content = (_PREAMBLE + source).encode()
    status, program = nvrtc.nvrtcCreateProgram(content, b"kernels.cu", len(names), headers, names)
    _check(nvrtc, status)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            errors = "\n".join(line for line in log.splitlines() if ": error: " in line) or log
            raise InternalError("HC920", f"NVRTC rejects the CUDA source for {architecture}:\n{errors}")
        _check(nvrtc, status)
        return _Image(architecture, _read(nvrtc, program, "CUBIN"), _read(nvrtc, program, "PTX"))
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
        raise InternalError("HC920", f"NVRTC failed: {status.name}")


def _pack(nvfatbin: Any, images: list[_Image]) -> bytes:
    oldest = min(images, key=lambda image: int("".join(filter(str.isdigit, image.architecture))))
    options = ["-64", "-host=linux"]
    handle = nvfatbin.create(options, len(options))
    try:
        for image in images:
            arch = image.architecture.removeprefix("sm_")
            nvfatbin.add_cubin(handle, image.cubin, len(image.cubin), arch, "kernels")
        arch = oldest.architecture.removeprefix("sm_")
        nvfatbin.add_ptx(handle, oldest.ptx, len(oldest.ptx), arch, "kernels", "")
        fatbin = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, fatbin)
    finally:
        nvfatbin.destroy(handle)
    return bytes(fatbin)
