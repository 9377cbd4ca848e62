"""The first elements of rows in sorted order, ties and NaN included, against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.passes.canonicalize.cumsum_topk import ranked
from hybridc.schedules.cpu.reduction.top_k import top_k


def first(x: np.ndarray, axis: int, k: int, *, largest: bool) -> np.ndarray:
    """Indices by a stable sort, NaN being the largest number."""
    key = np.where(np.isnan(x), np.inf, x.astype("f8")) if x.dtype.kind == "f" else x.astype("f8")
    nan = np.isnan(x).astype("i8") if x.dtype.kind == "f" else np.zeros(x.shape, "i8")
    sign = -1 if largest else 1
    # the last key is the first that counts
    order = np.lexsort((np.arange(x.size).reshape(x.shape), sign * key, sign * nan), axis=axis)
    return np.take(order, np.arange(k), axis)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
def test_first_elements_are_those_of_a_stable_sort(avx2, dtype, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 10, rng.integers(1, 4)))
    axis = int(rng.integers(len(shape)))
    k, largest = int(rng.integers(1, shape[axis] + 1)), bool(rng.integers(2))
    # few different numbers, so that many are equal
    x = rng.integers(0, 4, shape).astype(dtype)
    if dtype == "float32":
        x[rng.random(shape) < 0.2] = np.nan
    function = ranked(shape, axis, k, largest, dtype)
    (result,) = avx2.run(function, avx2.schedule(function, rule=top_k), [x])
    np.testing.assert_array_equal(result, first(x, axis, k, largest=largest))


@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_few_of_long_rows(harness, order):
    x = np.random.default_rng(0).standard_normal((3, 5000)).astype("f4")
    x = {"random": x, "rising": np.sort(x), "falling": -np.sort(-x)}[order]
    function = ranked(x.shape, 1, 40, True, "float32")
    (result,) = harness.run(function, harness.schedule(function, rule=top_k), [x])
    np.testing.assert_array_equal(result, first(x, 1, 40, largest=True))
