"""Depthwise convolutions against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.conv2d.depthwise import depthwise

op = relax.op


@pytest.mark.parametrize(
    ("channels", "multiplier", "size", "kernel", "stride", "dilation"),
    [(8, 1, 14, 3, 1, 1), (5, 1, 15, 3, 2, 1), (4, 2, 7, 3, 1, 1), (3, 1, 20, 5, 1, 2), (32, 1, 7, 3, 1, 1)],
)
def test_depthwise_matches_float64(
    harness, assert_close, channels, multiplier, size, kernel, stride, dilation
):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, channels, size, size)).astype("f4")
    w = rng.standard_normal((channels * multiplier, 1, kernel, kernel)).astype("f4")
    b = rng.standard_normal((1, channels * multiplier, 1, 1)).astype("f4")
    padding = kernel // 2 * dilation

    def build(emit, x, w, b):
        y = op.nn.conv2d(x, w, strides=stride, padding=padding, dilation=dilation, groups=channels)
        return emit(op.clip(emit(op.add(emit(y), b)), 0.0, 6.0))

    function = harness.function(build, [x.shape, w.shape, b.shape])
    scheduled = harness.schedule(function, [1], depthwise)
    (result,) = harness.run(function, scheduled, [x, w, b])
    padded = np.pad(x.astype("f8"), ((0, 0), (0, 0), (padding,) * 2, (padding,) * 2)).repeat(multiplier, 1)
    extent = result.shape[2]
    reach = (extent - 1) * stride + 1
    expected = np.zeros(result.shape) + b
    for i in range(kernel):
        for j in range(kernel):
            top, left = i * dilation, j * dilation
            expected += (
                w[:, 0, i, j][:, None, None]
                * padded[:, :, top : top + reach : stride, left : left + reach : stride]
            )
    assert_close(result, np.clip(expected, 0, 6))


def test_depthwise_in_three_dimensions_matches_float64(harness, assert_close):
    rng = np.random.default_rng(6)
    x, w = (rng.standard_normal(shape).astype("f4") for shape in ((2, 6, 5, 7, 19), (6, 1, 3, 3, 3)))
    function = harness.function(
        lambda e, x, w: e(op.nn.conv3d(x, w, padding=1, groups=6)), [x.shape, w.shape]
    )
    scheduled = harness.schedule(function, [1])
    assert scheduled.rule == "depthwise"
    padded = np.pad(x.astype("f8"), ((0, 0), (0, 0), (1, 1), (1, 1), (1, 1)))
    taps = np.lib.stride_tricks.sliding_window_view(padded, (3, 3, 3), (2, 3, 4))
    (result,) = harness.run(function, scheduled, [x, w])
    assert_close(result, np.einsum("ncdhwijk,cijk->ncdhw", taps, w[:, 0].astype("f8")))
