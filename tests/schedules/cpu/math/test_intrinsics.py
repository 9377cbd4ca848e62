"""Elementary functions against libm in float64, over the whole range of float32."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from hybridc.schedules.cpu.math.intrinsics import install


def sigmoid(x: np.ndarray) -> np.ndarray:
    power = np.exp(-np.abs(x))
    return np.where(x < 0, power, 1) / (1 + power)


REFERENCE: dict[str, tuple[Any, float]] = {
    "exp": (np.exp, 1.1),
    "log": (np.log, 1),
    "sigmoid": (sigmoid, 2.5),
    "tanh": (np.tanh, 6),
    "erf": (np.vectorize(math.erf), 6),
    "sinh": (np.sinh, 4),
    "cosh": (np.cosh, 4),
    "sin": (np.sin, 2),
    "cos": (np.cos, 2),
    "tan": (np.tan, 4),
}
"""Functions in float64, and the error allowed in units in the last place of the exact result."""
POWERS = [0.0, -0.0, 1, -1, 2, 3, -3, 0.5, -0.5, 0.75, 1.5, 16777217, -8388607, 1e30, -1e30]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 88.72284, 88.7229, -103.97, -103.98, 1e-45, -1e-45]


def whole_range(seed: int, mantissas: int) -> np.ndarray:
    """Every sign and exponent (infinities, NaN and denormal numbers too) with so many mantissas."""
    rng = np.random.default_rng(seed)
    tops = np.repeat(np.arange(512, dtype=np.uint32) << 23, mantissas)
    patterns = tops | rng.integers(0, 1 << 23, tops.size, dtype=np.uint32)
    near = rng.uniform(-12, 12, 8192)  # where most functions change most
    return np.concatenate([SPECIAL, patterns.view(np.float32), near]).astype("f4")


def assert_within(result: np.ndarray, exact: np.ndarray, units: float) -> None:
    """NaN, infinities and signs as in the rounded reference, and errors of at most `units`."""
    expected = exact.astype("f4")
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[number]), np.signbit(expected[number]))
    infinite = np.isinf(expected) | np.isinf(result)
    np.testing.assert_array_equal(result[infinite & number], expected[infinite & number])
    finite = np.isfinite(expected)
    unit = np.spacing(np.abs(expected[finite])).astype("f8")
    assert (np.abs(result[finite] - exact[finite]) / unit).max() <= units


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_function_is_that_of_libm_over_the_whole_range(harness, name):
    reference, units = REFERENCE[name]
    x = whole_range(1, 61)
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape])
    (result,) = harness.run(function, harness.schedule(function), [x])
    assert_within(result, reference(x.astype("f8")), units)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REFERENCE if name != "erf"])  # its reference is slow
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_function_is_that_of_libm_for_many_arguments(harness, name):
    reference, units = REFERENCE[name]
    for seed in range(4):
        x = whole_range(seed, 8191)
        function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape])
        (result,) = harness.run(function, harness.schedule(function), [x])
        assert_within(result, reference(x.astype("f8")), units)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_power_is_that_of_libm(harness):
    rng = np.random.default_rng(2)
    bases = np.array([*SPECIAL, *POWERS, 1 + 2**-23, 1 - 2**-24], "f4")
    special = [grid.ravel() for grid in np.meshgrid(bases, bases)]
    x, patterns = whole_range(3, 61), rng.permutation(whole_range(4, 61))
    size = x.size // 3  # moderate exponents for any base, any exponent, and bases near one
    y = np.concatenate([rng.uniform(-4, 4, size), patterns[size : 2 * size], rng.integers(-99, 99, x.size)])
    y = y[: x.size].astype("f4")
    x[2 * size :: 2] = 1 + rng.uniform(-0.1, 0.1, x[2 * size :: 2].size)
    x, y = np.concatenate([special[0], x]), np.concatenate([special[1], y])
    function = harness.function(lambda e, x, y: e(relax.op.power(x, y)), [x.shape] * 2)
    (result,) = harness.run(function, harness.schedule(function), [x, y])
    assert_within(result, np.power(x.astype("f8"), y.astype("f8")), 0.6)


@pytest.mark.parametrize("exponent", [0.75, 3.0, -1.5])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_power_with_a_constant_exponent(avx2, exponent):
    x = whole_range(5, 15)
    constant = relax.const(exponent, "float32")
    function = avx2.function(lambda e, x: e(relax.op.power(x, constant)), [x.shape])
    (result,) = avx2.run(function, avx2.schedule(function), [x])
    exact = np.power(x.astype("f8"), exponent)
    assert_within(result, exact, 2.5)


@pytest.mark.parametrize("name", [*REFERENCE, "rsqrt", "sqrt", "floor", "ceil", "round", "trunc"])
def test_nothing_is_computed_lane_by_lane(harness, name):
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [(16, 64)])
    target = {"kind": "llvm", "mcpu": harness.isa.mcpu, "mattr": list(harness.isa.mattr)}
    install()
    module = tvm.IRModule({"main": harness.schedule(function).function.with_attr("global_symbol", "main")})
    assembly = tvm.compile(module, target=tvm.target.Target(target)).mod.inspect_source("asm")
    assert "vmovups" in assembly
    assert not re.findall(r"\b(?:call|jmp)q?\s+\*?[a-z]\w*@", assembly)


def test_names_within_names_take_little_time(avx2):
    def mish(e, x):
        return e(relax.op.multiply(x, e(relax.op.tanh(e(relax.op.nn.softplus(x))))))

    x = np.linspace(-20, 19, 130).astype("f4")
    function = avx2.function(mish, [x.shape])
    (result,) = avx2.run(function, avx2.schedule(function), [x])
    np.testing.assert_allclose(result, x * np.tanh(np.log1p(np.exp(x.astype("f8")))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCE)
def test_double_precision_keeps_its_precision(harness, name):
    x = np.linspace(0.1, 5, 64)
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape], "float64")
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, REFERENCE[name][0](x), rtol=1e-14)


@pytest.mark.parametrize("name", REFERENCE)
def test_half_precision_is_rounded_single_precision(harness, name):
    x = np.linspace(0.1, 5, 64).astype("f2")
    function = harness.function(lambda e, x: e(getattr(relax.op, name)(x)), [x.shape], "float16")
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, REFERENCE[name][0](x.astype("f8")), rtol=1e-3)


def test_installing_twice_is_harmless(harness):
    x = np.linspace(-5, 5, 64).astype("f4")
    function = harness.function(lambda e, x: e(relax.op.exp(x)), [x.shape])
    install()
    install()
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, np.exp(x.astype("f8")), rtol=1e-6)
