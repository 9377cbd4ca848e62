"""IRModule -> one shared library: CPU code, CUDA image and the runtime's helper.

Each of the CPU's functions becomes an object of its own, so that they are compiled side by side and found in
the cache one by one; where there are buckets of sizes, or hundreds of functions, each family of them does
(`families.py`). The GPU's functions are compiled together, to one image and the object that launches its
kernels; so they are found together, or not at all.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import tvm
from tvm import tirx

from hybridc.codegen.cpu import cpu_module
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.codegen.cuda_functions import corrected, printable
from hybridc.codegen.entries import entries_source, with_code_names
from hybridc.codegen.families import Family, families
from hybridc.codegen.flat import flattened
from hybridc.codegen.gxx import run_gxx
from hybridc.codegen.helper import helper_object
from hybridc.compile_cache import Cache, NoCache, remembered
from hybridc.errors import DeviceError, InternalError
from hybridc.passes.lower.lower import cuda_target
from hybridc.schedules.cpu.math.intrinsics import install as install_vector_functions
from hybridc.scratch import scratch_folder
from hybridc.targets import Target

CudaCompile = Callable[[str], bytes]
"""CUDA C++ source -> image (cubin, fatbin, or the emulator's)."""

Progress = Callable[[int, int], None]
"""Called with (kernels compiled so far, kernels in all)."""

_MANY_FUNCTIONS = 100
"""More than so many are mostly those of a loop's trips, such as slices at other places; other networks have
some tens, each of which is compiled for its own numbers."""

_FAMILIES_IN_A_UNIT = 4
"""LLVM takes 10 ms for any module: a third of what four small functions take, one by one."""


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A library on disk and what it was made of."""

    path: Path
    cuda_source: str | None
    cuda_image: bytes | None
    seconds: dict[str, float]
    """Wall time of `compile` and `link`."""
    functions: int
    """How many it has."""
    cached: int
    """How many of them were compiled before."""

    @property
    def cuda_image_bytes(self) -> int | None:
        """Of the GPU's code for all architectures; None where there is none."""
        return None if self.cuda_image is None else len(self.cuda_image)


@dataclass
class _Capture:
    """What went through the CUDA compiler."""

    source: str | None = None
    image: bytes | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Code:
    """Functions that were compiled together, ready to be linked."""

    objects: tuple[bytes, ...]
    cuda_source: str | None = None
    cuda_image: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Unit:
    """Functions to be compiled together."""

    functions: Mapping[str, tirx.PrimFunc]
    compile: Callable[[Mapping[str, tirx.PrimFunc]], _Code]
    count: int
    """How many functions of the library they are."""


def build_library(
    module: tvm.IRModule,
    target: Target,
    directory: Path,
    *,
    cuda_compile: CudaCompile | None = None,
    progress: Progress = lambda done, total: None,
    cache: Cache | None = None,
    many_sizes: bool = False,
) -> BuiltLibrary:
    """Compile a lowered module to `directory/library.so`, but for what `cache` has of it.

    With `many_sizes`, or more than a hundred functions of the CPU, those that differ in nothing but numbers
    are compiled once. `cuda_compile` is needed where the module has CUDA functions; what it raises is passed
    on, and so is what `progress` raises. With a cache it has to compile like that of all other calls. Raises
    DeviceError HC403 without g++, HC404 where TVM finds no CUDA driver to load (an emulated one will do),
    InternalError HC912 where TVM or the linker fails.
    """
    install_vector_functions()
    cache = cache or NoCache()
    fresh: list[int] = []
    gpu, cpu = _split(module)
    are_alike = many_sizes or len(cpu) > _MANY_FUNCTIONS
    alike = with_code_names(
        families(dict(cpu)) if are_alike else tuple(Family(f, {name: ()}) for name, f in cpu)
    )
    units = [
        _Unit(
            {str(each.function.attrs["global_symbol"]): each.function for each in together},
            _flat_cpu_code if are_alike else _cpu_code,
            sum(len(each.members) for each in together),
        )
        for together in _groups(alike, _FAMILIES_IN_A_UNIT if are_alike else 1)
    ]
    if gpu:
        units.insert(0, _Unit(dict(gpu), partial(_gpu_code, target, cuda_compile), len(gpu)))

    def code_of(unit: _Unit) -> _Code:
        def compile_now() -> _Code:
            fresh.append(unit.count)
            return unit.compile(unit.functions)

        content = map(tvm.ir.save_json, unit.functions.values())
        return remembered(cache, compile_now, chain(("code", repr(target)), content))

    path, start = directory / "library.so", time.perf_counter()
    with _workers() as pool:
        helper = pool.submit(helper_object)
        codes = {pool.submit(code_of, unit): unit for unit in units}
        done, total = 0, len(gpu) + len(cpu)
        progress(done, total)
        for future in as_completed(codes):
            future.result()  # an error at once, not after all the others
            done += codes[future].count
            progress(done, total)
        made = [future.result() for future in codes]
        objects = [helper.result(), *(o for code in made for o in code.objects)]
    compiled = time.perf_counter()
    _link(objects, entries_source(alike, dict(cpu)), path)
    seconds = {"compile": compiled - start, "link": time.perf_counter() - compiled}
    source, image = (made[0].cuda_source, made[0].cuda_image) if gpu else (None, None)
    return BuiltLibrary(path, source, image, seconds, total, total - sum(fresh))


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """A thread for each processor. Where an error ends the block, what has not begun never does."""
    pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _split(
    module: tvm.IRModule,
) -> tuple[list[tuple[str, tirx.PrimFunc]], list[tuple[str, tirx.PrimFunc]]]:
    """CUDA functions and CPU functions, both by name."""
    functions = sorted((v.name_hint, f) for v, f in module.functions.items())
    gpu = [(name, f) for name, f in functions if f.attrs["target"].kind.name == "cuda"]
    cpu = [(name, f) for name, f in functions if f.attrs["target"].kind.name == "llvm"]
    return gpu, cpu


def _groups(alike: Sequence[Family], size: int) -> Iterator[Sequence[Family]]:
    """So many families or fewer, of one instruction set."""
    by_target: dict[str, list[Family]] = defaultdict(list)
    for each in alike:
        by_target[str(each.function.attrs["target"])].append(each)
    for together in by_target.values():
        for first in range(0, len(together), size):
            yield together[first : first + size]


def _cpu_code(functions: Mapping[str, tirx.PrimFunc]) -> _Code:
    """Of functions for one instruction set."""
    return _flat_cpu_code(flattened(functions))


def _flat_cpu_code(functions: Mapping[str, tirx.PrimFunc]) -> _Code:
    target, *_ = (function.attrs["target"] for function in functions.values())
    with _refusals(functions, target):
        module = cpu_module(functions, target)
    with scratch_folder("hybridc-cpu-") as folder:
        path = folder / "cpu.o"
        module.write_to_file(str(path))
        return _Code((path.read_bytes(),))


def _gpu_code(
    target: Target, cuda_compile: CudaCompile | None, functions: Mapping[str, tirx.PrimFunc]
) -> _Code:
    """Two objects: what launches the kernels, and their image where TVM's runtime looks for it."""
    capture = _Capture()
    root = _build_cuda(functions, target, cuda_compile, capture)
    with scratch_folder("hybridc-gpu-") as folder:
        files = root.export_library(
            str(folder / "gpu.so"), fcompile=lambda output, files: files, workspace_dir=str(folder)
        )
        objects = tuple(Path(file).read_bytes() for file in files)
    return _Code(objects, capture.source, capture.image)


@contextmanager
def _refusals(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> Iterator[None]:
    """What TVM refuses, as an InternalError that names the functions."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        what = f"TVM cannot compile for {target.kind.name}: {reason}"
        raise InternalError("HC912", what, where=", ".join(functions)) from error


def build_gpu_functions(
    functions: dict[str, tirx.PrimFunc], target: Target, cuda_compile: CudaCompile
) -> tvm.runtime.Module:
    """Functions of the GPU by themselves, to be called in this process. Raises as `build_library` does."""
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    return _build_cuda(named, target, cuda_compile, _Capture())


def _build_cuda(
    functions: Mapping[str, tirx.PrimFunc],
    target: Target,
    cuda_compile: CudaCompile | None,
    capture: _Capture,
) -> tvm.runtime.Module:
    if cuda_compile is None:
        raise InternalError("HC912", "the module has CUDA functions but no CUDA compiler was given")
    try:
        with cuda_compiler(partial(_compiled, cuda_compile, capture)):
            module, device = tvm.IRModule(printable(functions)), cuda_target(target)
            with _refusals(functions, device):
                root = tirx.build(module, target=device)
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


def _compiled(cuda_compile: CudaCompile, capture: _Capture, source: str) -> bytes:
    """What `cuda_compile` makes of `source`, with a note of what went in and out."""
    capture.source = corrected(str(source))
    try:
        capture.image = cuda_compile(capture.source)
    except Exception as error:
        capture.error = error  # on its way through TVM it would lose its type
        raise
    return capture.image


def _link(objects: Sequence[bytes], assembler: str, path: Path) -> None:
    with scratch_folder("hybridc-link-") as folder:
        files = [folder / f"{number}.o" for number in range(len(objects))]
        for file, content in zip(files, objects, strict=True):
            file.write_bytes(content)
        if assembler:
            files.append(folder / "entries.s")
            files[-1].write_text(assembler)
        options = ("-shared", "-pthread", "-Wl,--build-id=none")
        run_gxx(*options, *map(str, files), "-ldl", "-o", str(path))
