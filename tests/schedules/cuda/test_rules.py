"""Every family is scheduled by its rule, in few launches, and computes what numpy says."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.ir import Device
from hybridc.schedules.cuda.conv2d.conv2d import conv2d
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu, runs_on_gpu
from hybridc.schedules.cuda.elementwise.elementwise import elementwise
from hybridc.schedules.cuda.fallback import fallback
from hybridc.schedules.cuda.matmul.matmul import matmul
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.schedules.cuda.families import FAMILIES, Family
from tests.support.emulated import compile_for_emulator

TARGET = parse_target("cuda:sm_80+avx2")
RELATIVE_ERROR = 1e-5


def on_gpu(function: tirx.PrimFunc) -> Scheduled:
    """The function as the first rule that accepts it schedules it."""
    scheduled = schedule(Request(function, frozenset(), TARGET), Device.GPU)
    assert scheduled is not None
    return scheduled


@pytest.fixture(scope="module")
def functions() -> dict[str, tirx.PrimFunc]:
    return {name: family.function(name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def scheduled(functions: dict[str, tirx.PrimFunc]) -> dict[str, Scheduled]:
    return {name: on_gpu(f) for name, f in functions.items()}


@pytest.fixture(scope="module")
def library(scheduled: dict[str, Scheduled]) -> tvm.runtime.Module:
    """All families in one library, on the emulated GPU."""
    emulator.start(64 << 20)
    with cuda_compiler(compile_for_emulator):
        module = tvm.IRModule({name: s.function for name, s in scheduled.items()})
        return tvm.compile(module, target=tvm.target.Target(cuda_target(TARGET), host="llvm"))


def run(
    library: tvm.runtime.Module, name: str, family: Family, function: tirx.PrimFunc, scheduled: Scheduled
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Inputs, outputs, and launches; memory that is not an input starts as NaN. Weights are packed."""
    device = tvm.cuda(0)
    inputs = family.draw()
    rest = scheduled.function.params[len(inputs) :]
    fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
    before = emulator.statistics()
    order = [
        int(p.name.removeprefix("p")) for p in function.params[: len(inputs)]
    ]  # fusion orders them by use
    fed = [inputs[i] for i in order]
    for position, packing in scheduled.packings:
        fed[position] = packing.apply(fed[position])
    library[name](*(tvm.runtime.tensor(x, device) for x in fed), *fresh)
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


def test_only_families_of_several_launches_need_workspace(scheduled: dict[str, Scheduled]) -> None:
    needed = {name: s.workspace_bytes for name, s in scheduled.items()}
    assert needed == {name: family.workspace_bytes for name, family in FAMILIES.items()}


def test_functions_that_tvm_approximates_are_accurate(functions: dict[str, tirx.PrimFunc]) -> None:
    """The emulated GPU cannot tell `__powf` from `powf`, the source can."""
    sources: list[str] = []

    def keep(source: str) -> bytes:
        sources.append(str(source))
        return b"none"

    emulator.preload()
    with cuda_compiler(keep):
        for name in ("power", "waves", "softmax"):
            function = on_gpu(functions[name]).function
            tvm.compile(
                tvm.IRModule({name: function}), target=tvm.target.Target(cuda_target(TARGET), host="llvm")
            )
    assert not re.search(r"__(pow|sin|exp)f", "".join(sources))
    assert all(call in "".join(sources) for call in ("powf(", "sinf(", "expf("))


@T.prim_func(s_tir=True)
def unbound(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")) -> None:
    for i in range(64):
        with T.sblock("copy"):
            v = T.axis.spatial(64, i)
            y[v] = x[v]


@T.prim_func(s_tir=True)
def calling_the_host(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")) -> None:
    for _ in T.thread_binding(1, thread="threadIdx.x"):
        with T.sblock("sort"):
            T.reads(x[0:64])
            T.writes(y[0:64])
            T.evaluate(T.call_packed("tvm.contrib.sort.sort", x.data, y.data, dtype="int32"))


@T.prim_func(s_tir=True)
def oversized_block(x: T.Buffer((2048,), "float32"), y: T.Buffer((2048,), "float32")) -> None:
    for i in T.thread_binding(2048, thread="threadIdx.x"):
        with T.sblock("copy"):
            v = T.axis.spatial(2048, i)
            y[v] = x[v]


@T.prim_func(s_tir=True)
def oversized_grid(x: T.Buffer((65536,), "float32"), y: T.Buffer((65536,), "float32")) -> None:
    for i in T.thread_binding(65536, thread="blockIdx.y"):
        for _ in T.thread_binding(1, thread="threadIdx.x"):
            with T.sblock("copy"):
                v = T.axis.spatial(65536, i)
                y[v] = x[v]


@T.prim_func(s_tir=True)
def oversized_shared(x: T.Buffer((16384,), "float32"), y: T.Buffer((16384,), "float32")) -> None:
    staged = T.sblock_alloc_buffer((16384,), "float32", scope="shared")
    for _ in T.thread_binding(1, thread="blockIdx.x"):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            for i in range(256):
                with T.sblock("stage"):
                    v = T.axis.spatial(16384, tx * 256 + i)
                    staged[v] = x[v]
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            for i in range(256):
                with T.sblock("flip"):
                    v = T.axis.spatial(16384, tx * 256 + i)
                    y[v] = staged[16383 - v]


@T.prim_func(s_tir=True)
def one_thread_each(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")) -> None:
    for i in T.thread_binding(64, thread="threadIdx.x"):
        with T.sblock("copy"):
            v = T.axis.spatial(64, i)
            y[v] = x[v]


@pytest.mark.parametrize(
    "function", [unbound, calling_the_host, oversized_block, oversized_grid, oversized_shared]
)
def test_kernel_that_a_gpu_cannot_run_is_refused(function: tirx.PrimFunc) -> None:
    assert not runs_on_gpu(function, cuda_target(TARGET))


def test_bound_kernel_within_the_limits_is_accepted() -> None:
    assert runs_on_gpu(one_thread_each, cuda_target(TARGET))


def test_rules_leave_what_is_not_theirs(functions: dict[str, tirx.PrimFunc]) -> None:
    for name, function in functions.items():
        request = Request(function, frozenset(), TARGET)
        accepted = {rule.__name__ for rule in (elementwise, matmul, conv2d) if rule(request) is not None}
        # an element for each thread is always possible
        rule = FAMILIES[name].rule.replace("vector_elementwise", "elementwise")
        assert accepted == ({rule} & {"elementwise", "matmul", "conv2d"})


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "scatter"])
def test_fallback_accepts_every_family(name: str, functions: dict[str, tirx.PrimFunc]) -> None:
    scheduled = fallback(Request(functions[name], frozenset(), TARGET))
    assert scheduled is not None
    assert len(scheduled.function.params) == len(functions[name].params) + len(scheduled.workspace_bytes)


def test_function_is_lowered_once_for_its_body_and_target() -> None:
    before, after = one_thread_each, one_thread_each.with_attr("tirx.is_scheduled", True)
    same = lowered_for_gpu(before, cuda_target(TARGET))
    assert lowered_for_gpu(after, cuda_target(TARGET)).same_as(same)
    other = lowered_for_gpu(before, cuda_target(parse_target("cuda:sm_90+avx2")))
    assert other.attrs["target"].attrs["arch"] == "sm_90"
