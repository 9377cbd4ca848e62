"""Every family is scheduled by its rule, in few launches, and computes what numpy says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

from hybridc import emulator
from hybridc.ir import Device
from hybridc.schedules.cuda.launch import cuda_target
from hybridc.schedules.registry import Request, Scheduled, schedule
from hybridc.targets import parse_target
from tests.schedules.cuda.families import FAMILIES, Family

TARGET = parse_target("cuda:sm_80+avx2")
RELATIVE_ERROR = 1e-5


@pytest.fixture(scope="module")
def functions() -> dict[str, tirx.PrimFunc]:
    return {name: family.function(name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def scheduled(functions: dict[str, tirx.PrimFunc]) -> dict[str, Scheduled]:
    return {name: schedule(Request(f, frozenset(), TARGET), Device.GPU) for name, f in functions.items()}


@pytest.fixture(scope="module")
def library(scheduled: dict[str, Scheduled]) -> tvm.runtime.Module:
    """All families in one library, on the emulated GPU."""
    emulator.start(64 << 20)
    name = "tvm_callback_cuda_compile"
    previous = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(name, _compile_for_emulator, override=True)
    try:
        module = tvm.IRModule({name: s.function for name, s in scheduled.items()})
        return tvm.compile(module, target=tvm.target.Target(cuda_target(TARGET), host="llvm"))
    finally:
        tvm_ffi.register_global_func(name, previous, override=True)


def _compile_for_emulator(source: str) -> bytes:
    image = hashlib.sha256(source.encode()).hexdigest().encode()
    emulator.provide_kernels(emulator.image_key(image), source)
    return image


def run(
    library: tvm.runtime.Module, name: str, family: Family, function: tirx.PrimFunc, scheduled: Scheduled
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Inputs, outputs, and launches; memory that is not an input starts as NaN."""
    device = tvm.cuda(0)
    inputs = family.draw()
    rest = scheduled.function.params[len(inputs) :]
    fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
    before = emulator.statistics()
    library[name](*(tvm.runtime.tensor(x, device) for x in inputs), *fresh)
    device.sync()
    launches = emulator.statistics().launches - before.launches
    outputs = fresh[: len(function.params) - len(inputs)]
    return inputs, [tensor.numpy() for tensor in outputs], launches


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_taken_by_its_rule(name: str, scheduled: dict[str, Scheduled]) -> None:
    assert scheduled[name].rule == FAMILIES[name].rule


@pytest.mark.parametrize("name", FAMILIES)
def test_family_computes_what_numpy_says(
    name: str,
    functions: dict[str, tirx.PrimFunc],
    scheduled: dict[str, Scheduled],
    library: tvm.runtime.Module,
) -> None:
    family = FAMILIES[name]
    inputs, outputs, launches = run(library, name, family, functions[name], scheduled[name])
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    result = family.reference(*wide)
    expected = result if isinstance(result, list) else [result]
    for got, want in zip(outputs, expected, strict=True):
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, np.reshape(want, got.shape), rtol=0, atol=RELATIVE_ERROR * scale)
    assert launches == family.launches


def test_no_family_needs_workspace(scheduled: dict[str, Scheduled]) -> None:
    assert {name for name, s in scheduled.items() if s.workspace_bytes} == set()
