"""Subnormal weights of products become zero; others stay."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.canonicalize.subnormals import CHUNK_BYTES, SMALLEST_NORMAL, drop_subnormal_weights
from tests.support.programs import drawn, program_of

op = relax.op


def program(build, x_shape, weight):
    """A program that computes `build(emit, x, w)`."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(x_shape, "float32"))
    w = relax.Var("w", relax.TensorType(weight.shape, str(weight.dtype)))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([build(builder.emit, x, w)]))
        builder.emit_func_output(result)
    return program_of(builder.get(), {"w": weight})


def weight_with_subnormals(*shape):
    """Some of them at the limit, of both signs, and one last."""
    weight = drawn(0, *shape)
    flat = weight.reshape(-1)
    flat[:5] = 1e-40, -1e-40, SMALLEST_NORMAL, -SMALLEST_NORMAL, 0.0
    flat[-1] = np.nextafter(SMALLEST_NORMAL, np.float32(0))
    return weight


def convolution(e, x, w):
    return e(op.nn.conv2d(x, w))


def transposed(e, x, w):
    return e(op.nn.conv2d_transpose(x, w))


def product(e, x, w):
    return e(op.matmul(x, w))


@pytest.mark.parametrize(
    ("build", "x", "w"),
    [
        (convolution, (1, 3, 5, 5), (4, 3, 3, 3)),
        (transposed, (1, 4, 5, 5), (4, 3, 3, 3)),
        (product, (2, 6), (6, 4)),
        (product, (2, 6), (6,)),
        (product, (1, 2), (2, CHUNK_BYTES // 4)),
    ],
)
def test_subnormal_weights_of_products_are_zero(build, x, w):
    weight = weight_with_subnormals(*w)

    after = drop_subnormal_weights(program(build, x, weight)).weights["w"]

    expected = weight.copy().reshape(-1)
    expected[[0, 1, -1]] = 0
    np.testing.assert_array_equal(after.reshape(-1), expected)


def test_a_weight_that_is_read_elsewhere_stays():
    before = program(lambda e, x, w: e(op.add(e(op.matmul(x, w)), w)), (4, 4), weight_with_subnormals(4, 4))
    assert drop_subnormal_weights(before) is before


@pytest.mark.parametrize(
    "build", [lambda e, x, w: e(op.multiply(x, w)), lambda e, x, w: e(op.matmul(x, e(op.exp(w))))]
)
def test_weights_of_other_operators_stay(build):
    before = program(build, (4, 4), weight_with_subnormals(4, 4))
    assert drop_subnormal_weights(before) is before


@pytest.mark.parametrize(
    "weight", [drawn(0, 4, 4), np.zeros((4, 4), np.float32), np.zeros((4, 0), np.float32)]
)
def test_weights_without_subnormals_are_not_copied(weight):
    before = program(product, (2, 4), weight)
    assert drop_subnormal_weights(before) is before
