"""IRModule -> one shared library: CPU code, CUDA image, VM bytecode and the runtime's helper.

The CPU's functions are independent, so they are compiled as several LLVM modules side by side. One
module, the one that also holds the launchers of the CUDA kernels if there are any, is the root that TVM
exports; the others are linked to it as plain objects, where the VM finds their symbols all the same.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import _ffi_api as relax_ffi
from tvm_ffi import libinfo

from hybridc.errors import DeviceError, InternalError
from hybridc.passes.lower.lower import cuda_target, llvm_target
from hybridc.schedules.cpu.math.intrinsics import install as install_vector_functions
from hybridc.scratch import scratch_folder
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
    """Wall time of `compile` and `link`."""


@dataclass
class _Capture:
    """What went through the CUDA compiler."""

    source: str | None = None
    image: bytes | None = None
    error: Exception | None = None


class _Counter:
    """Counts finished kernels; the threads that compile them share it."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)


def build_library(
    module: tvm.IRModule,
    target: Target,
    directory: Path,
    *,
    cuda_compile: CudaCompile | None = None,
    progress: Progress = lambda done, total: None,
) -> BuiltLibrary:
    """Compile a lowered module to `directory/library.so`.

    `cuda_compile` is needed where the module has CUDA functions; what it raises is passed on. Raises
    DeviceError HC403 without g++, HC404 where TVM finds no CUDA driver to load (an emulated one will do),
    InternalError HC912 where TVM or the linker fails.
    """
    install_vector_functions()
    gpu, cpu, bytecode = _split(module)
    chunks = [dict(cpu[i : i + FUNCTIONS_PER_MODULE]) for i in range(0, len(cpu), FUNCTIONS_PER_MODULE)]
    root_functions = dict(gpu) if gpu or not chunks else chunks.pop(0)
    counter = _Counter(progress, len(gpu) + len(cpu))
    capture = _Capture()
    path = directory / "library.so"
    start = time.perf_counter()
    with scratch_folder("hybridc-build-") as scratch:
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            futures = [pool.submit(_write_helper, scratch / "helper.o")]
            for number, chunk in enumerate(chunks):
                futures.append(
                    pool.submit(_compile_chunk, chunk, target, scratch / f"cpu{number}.o", counter)
                )
            if gpu:
                root = _build_cuda(root_functions, target, cuda_compile, capture)
            else:
                root = _build_llvm(root_functions, target)
            counter.add(len(root_functions))
            objects = [future.result() for future in futures]
        compiled = time.perf_counter()
        _link(bytecode, root, objects, path, scratch)
    seconds = {"compile": compiled - start, "link": time.perf_counter() - compiled}
    return BuiltLibrary(path, capture.source, capture.image, seconds)


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
    return _build(functions, llvm_target(target.isa))


def _build(functions: dict[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Module:
    try:
        return tirx.build(tvm.IRModule(functions), target=target)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        what = f"TVM cannot compile for {target.kind.name}: {reason}"
        raise InternalError("HC912", what, where=", ".join(functions)) from error


def _compile_chunk(
    functions: dict[str, tirx.PrimFunc], target: Target, path: Path, counter: _Counter
) -> Path:
    _build_llvm(functions, target).write_to_file(str(path))
    counter.add(len(functions))
    return path


def build_gpu_functions(
    functions: dict[str, tirx.PrimFunc], target: Target, cuda_compile: CudaCompile
) -> tvm.runtime.Module:
    """Functions of the GPU by themselves, to be called in this process. Raises as `build_library` does."""
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    return _build_cuda(named, target, cuda_compile, _Capture())


def _build_cuda(
    functions: dict[str, tirx.PrimFunc], target: Target, cuda_compile: CudaCompile | None, capture: _Capture
) -> tvm.runtime.Module:
    if cuda_compile is None:
        raise InternalError("HC912", "the module has CUDA functions but no CUDA compiler was given")
    try:
        with _cuda_compiler(cuda_compile, capture):
            root = _build(functions, cuda_target(target))
    except InternalError:
        if capture.error is not None:
            raise capture.error from None
        raise
    if capture.image is None:
        # TVM would embed the source instead, which no runtime can load
        raise DeviceError(
            "HC404", "TVM finds no CUDA driver library", remedy="call hybridc.emulator.preload first"
        )
    return root


@contextmanager
def _cuda_compiler(cuda_compile: CudaCompile, capture: _Capture) -> Iterator[None]:
    """Lets TVM's CUDA code generator call `cuda_compile`, and notes what went in and out."""

    def compile_source(source: str) -> bytes:
        capture.source = str(source)
        try:
            capture.image = cuda_compile(capture.source)
        except Exception as error:
            capture.error = error  # on its way through TVM it would lose its type
            raise
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


@functools.cache
def _helper_object() -> bytes:
    """The runtime's helper, compiled once in a process: nearly all of its time goes into headers."""
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    options = ["-c", "-O2", "-std=c++20", "-pthread", "-fPIC", "-fvisibility=hidden"]
    with scratch_folder("hybridc-helper-") as folder:
        path = folder / "helper.o"
        _gxx([*options, *includes, str(HELPER_SOURCE), "-o", str(path)])
        return path.read_bytes()


def _write_helper(path: Path) -> Path:
    path.write_bytes(_helper_object())
    return path


def _link(
    bytecode: relax.ExecBuilder, root: tvm.runtime.Module, objects: list[Path], path: Path, scratch: Path
) -> None:
    executable = relax_ffi.VMLink(bytecode, None, root, [], {})

    def link(output: str, files: list[str]) -> None:
        _gxx(["-shared", "-pthread", "-Wl,--build-id=none", *files, "-ldl", "-o", output])

    executable.export_library(
        str(path), fcompile=link, addons=[str(o) for o in objects], workspace_dir=str(scratch)
    )


def check_compiler() -> None:
    """Raise DeviceError HC403 without g++."""
    if shutil.which("g++") is None:
        raise DeviceError("HC403", "g++ was not found", remedy="install g++ (Debian: apt-get install g++)")


def _gxx(arguments: list[str]) -> None:
    check_compiler()
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, env=environment)
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode != 0:
        raise InternalError(
            "HC912", "g++ failed to build the artifact's library", where=done.stderr.strip()[-2000:]
        )
