"""Prefix sums against float64."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.passes.canonicalize.cumsum_topk import cumulative_sum as prefix_sums
from hybridc.schedules.cpu.reduction.cumulative_sum import cumulative_sum


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7,), 0),
        ((1,), 0),
        ((3, 50, 5), 1),
        ((2, 1000), 1),
        ((40, 30), 0),
        ((5, 3, 7, 100), 1),
        ((2, 9, 4), 2),
    ],
    ids=str,
)
def test_sums_match_float64(harness, assert_close, shape, axis, exclusive):
    x = np.random.default_rng(1).standard_normal(shape).astype("f4")
    function = prefix_sums(shape, axis, "float32", exclusive)
    (result,) = harness.run(function, harness.schedule(function, rule=cumulative_sum), [x])
    wide = x.astype("f8")
    assert_close(result, np.cumsum(wide, axis) - (wide if exclusive else 0))


def test_sums_of_integers_are_exact(avx2):
    x = np.random.default_rng(2).integers(-9, 9, (4, 77, 3))
    function = prefix_sums(x.shape, 1, "int64", False)
    (result,) = avx2.run(function, avx2.schedule(function, rule=cumulative_sum), [x])
    np.testing.assert_array_equal(result, np.cumsum(x, 1))


def test_roundings_of_a_long_row_do_not_add_up(avx2):
    x = np.random.default_rng(3).random(40_000).astype("f4") + np.float32(1)
    function = prefix_sums(x.shape, 0, "float32", False)
    (result,) = avx2.run(function, avx2.schedule(function, rule=cumulative_sum), [x])
    np.testing.assert_allclose(result, np.cumsum(x, dtype="f8"), rtol=2e-6)
