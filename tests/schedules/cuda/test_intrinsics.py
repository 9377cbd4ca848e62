"""Elementary functions of vectors: what they compute, and one call in the source for each element."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from hybridc.schedules.rule import Scheduled
from tests.schedules.cuda.harness import Array, Case, library_of, wrong_cases


@T.prim_func(private=True, s_tir=True)
def chain(x: T.Buffer((128,), "float32"), y: T.Buffer((128,), "float32")):
    for thread in T.thread_binding(32, thread="threadIdx.x"):
        for lane in T.vectorized(4):
            y[thread * 4 + lane] = T.tanh(T.cos(T.sin(T.round(x[thread * 4 + lane] * T.float32(3)))))


@T.prim_func(private=True, s_tir=True)
def chain_of_halves(x: T.Buffer((128,), "float16"), y: T.Buffer((128,), "float16")):
    for thread in T.thread_binding(32, thread="threadIdx.x"):
        for lane in T.vectorized(4):
            y[thread * 4 + lane] = T.tanh(T.sin(x[thread * 4 + lane]))


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (chain, lambda x: np.tanh(np.cos(np.sin(np.rint(x * 3))))),
        (chain_of_halves, lambda x: np.tanh(np.sin(x))),
    ],
)
def test_chains_call_a_function_once_for_each_element(
    function: tirx.PrimFunc, reference: Callable[[Array], Array]
) -> None:
    sources: list[str] = []

    def noted(source: str) -> str:
        sources.append(source)
        return source

    x = np.random.default_rng(0).standard_normal(128).astype(str(function.params[0].dtype))
    error = 1e-6 if x.dtype == np.float32 else 1e-3
    case = Case(function, [x], reference(x.astype("float64")), relative_error=error)
    scheduled = {"chain": Scheduled(function, "by hand")}
    assert not wrong_cases({"chain": case}, scheduled, library_of(scheduled, noted))
    assert sources[0].count("sinf(") == 4
