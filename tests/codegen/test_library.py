"""One shared library from a lowered module: several LLVM modules, CUDA image, helper."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from hybridc import emulator
from hybridc.codegen.library import build_library
from hybridc.errors import DeviceError, InternalError, UsageError
from hybridc.ir import Graph, Kernel, Role
from hybridc.runtime import load
from tests.support.artifacts import (
    CPU,
    CPU_TARGET,
    SHAPE,
    Model,
    PlanBuilder,
    cpu_model,
    hybrid_model,
    parallel_scale,
    scheduled,
    tensor,
)

ROOT = Path(__file__).parents[2]


def chain(length: int) -> Model:
    """x * 1 * 2 * ... as distinct functions with parallel loops."""
    names = [f"t{i}" for i in range(length + 1)]
    roles = [Role.INPUT, *[Role.ACTIVATION] * (length - 1), Role.OUTPUT]
    kernels = tuple(Kernel(f"k{i}", f"scale{i}", (names[i],), (names[i + 1],)) for i in range(length))
    tensors = tuple(tensor(n, r) for n, r in zip(names, roles, strict=True))
    builder = PlanBuilder()
    for i, value in enumerate(tensors):
        builder.hold(value, CPU, i - 1, length if i == length else i)
    for kernel in kernels:
        builder.run(kernel.name, CPU)
    functions = {(f"scale{i}", CPU): scheduled(parallel_scale(i + 1), CPU) for i in range(length)}
    graph = Graph(kernels, tensors, (names[0],), (names[-1],))
    return Model(graph, builder.plan(), functions, CPU_TARGET)


def test_functions_of_several_llvm_modules_are_found(tmp_path: Path) -> None:
    length = 17
    path = chain(length).write(tmp_path / "model.hyb")
    x = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    with load(path) as session:
        y = session.run(None, {"the/t0": x})[0]
    factor = np.prod(np.arange(1, length + 1, dtype=np.float64))
    np.testing.assert_allclose(y, x * factor, rtol=1e-5)


def test_progress_counts_every_function_once(tmp_path: Path) -> None:
    length = 11
    seen: list[tuple[int, int]] = []
    build_library(
        chain(length).lower().module,
        CPU_TARGET,
        tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (length, length)


def test_same_module_gives_the_same_library(tmp_path: Path) -> None:
    libraries = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        built = build_library(cpu_model().lower().module, CPU_TARGET, tmp_path / name)
        libraries.append(built.path.read_bytes())
    assert libraries[0] == libraries[1]


def test_no_path_of_this_computer_is_in_the_library(tmp_path: Path) -> None:
    content = build_library(cpu_model().lower().module, CPU_TARGET, tmp_path).path.read_bytes()
    for folder in (ROOT, Path(tvm_ffi.__file__).parent, tmp_path):
        assert os.fsencode(folder) not in content


def test_cpu_library_has_no_cuda(tmp_path: Path) -> None:
    built = build_library(cpu_model().lower().module, CPU_TARGET, tmp_path)
    assert (built.cuda_source, built.cuda_image) == (None, None)
    assert b"libcudart.so.13" in built.path.read_bytes()  # looked up by name when a GPU is asked for


def test_cuda_source_and_image_are_kept(tmp_path: Path) -> None:
    emulator.preload()
    model = hybrid_model()
    built = build_library(
        model.lower().module, model.target, tmp_path, cuda_compile=lambda source: b"image of it"
    )
    assert built.cuda_source is not None and "__global__" in built.cuda_source
    assert built.cuda_image == b"image of it"
    assert b"image of it" in built.path.read_bytes()


def test_error_of_the_cuda_compiler_is_passed_on(tmp_path: Path) -> None:
    def refuse(source: str) -> bytes:
        raise UsageError("HC599", "no")

    emulator.preload()
    model = hybrid_model()
    with pytest.raises(UsageError, match="no"):
        build_library(model.lower().module, model.target, tmp_path, cuda_compile=refuse)


def test_cuda_functions_need_a_cuda_compiler(tmp_path: Path) -> None:
    model = hybrid_model()
    with pytest.raises(InternalError, match="no CUDA compiler"):
        build_library(model.lower().module, model.target, tmp_path)


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH", str(tmp_path)
    )  # the linker is g++ too, so a helper compiled before does not matter
    with pytest.raises(DeviceError, match="g\\+\\+") as caught:
        build_library(cpu_model().lower().module, CPU_TARGET, tmp_path)
    assert caught.value.code == "HC403"


def test_full_disk_is_no_fault_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linker = tmp_path / "g++"
    linker.write_text("#!/bin/sh\necho final link failed: No space left on device >&2; exit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(OSError, match="No space left"):
        build_library(cpu_model().lower().module, CPU_TARGET, tmp_path)
