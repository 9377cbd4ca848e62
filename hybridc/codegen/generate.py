"""The library of a lowered module, whatever its target."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import tvm

from hybridc.codegen.cuda import check_architectures, compile_fatbin
from hybridc.codegen.gxx import check_compiler
from hybridc.codegen.library import BuiltLibrary, Progress, build_library
from hybridc.compile_cache import Cache
from hybridc.emulator import preload
from hybridc.errors import UsageError
from hybridc.machine import Machine, load_machine, machine_names
from hybridc.targets import Target, capability_of, runs_on


def check_tools(target: Target) -> None:
    """Raise DeviceError HC403 without g++, HC431 without NVRTC, UsageError HC501 for an architecture that
    NVRTC cannot compile for: what is certain to fail after minutes of work fails at once."""
    check_compiler()
    if target.has_gpu:
        check_architectures(target.cuda_architectures)


def check_gpu(target: Target, machine: Machine) -> None:
    """Raise UsageError HC503 if the machine profile's GPU could not load code for the target: plans are made
    for it. Of a profile without `chip` nothing is known."""
    chip = machine.gpu.chip
    if chip is None or not target.has_gpu or _loads(target, machine):
        return
    names = ",".join(target.cuda_architectures)
    gpu = f"{machine.gpu.name} ({chip.architecture})"
    what = f"the GPU of the machine profile {machine.name!r}, {gpu}, cannot load code for {names}"
    others = [name for name in machine_names() if _loads(target, load_machine(name))]
    fitting = f" ({', '.join(others)}, or one of your own)" if others else ""
    add = f"--target cuda:{chip.architecture},{names}+{target.cpu}"
    raise UsageError(
        "HC503", what, remedy=f"give the --machine that the code is for{fitting}, or write {add}"
    )


def _loads(target: Target, machine: Machine) -> bool:
    chip = machine.gpu.chip
    return chip is not None and runs_on(target.cuda_architectures, capability_of(chip.architecture))


def generate_code(
    module: tvm.IRModule,
    target: Target,
    folder: Path,
    progress: Progress = lambda done, total: None,
    cache: Cache | None = None,
    *,
    many_sizes: bool = False,
) -> BuiltLibrary:
    """Compile a lowered module, with `many_sizes` that of several buckets, to `folder/library.so`, but for
    what `cache` has of it.

    Raises as `build_library` and `compile_fatbin` do.
    """
    if target.has_gpu:
        preload()  # TVM embeds a CUDA image only where a driver can be loaded, a stub will do
    compile_cuda = partial(compile_fatbin, architectures=target.cuda_architectures)
    return build_library(
        module,
        target,
        folder,
        cuda_compile=compile_cuda,
        progress=progress,
        cache=cache,
        many_sizes=many_sizes,
    )
