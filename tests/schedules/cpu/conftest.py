"""Make fused functions as Relax does, compile them for an instruction set, and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import tirx

from hybridc.ir import Device
from hybridc.schedules.cpu.math.intrinsics import install
from hybridc.schedules.rule import Request, Rule, Scheduled
from hybridc.schedules.select import schedule
from hybridc.targets import ISAS, Isa, Target, missing_flags
from tests.support.fusion import Build, fused_operators


@dataclass(frozen=True)
class Harness:
    """Schedules and runs single functions for one instruction set."""

    isa: Isa
    threads: int = 4
    many_sizes: bool = False

    def function(
        self, build: Build, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str] | str = "float32"
    ) -> tirx.PrimFunc:
        """The one PrimFunc that Relax makes of `build(emit, *inputs)`."""
        return fused_operators(build, shapes, dtypes)

    def schedule(
        self, function: tirx.PrimFunc, constants: Sequence[int] = (), rule: Rule | None = None
    ) -> Scheduled:
        target = Target((), self.isa)
        request = Request(
            function, frozenset(constants), target, threads=self.threads, many_sizes=self.many_sizes
        )
        scheduled = schedule(request, Device.CPU) if rule is None else rule(request)
        assert scheduled is not None
        return scheduled

    def compile(self, scheduled: Scheduled) -> Callable[..., None]:
        install()
        target = tvm.target.Target({"kind": "llvm", "mcpu": self.isa.mcpu, "mattr": list(self.isa.mattr)})
        named = scheduled.function.with_attr("global_symbol", "main")
        # `run` looks at its arguments itself: the code that does takes LLVM longer than a small kernel
        with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
            return tvm.compile(tvm.IRModule({"main": named}), target=target)["main"]

    def run_in_place(
        self, scheduled: Scheduled, inputs: Sequence[np.ndarray], overwritten: int
    ) -> np.ndarray:
        """The only output, written over the bytes of one input."""
        tensors = [tvm.runtime.tensor(array) for array in inputs]
        rest = scheduled.function.params[len(inputs) + 1 :]
        scratch = [tvm.runtime.tensor(_poisoned(parameter)) for parameter in rest]
        self.compile(scheduled)(*tensors, tensors[overwritten], *scratch)
        return tensors[overwritten].numpy()

    def run(
        self, function: tirx.PrimFunc, scheduled: Scheduled, inputs: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Outputs of the compiled function; outputs and workspace hold NaN (or all ones) before it runs."""
        kernel = self.compile(scheduled)
        packed = list(inputs)
        for position, packing in scheduled.packings:
            packed[position] = packing.apply(packed[position])
        parameters = scheduled.function.params
        for array, parameter in zip(packed, parameters, strict=False):
            assert array.shape == tuple(int(e) for e in parameter.shape)
            assert array.dtype == np.dtype(str(parameter.dtype))
        scratch = [_poisoned(parameter) for parameter in parameters[len(inputs) :]]
        sizes = [array.nbytes for array in scratch[len(function.params) - len(inputs) :]]
        assert tuple(sizes) == scheduled.workspace_bytes
        tensors = [tvm.runtime.tensor(np.array(array, order="C")) for array in [*packed, *scratch]]
        kernel(*tensors)
        return [t.numpy() for t in tensors[len(inputs) : len(function.params)]]


def _poisoned(parameter: tirx.Var) -> np.ndarray:
    shape, dtype = tuple(int(e) for e in parameter.shape), np.dtype(str(parameter.dtype))
    return np.full(shape, np.nan if dtype.kind == "f" else 1, dtype)


@pytest.fixture(params=["avx2", "avx512"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return _harness(request.param)


@pytest.fixture(params=["avx2", pytest.param("avx512", marks=pytest.mark.slow)])
def costly_harness(request: pytest.FixtureRequest) -> Harness:
    """For tests whose code takes LLVM a second: the fast suite has that of narrower vectors."""
    return _harness(request.param)


def _harness(name: str) -> Harness:
    isa = ISAS[name]
    if missing := missing_flags(isa):
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    return Harness(isa)


@pytest.fixture
def avx2() -> Harness:
    """For tests that only schedule, which needs no processor."""
    return Harness(ISAS["avx2"])


def scaled_error(result: np.ndarray, reference: np.ndarray) -> float:
    """Largest error as a fraction of the reference's scale."""
    assert result.shape == reference.shape
    return float(np.abs(result - reference).max() / max(np.abs(reference).max(), 1e-30))


@pytest.fixture
def assert_close() -> Callable[[np.ndarray, np.ndarray], None]:
    def check(result: np.ndarray, reference: np.ndarray) -> None:
        assert scaled_error(result, reference) <= 1e-5

    return check
