"""Functions on the emulated GPU, many in one library, beside what numpy says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import tirx

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.ir import Device
from hybridc.schedules.cuda.core.launch import cuda_target
from hybridc.schedules.rule import Request, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import parse_target
from tests.support.emulated import compile_for_emulator
from tests.support.fusion import Build, fused_operators

TARGET = parse_target("cuda:sm_80+avx2")
Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A fused function of inputs `p0, p1, ...` with one result."""

    function: tirx.PrimFunc
    inputs: Sequence[Array]
    expected: Array
    rule: str | None = None
    """That has to take it; None if any may."""
    relative_error: float = 1e-5
    """Largest, as a share of the largest result."""


def case(
    build: Build,
    reference: Callable[..., Array],
    inputs: list[Array],
    rule: str | None = None,
    error: float = 1e-5,
) -> Case:
    """A case whose expected result `reference` computes in float64."""
    function = fused_operators(build, [x.shape for x in inputs], [str(x.dtype) for x in inputs])
    wide = [x.astype("float64") if x.dtype.kind == "f" else x for x in inputs]
    return Case(function, inputs, np.asarray(reference(*wide), "float64"), rule, error)


def scheduled_for_gpu(function: tirx.PrimFunc) -> Scheduled:
    """The function as the first rule that accepts it schedules it."""
    found = schedule(Request(function, frozenset(), TARGET), Device.GPU)
    assert found is not None
    return found


def check(cases: Mapping[str, Case]) -> None:
    """Every case is taken by its rule and computes what is expected; what it should write starts as NaN."""
    found = {name: scheduled_for_gpu(case.function) for name, case in cases.items()}
    rules = {name: s.rule for name, s in found.items()}
    assert rules == {name: case.rule or rules[name] for name, case in cases.items()}
    emulator.start(64 << 20)
    with cuda_compiler(compile_for_emulator):
        functions = {name: s.function.with_attr("global_symbol", name) for name, s in found.items()}
        target = tvm.target.Target(cuda_target(TARGET), host="llvm")
        library = tvm.compile(tvm.IRModule(functions), target=target)
    for name, case in cases.items():
        got = _run(library[name], case, found[name]).astype("float64")
        scale = max(1.0, float(np.abs(case.expected).max(initial=0)))
        error = float(np.abs(got - case.expected.reshape(got.shape)).max(initial=0))
        # NaN is no error within bounds
        assert error <= case.relative_error * scale, f"{name}: {error}"


def _run(kernel: tvm.runtime.PackedFunc, case: Case, scheduled: Scheduled) -> Array:
    device = tvm.cuda(0)
    count = len(case.inputs)
    names = [p.name for p in case.function.params[:count]]
    # fusion orders inputs by use
    order = [int(n[1:]) for n in names] if all(n[1:].isdigit() for n in names) else list(range(count))
    rest = scheduled.function.params[count:]
    fresh = [tvm.runtime.empty([int(e) for e in p.shape], str(p.dtype), device) for p in rest]
    kernel(*(tvm.runtime.tensor(case.inputs[i], device) for i in order), *fresh)
    device.sync()
    return fresh[0].numpy()
