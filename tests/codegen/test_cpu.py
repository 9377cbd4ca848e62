"""Functions of the CPU as machine code that TVM's own passes would refuse."""

# mypy: disable-error-code="valid-type"
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from hybridc.codegen.cpu import cpu_module
from hybridc.codegen.flat import flattened


@T.prim_func(s_tir=True)
def repeated(x: T.Buffer((8,), "bfloat16"), y: T.Buffer((16,), "bfloat16")) -> None:
    for i in T.vectorized(8):
        y[i] = x[3]
    for i in T.vectorized(8):
        y[8 + i] = T.bfloat16(-1.5)


@pytest.mark.isa("avx2")
def test_vectors_of_one_bfloat16() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "core-avx2"})
    function = repeated.with_attrs({"target": target, "global_symbol": "repeated", "tirx.noalias": True})
    module = cpu_module(flattened({"repeated": function}), target)
    x = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    y = tvm.runtime.tensor(np.zeros(16, ml_dtypes.bfloat16))
    module["repeated"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy().astype(np.float32), np.repeat([3.0, -1.5], 8))
