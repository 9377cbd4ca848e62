"""Depthwise convolutions of blocked activations against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax import op

from hybridc.schedules.blocked_operators import ConvWindow, blocked_depthwise
from hybridc.schedules.cpu.conv2d_blocked.depthwise import depthwise_blocked
from hybridc.schedules.rule import Request
from hybridc.targets import Target
from tests.support.fusion import fused_behind


def convolved(x: np.ndarray, w: np.ndarray, window: ConvWindow) -> np.ndarray:
    top, left, bottom, right = window.padding
    padded = np.pad(x.astype("f8"), ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0)))
    kh, kw = w.shape[1:3]
    rows, columns = (window.outputs(a, x.shape[2 + a], w.shape[1 + a]) for a in range(2))
    (sh, sw), (dh, dw) = window.strides, window.dilation
    total = np.zeros((*x.shape[:2], rows, columns, x.shape[4]))
    for i in range(kh):
        for j in range(kw):
            lines = slice(i * dh, i * dh + (rows - 1) * sh + 1, sh)
            pixels = slice(j * dw, j * dw + (columns - 1) * sw + 1, sw)
            total += padded[:, :, lines, pixels] * w[None, :, i, j, None, None]
    return total


def same(size: int) -> tuple[int, int, int, int]:
    return (size // 2,) * 4


@pytest.mark.parametrize(
    ("data", "kernel", "window"),
    [
        pytest.param((1, 2, 17, 19, 16), (3, 3), ConvWindow((1, 1), same(3), (1, 1)), id="3x3"),
        pytest.param((2, 3, 14, 15, 8), (3, 3), ConvWindow((2, 2), (0, 0, 1, 1), (1, 1)), id="padded behind"),
        pytest.param((1, 3, 15, 16, 16), (3, 3), ConvWindow((2, 2), same(3), (1, 1)), id="stride 2"),
        pytest.param((1, 2, 7, 7, 8), (5, 5), ConvWindow((1, 1), same(5), (1, 1)), id="5x5"),
        pytest.param((1, 1, 9, 18, 16), (7, 7), ConvWindow((1, 1), same(7), (1, 1)), id="7x7"),
        pytest.param((1, 2, 20, 21, 8), (3, 3), ConvWindow((1, 1), same(9), (4, 4)), id="dilated"),
        pytest.param(
            (1, 1, 6, 40, 16), (1, 5), ConvWindow((1, 2), (0, 3, 0, 2), (1, 2)), id="one row of taps"
        ),
        pytest.param((1, 1, 3, 2, 16), (3, 3), ConvWindow((1, 1), (2, 3, 2, 3), (1, 1)), id="mostly padding"),
        pytest.param((1, 1, 12, 12, 16), (3, 3), ConvWindow((1, 1), (0,) * 4, (1, 1)), id="no padding"),
    ],
)  # fmt: skip
def test_blocked_depthwise_matches_float64(harness, assert_close, data, kernel, window):
    rng = np.random.default_rng(11)
    weight = (data[1], *kernel, data[4])
    function = fused_behind(blocked_depthwise(data, weight, window), lambda y: op.clip(y, 0.0, 6.0))
    scheduled = harness.schedule(function, [1, 2])
    assert scheduled.rule == "depthwise_blocked"
    x, w = (rng.standard_normal(shape).astype("f4") for shape in (data, weight))
    reference = convolved(x, w, window)
    bias = rng.standard_normal((1, data[1], 1, 1, data[4])).astype("f4")
    residual = rng.standard_normal(reference.shape).astype("f4")
    (result,) = harness.run(function, scheduled, [x, w, bias, residual])
    assert_close(result, np.clip(reference + bias + residual, 0, 6))


def test_every_tile_computes_the_same(harness, assert_close):
    rng = np.random.default_rng(12)
    data, weight, window = (1, 2, 13, 30, 16), (2, 3, 3, 16), ConvWindow((1, 1), same(3), (1, 1))
    function = fused_behind(blocked_depthwise(data, weight, window), op.nn.silu)
    x, w = (rng.standard_normal(shape).astype("f4") for shape in (data, weight))
    reference = convolved(x, w, window)
    zero = np.zeros((1, 2, 1, 1, 16), "f4")
    request = Request(function, frozenset([1, 2]), Target((), harness.isa))
    first = depthwise_blocked(request)
    assert first is not None
    choices = first.choices
    assert len(choices) > 1
    for choice in choices[1:4]:
        chosen = depthwise_blocked(Request(function, frozenset([1, 2]), Target((), harness.isa), choice))
        (result,) = harness.run(function, chosen, [x, w, zero, np.zeros(reference.shape, "f4")])
        assert_close(result, reference / (1 + np.exp(-reference)))


def test_padding_does_not_touch_infinities_inside(harness):
    """A tap that reads padding adds nothing, whatever lies at the image's border."""
    data, weight, window = (1, 1, 9, 9, 16), (1, 3, 3, 16), ConvWindow((1, 1), same(3), (1, 1))
    function = fused_behind(blocked_depthwise(data, weight, window), op.nn.relu)
    x = np.ones(data, "f4")
    x[:, :, 4:, 4:] = np.inf
    w = np.ones(weight, "f4")
    residual = np.zeros(data, "f4")
    (result,) = harness.run(
        function, harness.schedule(function, [1, 2]), [x, w, np.zeros((1, 1, 1, 1, 16), "f4"), residual]
    )
    np.testing.assert_array_equal(result, convolved(x, w, window))


def test_weights_known_at_run_time_are_read_alike(harness, assert_close):
    data, weight, window = (1, 2, 8, 9, 8), (2, 3, 3, 8), ConvWindow((1, 1), same(3), (1, 1))
    function = fused_behind(blocked_depthwise(data, weight, window), op.nn.relu)
    rng = np.random.default_rng(13)
    x, w = (rng.standard_normal(shape).astype("f4") for shape in (data, weight))
    reference = convolved(x, w, window)
    zeros = np.zeros((1, 2, 1, 1, 8), "f4"), np.zeros(reference.shape, "f4")
    (result,) = harness.run(function, harness.schedule(function, rule=depthwise_blocked), [x, w, *zeros])
    assert_close(result, np.maximum(reference, 0))
