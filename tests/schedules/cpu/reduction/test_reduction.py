"""Softmax, normalisation, sums and pooling against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.reduction.reduction import reduction

op = relax.op


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def windows(x, kernel, stride, padding, fill):
    x = np.pad(x, ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]


CASES: dict[str, tuple[Any, ...]] = {
    "softmax_rows": (lambda e, x: e(op.nn.softmax(x)), [(12, 128)], softmax),
    "softmax_of_prime_rows": (lambda e, x: e(op.nn.softmax(x)), [(5, 197)], softmax),
    "softmax_of_short_rows": (lambda e, x: e(op.nn.softmax(x)), [(2, 3, 4, 3)], softmax),
    "softmax_of_many_rows": (lambda e, x: e(op.nn.softmax(x)), [(2, 12, 64, 64)], softmax),
    "softmax_of_one_vector": (lambda e, x: e(op.nn.softmax(x)), [(1000,)], softmax),
    "softmax_over_channels": (lambda e, x: e(op.nn.softmax(x, 1)), [(2, 5, 7, 19)], lambda x: softmax(x, 1)),
    "log_softmax": (lambda e, x: e(op.nn.log_softmax(x)), [(5, 100)], lambda x: np.log(softmax(x))),
    "layer_norm": (
        lambda e, *a: e(op.nn.layer_norm(*a, axes=[-1])),
        [(1, 33, 256), (256,), (256,)],
        layer_norm,
    ),
    "layer_norm_of_odd_rows": (
        lambda e, *a: e(op.nn.layer_norm(*a, axes=[-1])),
        [(2, 3, 37), (37,), (37,)],
        layer_norm,
    ),
    "layer_norm_of_many_rows": (
        lambda e, *a: e(op.nn.layer_norm(*a, axes=[-1])),
        [(5, 15, 301), (301,), (301,)],
        layer_norm,
    ),
    "max_pool": (
        lambda e, x: e(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1))),
        [(1, 16, 56, 56)],
        lambda x: windows(x, 3, 2, 1, -np.inf).max((-1, -2)),
    ),
    "max_pool_of_odd_size": (
        lambda e, x: e(op.nn.max_pool2d(x, (2, 2), (2, 2))),
        [(2, 3, 13, 13)],
        lambda x: windows(x, 2, 2, 0, -np.inf).max((-1, -2)),
    ),
    "max_pool_without_stride": (
        lambda e, x: e(op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1))),
        [(1, 4, 16, 16)],
        lambda x: windows(x, 3, 1, 1, -np.inf).max((-1, -2)),
    ),
    "average_pool": (
        lambda e, x: e(op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=True)),
        [(1, 6, 28, 28)],
        lambda x: windows(x, 3, 2, 1, 0).mean((-1, -2)),
    ),
    "global_average_pool": (
        lambda e, x: e(op.nn.adaptive_avg_pool2d(x, (1, 1))),
        [(1, 40, 7, 7)],
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    "mean_of_planes": (
        lambda e, x: e(op.mean(x, [2, 3], True)),
        [(2, 40, 7, 7)],
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    "mean_of_rows": (lambda e, x: e(op.mean(x, [-1])), [(300, 129)], lambda x: x.mean(-1)),
    "sum_over_batch": (lambda e, x: e(op.sum(x, [0], True)), [(100, 64)], lambda x: x.sum(0, keepdims=True)),
    "sum_of_all": (lambda e, x: e(op.sum(x)), [(100, 64)], lambda x: x.sum()),
    "sum_of_few": (lambda e, x: e(op.sum(x)), [(5,)], lambda x: x.sum()),
    "max_of_middle_axis": (lambda e, x: e(op.max(x, [1])), [(3, 100, 65)], lambda x: x.max(1)),
    "variance": (lambda e, x: e(op.variance(x, [1])), [(3, 100, 64)], lambda x: x.var(1)),
    "sum_of_squares": (
        lambda e, x: e(op.sum(e(op.multiply(x, x)), [-1])),
        [(9, 64)],
        lambda x: (x * x).sum(-1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reduction_matches_float64(harness, assert_close, name):
    build, shapes, reference = CASES[name]
    rng = np.random.default_rng(9)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    function = harness.function(build, shapes)
    scheduled = harness.schedule(function)
    assert scheduled.rule in {"reduction", "softmax", "pooling"}
    (result,) = harness.run(function, scheduled, inputs)
    assert_close(result, np.asarray(reference(*(a.astype("f8") for a in inputs))))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_sums_of_other_types_are_right(harness, dtype):
    x = np.random.default_rng(10).integers(-99, 99, (7, 48)).astype(dtype)
    function = harness.function(lambda e, x: e(op.sum(x, [-1])), [x.shape], dtype)
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_array_equal(result, x.sum(-1))


def test_softmax_needs_no_workspace(avx2):
    function = avx2.function(lambda e, x: e(op.nn.softmax(x)), [(64, 1000)])
    assert avx2.schedule(function).workspace_bytes == ()


def test_added_input_may_share_its_bytes_with_the_output(harness, assert_close):
    """Then the output cannot hold the exponentials meanwhile."""
    rng = np.random.default_rng(20)
    inputs = [rng.standard_normal((6, 48)).astype("f4") for _ in range(2)]
    function = harness.function(lambda e, x, y: e(op.add(e(op.nn.softmax(x)), y)), [(6, 48)] * 2)
    result = harness.run_in_place(harness.schedule(function), inputs, 1)
    assert_close(result, softmax(inputs[0].astype("f8")) + inputs[1])


def test_rows_that_are_read_ahead_may_share_their_bytes_with_the_output(harness, assert_close):
    rng = np.random.default_rng(21)
    inputs = [rng.standard_normal(shape).astype("f4") for shape in ((75, 301), (301,), (301,))]
    function = harness.function(lambda e, *a: e(op.nn.layer_norm(*a, axes=[-1])), [x.shape for x in inputs])
    result = harness.run_in_place(harness.schedule(function), inputs, 0)
    assert_close(result, layer_norm(*(x.astype("f8") for x in inputs)))


def test_variance_over_channels_survives_a_large_mean(harness):
    """Each distance is taken to the mean, computed before."""
    x = (1e3 + np.random.default_rng(22).standard_normal((2, 40, 37))).astype("f4")
    function = harness.function(lambda e, x: e(op.variance(x, [1])), [x.shape])
    (result,) = harness.run(function, harness.schedule(function), [x])
    np.testing.assert_allclose(result, x.astype("f8").var(1), rtol=2e-5)


@pytest.mark.parametrize("width", [32, 21])
def test_a_convolution_in_three_dimensions_matches_float64(harness, assert_close, width):
    rng = np.random.default_rng(23)
    shapes = (2, 3, 5, 6, width), (4, 3, 3, 3, 3), (1, 4, 1, 1, 1)
    x, w, b = (rng.standard_normal(shape).astype("f4") for shape in shapes)

    def build(e, x, w, b):
        return e(op.nn.relu(e(op.add(e(op.nn.conv3d(x, w, padding=(1, 1, 1))), b))))

    function = harness.function(build, shapes)
    scheduled = harness.schedule(function, rule=reduction)
    padded = np.pad(x.astype("f8"), ((0, 0), (0, 0), (1, 1), (1, 1), (1, 1)))
    taps = np.lib.stride_tricks.sliding_window_view(padded, (3, 3, 3), (2, 3, 4))
    (result,) = harness.run(function, scheduled, [x, w, b])
    assert_close(result, np.maximum(np.einsum("ncdhwijk,ocijk->nodhw", taps, w) + b, 0))
