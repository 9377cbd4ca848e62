"""Functions on the emulated GPU, many in one library, beside what numpy says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import tirx

from hybridc import emulator
from hybridc.codegen.cuda_callback import cuda_compiler
from hybridc.codegen.cuda_functions import corrected, printable
from hybridc.emulator import ThreadOrder
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
    absolute_error: Array | None = None
    """Largest of each element, in place of that."""

    def is_near(self, found: Array) -> bool:
        """Whether no element is NaN or too far off."""
        error = np.abs(found.astype("float64") - self.expected.reshape(found.shape))
        scale = max(1.0, float(np.abs(self.expected).max(initial=0)))
        most = self.relative_error * scale if self.absolute_error is None else self.absolute_error
        return bool((error <= most).all())


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


def check(cases: Mapping[str, Case], orders: Sequence[ThreadOrder] = (ThreadOrder.FORWARD,)) -> None:
    """Every case is taken by its rule and computes what is expected; what it should write starts as NaN."""
    found = {name: scheduled_for_gpu(case.function) for name, case in cases.items()}
    rules = {name: s.rule for name, s in found.items()}
    assert rules == {name: case.rule or rules[name] for name, case in cases.items()}
    library = library_of(found)
    for order in orders:
        wrong = wrong_cases(cases, found, library, order)
        assert not wrong, f"{wrong} in order {order.name}"


def library_of(
    scheduled: Mapping[str, Scheduled], edit: Callable[[str], str] = lambda source: source
) -> tvm.runtime.Module:
    """Scheduled functions for the emulated GPU, of CUDA C that is edited first."""

    def compiled(source: str) -> bytes:
        return compile_for_emulator(edit(corrected(str(source))))

    emulator.start(64 << 20)
    with cuda_compiler(compiled):
        functions = {name: s.function.with_attr("global_symbol", name) for name, s in scheduled.items()}
        target = tvm.target.Target(cuda_target(TARGET), host="llvm")
        return tvm.compile(tvm.IRModule(printable(functions)), target=target)


def wrong_cases(
    cases: Mapping[str, Case],
    scheduled: Mapping[str, Scheduled],
    library: tvm.runtime.Module,
    order: ThreadOrder = ThreadOrder.FORWARD,
) -> list[str]:
    """Names of those that do not compute what is expected, in an order of threads."""
    emulator.start(64 << 20, thread_order=order)
    return [
        name for name, case in cases.items() if not case.is_near(_run(library[name], case, scheduled[name]))
    ]


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
