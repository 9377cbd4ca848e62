"""Products and sums with constants of each channel are in the weights and the bias of the convolution."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize import scaled_convolution
from hybridc.passes.canonicalize.canonicalize import canonicalize
from tests.support.programs import built_program, drawn, run_llvm

op = relax.op
SHAPE, KERNEL = (2, 3, 6, 5), (4, 3, 3, 3)


def operators(program):
    return [binding.value.op.name.removeprefix("relax.") for binding in program.bindings]


def results(program, x):
    return run_llvm(program.module, x, *(program.weights[v.name] for v in program.main.params[1:]))[0]


def assert_same(before, after):
    x = drawn(0, *SHAPE)
    np.testing.assert_allclose(results(after, x), results(before, x), rtol=1e-5, atol=1e-5)


def convolved(e, x, w):
    return e(op.nn.conv2d(x, w, padding=(1, 1)))


CHAINS = {
    "scale": (lambda e, y, a, b: e(op.multiply(a, y)), ["nn.conv2d"]),
    "quotient": (lambda e, y, a, b: e(op.divide(y, a)), ["nn.conv2d"]),
    "scale and shift": (lambda e, y, a, b: e(op.add(e(op.multiply(y, a)), b)), ["nn.conv2d", "add"]),
    "bias and scale": (lambda e, y, a, b: e(op.multiply(e(op.add(b, y)), a)), ["nn.conv2d", "add"]),
    "two shifts": (lambda e, y, a, b: e(op.subtract(e(op.add(y, a)), b)), ["nn.conv2d", "add"]),
    "a number": (
        lambda e, y, a, b: e(op.multiply(e(op.add(y, a)), relax.const(0.1, "float32"))),
        ["nn.conv2d", "add"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_constants_of_channels_are_in_weights_and_bias(name):
    chain, expected = CHAINS[name]
    weights = [drawn(1, *KERNEL), np.abs(drawn(2, 1, 4, 1, 1)) + 0.5, drawn(3, 4, 1, 1)]
    before = built_program(lambda e, x, w, a, b: chain(e, convolved(e, x, w), a, b), SHAPE, weights)
    after = canonicalize(before)
    assert operators(after) == expected
    assert_same(before, after)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 1, 1), (6, 5)])
def test_other_constants_stay(shape):
    before = built_program(
        lambda e, x, w, a: e(op.multiply(convolved(e, x, w), a)), SHAPE, [drawn(1, *KERNEL), drawn(2, *shape)]
    )
    assert operators(canonicalize(before)) == ["nn.conv2d", "multiply"]


def test_infinite_factors_and_quotients_by_zero_stay():
    def build(e, x, w, a, b):
        return e(op.add(e(op.multiply(convolved(e, x, w), a)), e(op.divide(convolved(e, x, w), b))))

    weights = [drawn(1, *KERNEL), np.full((4, 1, 1), np.inf, np.float32), np.zeros((4, 1, 1), np.float32)]
    after = canonicalize(built_program(build, SHAPE, weights))
    assert sorted(operators(after)) == ["add", "divide", "multiply", "nn.conv2d", "nn.conv2d"]


def test_a_convolution_that_others_read_keeps_its_weights():
    def build(e, x, w, a):
        y = convolved(e, x, w)
        return e(op.add(e(op.multiply(y, a)), y))

    before = built_program(build, SHAPE, [drawn(1, *KERNEL), drawn(2, 4, 1, 1)])
    after = canonicalize(before)
    assert operators(after) == ["nn.conv2d", "multiply", "add"]
    assert_same(before, after)


@pytest.mark.parametrize(("limit_bytes", "weights"), [(0, 1), (1 << 20, 3)])
def test_large_weights_of_several_convolutions_are_not_copied(monkeypatch, limit_bytes, weights):
    monkeypatch.setattr(scaled_convolution, "SHARED_FOLD_LIMIT_BYTES", limit_bytes)

    def build(e, x, w, a, b):
        return e(op.add(e(op.multiply(convolved(e, x, w), a)), e(op.multiply(convolved(e, x, w), b))))

    before = built_program(build, SHAPE, [drawn(1, *KERNEL), drawn(2, 4, 1, 1), drawn(3, 4, 1, 1)])
    after = canonicalize(before)
    assert len([w for w in after.weights.values() if w.shape == KERNEL]) == (1 if limit_bytes == 0 else 2)
    assert_same(before, after)
