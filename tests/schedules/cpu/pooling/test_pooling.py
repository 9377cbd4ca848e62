"""Pooling against numpy: windows, strides, edges and layouts."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

op = relax.op


def windows(x, kernel, stride, padding, fill):
    """`[..., H, W]` to `[..., OH, OW, kernel, kernel]`; padding is top, left, bottom, right."""
    top, left, bottom, right = padding
    x = np.pad(x, (*((0, 0),) * (x.ndim - 2), (top, bottom), (left, right)), constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (x.ndim - 2, x.ndim - 1))
    return found[..., ::stride, ::stride, :, :]


def maximum(x, kernel, stride, padding):
    return windows(x, kernel, stride, padding, -np.inf).max((-1, -2))


def average(x, kernel, stride, padding):
    return np.nanmean(windows(x, kernel, stride, padding, np.nan), (-1, -2))


POOLS = {"max": (op.nn.max_pool2d, maximum), "average": (op.nn.avg_pool2d, average)}

SHAPES = [
    # height, width, kernel, stride, padding
    (56, 56, 3, 2, (1, 1, 1, 1)),
    (13, 37, 3, 2, (1, 1, 1, 1)),
    (28, 28, 3, 1, (1, 1, 1, 1)),
    (9, 150, 2, 2, (0, 0, 0, 0)),
    (11, 21, 3, 2, (0, 0, 1, 1)),
    (9, 67, 5, 1, (2, 2, 2, 2)),
    (8, 9, 7, 1, (0, 0, 0, 0)),
    (5, 4, 3, 1, (1, 1, 1, 1)),
    (12, 70, 4, 2, (1, 1, 1, 1)),
    (15, 40, 11, 2, (0, 0, 0, 0)),
]


def run(harness, build, x):
    function = harness.function(build, [x.shape])
    scheduled = harness.schedule(function)
    assert scheduled.rule == "pooling"
    (result,) = harness.run(function, scheduled, [x])
    return result


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_pooling_matches_numpy(harness, kind, shape):
    height, width, kernel, stride, padding = shape
    operator, expected = POOLS[kind]
    x = np.random.default_rng(1).standard_normal((2, 3, height, width)).astype("f4")
    result = run(harness, lambda e, x: e(operator(x, (kernel,) * 2, (stride,) * 2, padding)), x)
    np.testing.assert_allclose(result, expected(x, kernel, stride, padding), atol=1e-6)


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize(
    ("lanes", "kernel", "stride", "padding"), [(16, 3, 2, 1), (8, 2, 2, 0), (16, 3, 3, 1), (8, 2, 1, 0)]
)
def test_pooling_of_blocked_channels_matches_numpy(harness, kind, lanes, kernel, stride, padding):
    operator, expected = POOLS[kind]
    x = np.random.default_rng(2).standard_normal((2, 3, 13, 17, lanes)).astype("f4")
    window = kernel, stride, (padding,) * 4
    result = run(
        harness,
        lambda e, x: e(operator(x, (kernel,) * 2, (stride,) * 2, (padding,) * 2, layout=f"NCHW{lanes}c")),
        x,
    )
    plain = expected(np.moveaxis(x, -1, 2), *window)
    np.testing.assert_allclose(result, np.moveaxis(plain, 2, -1), atol=1e-6)


def test_rounded_up_pooling_ignores_what_lies_outside(harness):
    x = np.random.default_rng(3).standard_normal((1, 4, 14, 14)).astype("f4")
    result = run(harness, lambda e, x: e(op.nn.max_pool2d(x, (3, 3), (2, 2), ceil_mode=True)), x)
    np.testing.assert_array_equal(result, maximum(x, 3, 2, (0, 0, 1, 1)))


def test_average_over_padding_divides_by_the_whole_window(harness):
    x = np.random.default_rng(4).standard_normal((1, 4, 20, 20)).astype("f4")
    pool = op.nn.avg_pool2d
    result = run(harness, lambda e, x: e(pool(x, (3, 3), (2, 2), (1, 1), count_include_pad=True)), x)
    np.testing.assert_allclose(result, windows(x, 3, 2, (1,) * 4, 0).mean((-1, -2)), atol=1e-6)


def test_pooling_of_lines_matches_numpy(harness):
    x = np.random.default_rng(5).standard_normal((2, 5, 101)).astype("f4")
    result = run(harness, lambda e, x: e(op.nn.max_pool1d(x, (3,), (2,), (1, 1))), x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1)), constant_values=-np.inf)
    expected = np.lib.stride_tricks.sliding_window_view(padded, 3, 2)[..., ::2, :].max(-1)
    np.testing.assert_array_equal(result, expected)


def test_element_wise_epilogue_joins_the_pool(harness):
    x = np.random.default_rng(6).standard_normal((1, 3, 22, 22)).astype("f4")
    result = run(harness, lambda e, x: e(op.nn.relu(e(op.nn.avg_pool2d(x, (2, 2), (2, 2))))), x)
    np.testing.assert_allclose(result, np.maximum(average(x, 2, 2, (0,) * 4), 0), atol=1e-6)


@pytest.mark.parametrize("width", [22, 260])
def test_an_addition_joins_the_pool_of_blocks_of_any_width(harness, width):
    """What is added may lie where the result will: sums may not."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, 2, 4, width, 8)).astype("f4")
    y = rng.standard_normal((1, 2, 2, width // 2, 8)).astype("f4")
    function = harness.function(
        lambda e, x, y: e(op.add(e(op.nn.max_pool2d(x, (2, 2), (2, 2), layout="NCHW8c")), y)),
        [x.shape, y.shape],
    )
    result = harness.run_in_place(harness.schedule(function), [x, y], 1)
    plain = maximum(np.moveaxis(x, -1, 2), 2, 2, (0,) * 4)
    np.testing.assert_array_equal(result, np.moveaxis(plain, 2, -1) + y)


def test_infinities_pass_through_a_maximum(harness):
    x = np.full((1, 1, 8, 40), -np.inf, "f4")
    x[0, 0, 3, 4] = np.inf
    result = run(harness, lambda e, x: e(op.nn.max_pool2d(x, (2, 2), (2, 2))), x)
    assert result[0, 0, 1, 2] == np.inf


def test_many_channels_side_by_side_are_not_unrolled(avx2):
    function = avx2.function(
        lambda e, x: e(op.nn.max_pool2d(x, (2, 2), (2, 2), layout="NHWC")), [(1, 8, 8, 256)]
    )
    assert avx2.schedule(function).rule == "reduction"
