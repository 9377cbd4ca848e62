"""IRModule -> one shared library: CPU code, CUDA image, VM bytecode and the runtime's helper.

The CPU's functions are independent, so they are compiled as several LLVM modules side by side. One
module, the one that also holds the launchers of the CUDA kernels if there are any, is the root that TVM
exports; the others are linked to it as plain objects, where the VM finds their symbols all the same.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import _ffi_api as relax_ffi
from tvm_ffi import libinfo

from hybridc.errors import DeviceError, InternalError
from hybridc.passes.lower import cuda_target, llvm_target
from hybridc.targets import Target

CudaCompile = Callable[[str], bytes]
"""CUDA C++ source -> image (cubin, fatbin, or the emulator's)."""

Progress = Callable[[int, int], None]
"""Called with (kernels compiled so far, kernels in all)."""

HELPER_SOURCE = Path(__file__).parent.parent / "runtime" / "native" / "helper.cc"
FUNCTIONS_PER_MODULE = 8
"""Few enough that the modules balance over the cores, enough that LLVM's start-up does not count."""


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A library on disk and what it was made of."""

    path: Path
    cuda_source: str | None
    cuda_image: bytes | None
    seconds: dict[str, float]
    """Wall time of each stage: cuda, llvm, helper, link."""


@dataclass
class _Capture:
    """What went through the CUDA compiler."""

    source: str | None = None
    image: bytes | None = None


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def build_library(
    module: tvm.IRModule,
    target: Target,
    directory: Path,
    *,
    cuda_compile: CudaCompile | None = None,
    progress: Progress = lambda done, total: None,
) -> BuiltLibrary:
    """Compile a lowered module to `directory/library.so`.

    `cuda_compile` is needed where the module has CUDA functions. Raises DeviceError HC403 without g++,
    HC404 where the CUDA source does not compile, InternalError HC912 where TVM or the linker fails.
    """
    clock = _Clock()
    gpu, cpu, bytecode = _split(module)
    total = len(gpu) + len(cpu)
    chunks = [dict(cpu[i : i + FUNCTIONS_PER_MODULE]) for i in range(0, len(cpu), FUNCTIONS_PER_MODULE)]
    capture = _Capture()
    with tempfile.TemporaryDirectory(prefix="hybridc-build-") as scratch_name:
        scratch = Path(scratch_name)
        with clock("helper"):
            objects = [_compile_helper(scratch)]
        if gpu:
            with clock("cuda"):
                root = _build_cuda(dict(gpu), target, cuda_compile, capture)
            progress(len(gpu), total)
        else:
            root = _build_llvm(chunks.pop(0) if chunks else {}, target)
            progress(total - sum(map(len, chunks)), total)
        with clock("llvm"):
            objects += _compile_chunks(chunks, target, scratch, total, progress)
        with clock("link"):
            path = directory / "library.so"
            _link(bytecode, root, objects, path, scratch)
    return BuiltLibrary(path, capture.source, capture.image, clock.seconds)


def _split(
    module: tvm.IRModule,
) -> tuple[list[tuple[str, tirx.PrimFunc]], list[tuple[str, tirx.PrimFunc]], relax.ExecBuilder]:
    """CUDA functions, CPU functions (both by name), and the VM bytecode of the Relax functions."""
    passes = relax.transform
    lowering = [
        passes.LowerRuntimeBuiltin(),
        passes.ComputePrimValue(),
        passes.VMShapeLower(),
        passes.AttachGlobalSymbol(),
    ]
    bytecode = relax.ExecBuilder()
    rest = relax_ffi.VMCodeGen(bytecode, tvm.transform.Sequential(lowering)(module))
    functions = sorted((v.name_hint, f) for v, f in rest.functions.items() if isinstance(f, tirx.PrimFunc))
    gpu = [(name, f) for name, f in functions if f.attrs["target"].kind.name == "cuda"]
    cpu = [(name, f) for name, f in functions if f.attrs["target"].kind.name == "llvm"]
    return gpu, cpu, bytecode


def _build_llvm(functions: dict[str, tirx.PrimFunc], target: Target) -> tvm.runtime.Module:
    return tirx.build(tvm.IRModule(functions), target=llvm_target(target.isa))


def _compile_chunks(
    chunks: list[dict[str, tirx.PrimFunc]], target: Target, scratch: Path, total: int, progress: Progress
) -> list[Path]:
    """One object file for each chunk, in the order of the chunks."""

    def compile_chunk(index: int) -> Path:
        path = scratch / f"cpu{index}.o"
        _build_llvm(chunks[index], target).write_to_file(str(path))
        return path

    done = total - sum(map(len, chunks))
    objects = []
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for chunk, path in zip(chunks, pool.map(compile_chunk, range(len(chunks))), strict=True):
            objects.append(path)
            done += len(chunk)
            progress(done, total)
    return objects


def _build_cuda(
    functions: dict[str, tirx.PrimFunc], target: Target, cuda_compile: CudaCompile | None, capture: _Capture
) -> tvm.runtime.Module:
    if cuda_compile is None:
        raise InternalError("HC912", "the module has CUDA functions but no CUDA compiler was given")
    with _cuda_compiler(cuda_compile, capture):
        return tirx.build(tvm.IRModule(functions), target=cuda_target(target))


@contextmanager
def _cuda_compiler(cuda_compile: CudaCompile, capture: _Capture) -> Iterator[None]:
    """Lets TVM's CUDA code generator call `cuda_compile`, and notes what went in and out."""

    def compile_source(source: str) -> bytes:
        capture.source = str(source)
        capture.image = cuda_compile(capture.source)
        return capture.image

    name = "tvm_callback_cuda_compile"
    previous = tvm_ffi.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, compile_source, override=True)
    try:
        yield
    finally:
        if previous is not None:
            tvm_ffi.register_global_func(name, previous, override=True)
        else:
            tvm_ffi.registry.remove_global_func(name)


def _compile_helper(scratch: Path) -> Path:
    path = scratch / "helper.o"
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    options = ["-c", "-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden"]
    _gxx([*options, *includes, str(HELPER_SOURCE), "-o", str(path)])
    return path


def _link(
    bytecode: relax.ExecBuilder, root: tvm.runtime.Module, objects: list[Path], path: Path, scratch: Path
) -> None:
    executable = relax_ffi.VMLink(bytecode, None, root, [], {})

    def link(output: str, files: list[str]) -> None:
        _gxx(["-shared", "-Wl,--build-id=none", *files, "-ldl", "-o", output])

    executable.export_library(
        str(path), fcompile=link, addons=[str(o) for o in objects], workspace_dir=str(scratch)
    )


def _gxx(arguments: list[str]) -> None:
    try:
        done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise DeviceError(
            "HC403", "g++ was not found", remedy="install g++ (Debian: apt-get install g++)"
        ) from None
    if done.returncode != 0:
        raise InternalError(
            "HC912", "g++ failed to build the artifact's library", where=done.stderr.strip()[-2000:]
        )
