"""CUDA C from TVM becomes one fat binary, with libraries from wheels: no toolkit and no driver.

NVRTC compiles the source to PTX for the oldest architecture and for the oldest that has what came with
sm_80, and nvJitLink assembles one of them for each. Of the time of NVRTC two thirds go into PTX, so five
architectures cost as much as three would one by one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hybridc.codegen.cuda_headers import HEADERS
from hybridc.errors import DeviceError, InternalError, UsageError
from hybridc.targets import architecture_number, oldest

_PREAMBLE = """\
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""
"""What TVM's source takes from <math.h>, which NVRTC does not have."""

_AMPERE = 80
"""Brought bfloat16, asynchronous copies and matrix products of twice the depth: the headers ask for it."""


def check_architectures(architectures: tuple[str, ...]) -> None:
    """Raise UsageError HC501 for one that NVRTC cannot compile for, DeviceError HC431 without NVRTC."""
    nvrtc, _ = _wheels()
    status, known = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, status)
    for name in architectures:
        if architecture_number(name) not in known:
            remedy = f"it supports {', '.join(f'sm_{number}' for number in known)}"
            raise UsageError("HC501", f"the installed NVRTC cannot compile for {name}", remedy=remedy)


def compile_fatbin(source: str, architectures: tuple[str, ...]) -> bytes:
    """Compile CUDA C to one image: a cubin for each architecture, and PTX for newer GPUs.

    `architectures` are names such as `sm_80`. As `__CUDA_ARCH__` the source sees the oldest of them, or for
    those from sm_80 on the oldest of these. No fast math: divisions and square roots are rounded to nearest,
    denormals are kept.

    Raises DeviceError HC431 if the wheels of the extra `cuda` are missing, InternalError HC920 with the
    errors of NVRTC or nvJitLink if one refuses the source.
    """
    nvrtc, includes = _wheels()
    bases = {name: _base(name, architectures) for name in architectures}

    def ptx_of(base: str) -> bytes:
        return _compile(nvrtc, source, base.replace("sm_", "compute_"), includes, "PTX")

    with ThreadPoolExecutor() as pool:
        names = sorted(set(bases.values()))
        ptx = dict(zip(names, pool.map(ptx_of, names), strict=True))
    # one after the other: nvJitLink has a lock of its own, so that threads gain nothing
    return _pack({name: _assemble(ptx[base], name) for name, base in bases.items()}, ptx)


def _base(name: str, architectures: tuple[str, ...]) -> str:
    """The architecture whose PTX becomes code for `name`."""
    number = architecture_number(name)
    # PTX of such as sm_90a serves no other
    plain = [a for a in architectures if a[-1].isdigit() and _AMPERE <= architecture_number(a) <= number]
    return oldest(plain or architectures)


def compile_cubin(source: str, architecture: str, include: Sequence[Path] = ()) -> bytes:
    """Compile CUDA C++ for one architecture; `include` are further folders of headers. Raises as
    `compile_fatbin` does."""
    nvrtc, includes = _wheels()
    return _compile(nvrtc, source, architecture, (*includes, *include), "CUBIN")


def _wheels() -> tuple[Any, tuple[Path, ...]]:
    """NVRTC and the folders of the CUDA headers, where nvJitLink and nvFatbin are there as well."""
    try:
        from cuda.bindings import nvfatbin, nvjitlink, nvrtc

        nvrtc.nvrtcVersion()  # the bindings load the libraries at their first call
        nvjitlink.version()
        nvfatbin.version()
    except (ImportError, RuntimeError, OSError) as error:
        raise _missing("NVRTC, nvJitLink and nvFatbin") from error
    return nvrtc, _include_paths()


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


def _compile(nvrtc: Any, source: str, architecture: str, includes: tuple[Path, ...], result: str) -> bytes:
    """The source's `CUBIN` for such as `sm_80`, or `PTX` for such as `compute_80`."""
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
        return _read(nvrtc, program, result)
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


def _assemble(ptx: bytes, architecture: str) -> bytes:
    """Machine code of one architecture."""
    from cuda.bindings import nvjitlink

    options = [f"-arch={architecture}"]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), "kernels")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        told = log.rstrip(b"\0\n").decode(errors="replace") or str(error)
        raise InternalError("HC920", f"nvJitLink rejects the PTX for {architecture}:\n{told}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _pack(cubins: dict[str, bytes], ptx: dict[str, bytes]) -> bytes:
    """All in one image. Compressed, several architectures take less room than one that is not."""
    from cuda.bindings import nvfatbin

    options = ["-64", "-host=linux", "-compress-all"]
    handle = nvfatbin.create(options, len(options))
    try:
        for name, cubin in cubins.items():
            nvfatbin.add_cubin(handle, cubin, len(cubin), name.removeprefix("sm_"), "kernels")
        for name, text in ptx.items():
            nvfatbin.add_ptx(handle, text, len(text), name.removeprefix("sm_"), "kernels", "")
        fatbin = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, fatbin)
    finally:
        nvfatbin.destroy(handle)
    return bytes(fatbin)
