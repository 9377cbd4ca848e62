"""Cumulative sums and selection by rank against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.canonicalize.cumsum_topk import cumulative_sum, ranked
from hybridc.passes.program.program import is_op
from tests.support.programs import drawn, program_of, run_llvm


def result(function: tvm.tirx.PrimFunc, x: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    library = tvm.compile(function.with_attr("global_symbol", "f"), target="llvm")
    out = tvm.runtime.tensor(np.zeros(shape, dtype))
    library["f"](tvm.runtime.tensor(x), out)
    return out.numpy()


@pytest.mark.parametrize("extent", [1, 2, 3, 4, 5, 16, 17, 50])
@pytest.mark.parametrize("exclusive", [False, True])
def test_each_sum_is_of_what_comes_before(extent, exclusive):
    x = np.random.default_rng(extent).integers(-9, 9, (2, extent, 3))
    expected = np.cumsum(x, 1) - (x if exclusive else 0)
    got = result(cumulative_sum(x.shape, 1, "int64", exclusive), x, x.shape, "int64")
    np.testing.assert_array_equal(got, expected)


def test_sums_of_many_floats_are_as_exact_as_those_of_few():
    x = drawn(0, 40_000) + np.float32(1)
    got = result(cumulative_sum(x.shape, 0, "float32", False), x, x.shape, "float32")
    np.testing.assert_allclose(got, np.cumsum(x, dtype=np.float64), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("k", [1, 6, 20])
def test_equal_elements_keep_their_order(largest, dtype, k):
    x = np.random.default_rng(k).integers(-4, 4, (3, 20)).astype(dtype)
    expected = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :k]
    got = result(ranked(x.shape, 1, k, largest, dtype), x, (3, k), "int64")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_the_largest_number_and_every_place_comes_once(largest):
    x = np.array([np.nan, 1, np.inf, np.nan, -np.inf], np.float32)
    got = result(ranked(x.shape, 0, 5, largest, "float32"), x, (5,), "int64")
    assert list(got) == ([0, 3, 2, 1, 4] if largest else [4, 1, 2, 0, 3])


def test_canonical_programs_call_no_library():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 9), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            summed = builder.emit(relax.op.cumsum(x, 1))
            pair = builder.emit(relax.op.topk(summed, 3, 1, "both", True, "int64"))
            items = [builder.emit(relax.TupleGetItem(pair, i)) for i in range(2)]
            outputs = builder.emit_output(relax.Tuple(items))
        builder.emit_func_output(outputs)
    canonical = canonicalize(program_of(builder.get()))
    values = [b.value for b in canonical.bindings]
    assert not any(is_op(value, "cumsum", "topk") for value in values)
    data = drawn(1, 4, 9)
    sums = np.cumsum(data, 1)
    places = np.argsort(-sums, 1, kind="stable")[:, :3]
    got = run_llvm(canonical.module, data)
    np.testing.assert_allclose(got[0], np.take_along_axis(sums, places, 1), rtol=1e-5)
    np.testing.assert_array_equal(got[1], places)
