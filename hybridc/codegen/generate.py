"""The library of a lowered module, whatever its target."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import tvm

from hybridc.codegen.cuda import check_architectures, compile_fatbin
from hybridc.codegen.library import BuiltLibrary, Progress, build_library, check_compiler
from hybridc.compile_cache import Cache
from hybridc.emulator import preload
from hybridc.targets import Target


def check_tools(target: Target) -> None:
    """Raise DeviceError HC403 without g++, HC431 without NVRTC, UsageError HC501 for an architecture that
    NVRTC cannot compile for: what is certain to fail after minutes of work fails at once."""
    check_compiler()
    if target.has_gpu:
        check_architectures(target.cuda_architectures)


def generate_code(
    module: tvm.IRModule,
    target: Target,
    folder: Path,
    progress: Progress = lambda done, total: None,
    cache: Cache | None = None,
) -> BuiltLibrary:
    """Compile a lowered module to `folder/library.so`, but for what `cache` has of it.

    Raises as `build_library` and `compile_fatbin` do.
    """
    if target.has_gpu:
        preload()  # TVM embeds a CUDA image only where a driver can be loaded, a stub will do
    compile_cuda = partial(compile_fatbin, architectures=target.cuda_architectures)
    return build_library(module, target, folder, cuda_compile=compile_cuda, progress=progress, cache=cache)
