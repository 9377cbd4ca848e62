"""Products of a few rows with large matrices, as they are and transposed, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, tirx

from hybridc.schedules.blocked_operators import extents, sum_over
from hybridc.schedules.cpu.matmul.skinny import skinny_gemm

op = relax.op
SHAPES = [(16, 512, 1040), (2, 1024, 640), (7, 600, 912), (20, 1024, 528), (32, 2048, 272)]


@pytest.fixture(params=SHAPES, ids=str)
def factors(request: pytest.FixtureRequest) -> list[np.ndarray]:
    rows, depth, columns = request.param
    rng = np.random.default_rng(2)
    return [rng.standard_normal(shape).astype("f4") for shape in ((rows, depth), (depth, columns))]


def test_product_with_a_matrix_matches_float64(harness, assert_close, factors):
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), [f.shape for f in factors])
    (result,) = harness.run(function, harness.schedule(function, rule=skinny_gemm), factors)
    assert_close(result, factors[0].astype("f8") @ factors[1])


def test_product_with_a_transposed_matrix_and_an_epilogue_matches_float64(harness, assert_close, factors):
    a, b = factors[0], np.ascontiguousarray(factors[1].T[:-3])
    bias = np.linspace(-9, 9, len(b), dtype="f4")

    function = _transposed(a.shape, b.shape)
    (result,) = harness.run(function, harness.schedule(function, rule=skinny_gemm), [b, a, bias])
    assert_close(result, np.maximum(a.astype("f8") @ b.T + bias, 0))


def _transposed(left: tuple[int, ...], right: tuple[int, ...]) -> tirx.PrimFunc:
    """`relu(x w^T + bias)` as one function."""
    shapes = (right, left, right[:1])
    w, x, bias = (te.placeholder(extents(*s), "float32", n) for s, n in zip(shapes, "wxb", strict=True))
    k = sum_over(left[1], "k")
    shape = extents(left[0], right[0])
    product = te.compute(shape, lambda i, j: te.sum(x[i, k] * w[j, k], axis=k))
    y = te.compute(shape, lambda i, j: te.max(product[i, j] + bias[j], tirx.const(0.0, "float32")))
    return te.create_prim_func([w, x, bias, y])


@pytest.mark.parametrize(
    ("shapes", "constants"),
    [
        (((1, 1024), (1024, 1024)), []),
        (((33, 1024), (1024, 1024)), []),
        (((16, 64), (64, 64)), []),
        (((16, 1024), (1024, 1024)), [1]),
        (((4, 16, 512), (4, 512, 1024)), []),
    ],
)
def test_other_products_are_left_to_other_rules(harness, shapes, constants):
    function = harness.function(lambda emit, a, b: emit(op.matmul(a, b)), shapes)
    assert harness.schedule(function, constants).rule != "skinny_gemm"
