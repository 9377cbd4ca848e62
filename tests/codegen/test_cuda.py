"""NVRTC and nvFatbin make images that name what they hold, and errors that say what to do."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from hybridc.codegen import cuda
from hybridc.codegen.cuda import check_architectures, compile_fatbin
from hybridc.codegen.cuda_headers import LIBRARY_HEADERS
from hybridc.errors import DeviceError, InternalError, UsageError

pytest.importorskip("cuda.bindings.nvrtc")

FATBIN_MAGIC = 0xBA55ED50
PTX, ELF = 1, 2

SCALE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }'


def entries(fatbin: bytes) -> list[tuple[int, int]]:
    """(kind, architecture) of everything in a fat binary."""
    magic, _, header_bytes, body_bytes = struct.unpack_from("<IHHQ", fatbin)
    assert magic == FATBIN_MAGIC
    assert header_bytes + body_bytes <= len(fatbin)
    found, offset = [], header_bytes
    while offset < header_bytes + body_bytes:
        kind, _, entry_header_bytes, size_bytes = struct.unpack_from("<HHIQ", fatbin, offset)
        (architecture,) = struct.unpack_from("<I", fatbin, offset + 28)
        found.append((kind, architecture))
        offset += entry_header_bytes + size_bytes
    return found


def test_image_holds_code_for_each_architecture_and_ptx_of_the_oldest() -> None:
    fatbin = compile_fatbin(SCALE, ("sm_90", "sm_80"))
    assert sorted(entries(fatbin)) == [(PTX, 80), (ELF, 80), (ELF, 90)]


def test_source_sees_its_generation_and_ptx_of_each_is_there() -> None:
    source = """
#if __CUDA_ARCH__ == 800
__global__ void f(int x) { asm("cp.async.wait_all;"); }
#elif __CUDA_ARCH__ == 750
__global__ void f(int x) {}
#endif
"""
    fatbin = compile_fatbin(source, ("sm_90", "sm_80", "sm_75"))
    assert sorted(entries(fatbin)) == [(PTX, 75), (PTX, 80), (ELF, 75), (ELF, 80), (ELF, 90)]


def test_ptx_of_one_gpu_alone_is_not_taken_for_others() -> None:
    fatbin = compile_fatbin(SCALE, ("sm_75", "sm_90a", "sm_100"))
    assert sorted(entries(fatbin))[:2] == [(PTX, 75), (PTX, 100)]
    assert (PTX, 90) in entries(compile_fatbin(SCALE, ("sm_90a",)))


def test_same_source_gives_the_same_image() -> None:
    assert compile_fatbin(SCALE, ("sm_80",)) == compile_fatbin(SCALE, ("sm_80",))


def test_headers_and_constants_of_generated_source_are_found() -> None:
    source = (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <mma.h>\n#include <math_constants.h>\n"
        "#include <cuda/std/cstdint>\n"
        'extern "C" __global__ void f(half* x, float* y) { x[0] = __float2half(INFINITY); y[0] = NAN; }'
    )
    assert (ELF, 80) in entries(compile_fatbin(source, ("sm_80",)))


def test_refused_source_is_an_internal_error_with_the_log() -> None:
    with pytest.raises(InternalError, match=r'kernels\.cu\(\d+\).*\n?.*"nowhere" is undefined') as caught:
        compile_fatbin("__global__ void f() { nowhere = 1; }", ("sm_80",))
    assert caught.value.code == "HC920"


def test_ptx_that_an_older_architecture_lacks_is_an_internal_error() -> None:
    source = '__global__ void f(int x) { asm("cp.async.wait_all;"); }'
    assert compile_fatbin(source, ("sm_80",))
    with pytest.raises(InternalError, match=r"cp\.async") as caught:
        compile_fatbin(source, ("sm_75",))
    assert caught.value.code == "HC920"


def test_unknown_architecture_is_an_error() -> None:
    with pytest.raises(InternalError):
        compile_fatbin(SCALE, ("sm_11",))


def test_missing_wheels_name_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError) as caught:
        compile_fatbin(SCALE, ("sm_80",))
    assert caught.value.code == "HC431"
    assert "hybridc[cuda]" in caught.value.remedy


def test_missing_headers_name_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="headers"):
        compile_fatbin(SCALE, ("sm_80",))


def test_architecture_that_nvrtc_does_not_know_is_the_users_error() -> None:
    check_architectures(("sm_80", "sm_90a"))
    with pytest.raises(UsageError, match="sm_999") as refusal:
        check_architectures(("sm_80", "sm_999"))
    assert refusal.value.code == "HC501" and "sm_90" in refusal.value.remedy


def test_short_headers_say_what_those_of_cuda_do():
    """The language's own library, which g++ has, is the oracle."""
    whole = ("char", "short", "int", "long")
    signs = [f"{sign} {kind}" for sign in ("signed", "unsigned") for kind in whole]
    traits = ("is_integral", "is_signed", "is_unsigned", "is_floating_point")
    claims = [
        f"cuda::std::{trait}<{kind}>::value == std::{trait}<{kind}>::value"
        for trait in traits
        for kind in (*whole, *signs, "bool", "float", "double")
    ]
    widths = (8, 16, 32, 64)
    claims += [f"sizeof(cuda::std::{s}int{bits}_t) * 8 == {bits}" for s in ("", "u") for bits in widths]
    claims += [
        "std::is_same_v<cuda::std::conditional<true, int, char>::type, int>",
        "std::is_same_v<cuda::std::enable_if<true, int>::type, int>",
        "!cuda::std::is_same<int, long>::value && cuda::std::is_same_v<int, int>",
    ]
    short = "\n".join(LIBRARY_HEADERS.values()).replace("#pragma once", "")
    source = "\n".join(["#include <type_traits>", short, *(f"static_assert({claim});" for claim in claims)])
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    subprocess.run(command, input=source, text=True, check=True)
