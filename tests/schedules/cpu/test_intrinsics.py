"""Elementary functions against libm in float64, with the values that polynomials get wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu import install

REFERENCE: dict[str, Any] = {
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
}
SPECIAL: list[float] = [
    0.0,
    -0.0,
    np.nan,
    np.inf,
    -np.inf,
    1e-40,
    -1e-40,
    88.7,
    88.73,
    -87.5,
    -95,
    -103.9,
    -104,
    -1e3,
    1e3,
    1,
    -1,
    3.4e38,
]


def values() -> np.ndarray:
    parts: list[Any] = [
        SPECIAL,
        np.linspace(-12, 12, 1000),
        np.linspace(-104, 89, 1014),
        np.geomspace(1e-44, 3e38, 1000),
    ]
    return np.concatenate(parts).astype("f4")[:3024]


@pytest.mark.parametrize("size", [3024, 3017])
@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_function_is_that_of_libm(harness, name, size):
    x = values()[:size]
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape])
    (result,) = harness.run(function, harness.schedule(function), [x])
    exact = REFERENCE[name](x.astype("f8"))
    expected = exact.astype("f4")
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    infinite = np.isinf(expected) | np.isinf(result)
    np.testing.assert_array_equal(result[infinite], expected[infinite])
    finite = np.isfinite(expected)
    error = np.abs(result[finite] - exact[finite])
    smallest_normal = 1.2e-38
    scale = np.abs(exact[finite]) if name in ("exp", "log") else np.maximum(np.abs(exact[finite]), 1)
    assert (error / np.maximum(scale, smallest_normal)).max() <= 3e-7


@pytest.mark.parametrize("name", REFERENCE)
def test_double_precision_keeps_its_precision(harness, name):
    x = np.linspace(0.1, 5, 64)
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape], "float64")
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, REFERENCE[name](x), rtol=1e-14)


@pytest.mark.parametrize("name", REFERENCE)
def test_half_precision_is_rounded_single_precision(harness, name):
    x = np.linspace(0.1, 5, 64).astype("f2")
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape], "float16")
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, REFERENCE[name](x.astype("f8")), rtol=1e-3)


def test_installing_twice_is_harmless():
    install()
    install()
