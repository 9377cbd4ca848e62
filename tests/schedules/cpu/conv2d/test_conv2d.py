"""Convolutions: every stride, padding, dilation, group count and tail against a float64 loop over taps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.conv2d.conv2d import conv2d
from hybridc.schedules.rule import Request
from hybridc.targets import Target

op = relax.op

CASES: list[tuple[Any, ...]] = [
    # data, weight, stride, padding, dilation, groups
    ((1, 3, 15, 15), (17, 3, 3, 3), 1, 1, 1, 1),
    ((2, 6, 14, 14), (8, 6, 3, 3), 2, 1, 1, 1),
    ((1, 12, 7, 7), (40, 12, 3, 3), 1, 1, 1, 1),
    ((1, 5, 7, 7), (9, 5, 1, 1), 1, 0, 1, 1),
    ((1, 8, 8, 8), (1, 8, 1, 1), 1, 0, 1, 1),
    ((1, 6, 14, 14), (9, 6, 1, 1), 2, 0, 1, 1),
    ((1, 6, 14, 14), (9, 6, 1, 1), 1, 1, 1, 1),
    ((1, 8, 14, 14), (12, 2, 3, 3), 1, 2, 2, 4),
    ((1, 3, 37, 37), (3, 3, 7, 7), 3, 3, 1, 1),
    ((1, 4, 28, 13), (6, 4, 5, 5), 2, 2, 2, 1),
    ((1, 2, 5, 5), (3, 2, 5, 5), 1, 0, 1, 1),
    ((1, 15, 300), (15, 15, 51), 1, 200, 8, 1),
    ((2, 4, 33), (7, 4, 3), 2, 1, 1, 1),
    ((2, 4, 33), (7, 4, 1), 1, 0, 1, 1),
    # one long line: in blocks of columns
    ((2, 3, 2001), (5, 3, 3), 1, 3, 2, 1),
    ((1, 4, 4001), (6, 2, 4), 2, 1, 1, 2),
    ((1, 3, 3840), (7, 3, 1), 1, 0, 1, 1),
    # volumes
    ((2, 3, 5, 6, 21), (4, 3, 3, 3, 3), 1, 1, 1, 1),
    ((1, 4, 7, 9, 11), (6, 2, 2, 3, 3), 2, 2, 2, 2),
    ((2, 3, 4, 5, 6), (5, 3, 1, 1, 1), 1, 0, 1, 1),
    ((1, 3, 6, 3, 17), (5, 3, 4, 1, 1), 1, 1, 1, 1),
]


def reference_conv(x, w, stride, padding, dilation, groups):
    n, _, *extents = x.shape
    outputs, inputs, *taps = w.shape
    x = np.pad(x, ((0, 0), (0, 0), *[(padding, padding)] * len(extents)))
    sizes = [
        (extent + 2 * padding - dilation * (count - 1) - 1) // stride + 1
        for extent, count in zip(extents, taps, strict=True)
    ]
    y = np.zeros((n, groups, outputs // groups, *sizes))
    for tap in itertools.product(*map(range, taps)):
        starts = [k * dilation for k in tap]
        read = [slice(a, a + (size - 1) * stride + 1, stride) for a, size in zip(starts, sizes, strict=True)]
        part = x[:, :, *read].reshape(n, groups, inputs, *sizes)
        y += np.einsum("ngc...,goc->ngo...", part, w[:, :, *tap].reshape(groups, outputs // groups, inputs))
    return y.reshape(n, outputs, *sizes)


def _conv(emit, x, w, stride, padding, dilation, groups):
    operator = {3: op.nn.conv1d, 4: op.nn.conv2d, 5: op.nn.conv3d}[len(x.ty.shape)]
    return emit(operator(x, w, strides=stride, padding=padding, dilation=dilation, groups=groups))


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_with_bias_residual_and_relu_matches_float64(harness, assert_close, case, constant):
    data, weight, stride, padding, dilation, groups = case
    how = (stride, padding, dilation, groups)
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal(data), rng.standard_normal(weight)
    expected = reference_conv(x.astype("f4").astype("f8"), w.astype("f4").astype("f8"), *how)
    bias = rng.standard_normal((1, weight[0]) + (1,) * (len(data) - 2))
    residual = rng.standard_normal(expected.shape)

    def build(emit, x, w, b, r):
        y = emit(op.add(_conv(emit, x, w, *how), b))
        return emit(op.nn.relu(emit(op.add(y, r))))

    inputs = [a.astype("f4") for a in (x, w, bias, residual)]
    function = harness.function(build, [a.shape for a in inputs])
    scheduled = harness.schedule(function, [1] if constant else [], conv2d)
    (result,) = harness.run(function, scheduled, inputs)
    assert_close(result, np.maximum(expected + bias + residual, 0))


def test_convolution_without_epilogue_writes_the_output(harness, assert_close):
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal(s).astype("f4") for s in ((1, 5, 9, 9), (4, 5, 3, 3))]
    function = harness.function(lambda emit, x, w: _conv(emit, x, w, 1, 1, 1, 1), [a.shape for a in inputs])
    (result,) = harness.run(function, harness.schedule(function, [1], conv2d), inputs)
    assert_close(result, reference_conv(inputs[0].astype("f8"), inputs[1].astype("f8"), 1, 1, 1, 1))


def test_residual_may_share_its_bytes_with_the_output(harness):
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(s).astype("f4") for s in ((1, 5, 13, 13), (20, 5, 3, 3), (1, 20, 13, 13))]
    function = harness.function(
        lambda emit, x, w, r: emit(op.add(_conv(emit, x, w, 1, 1, 1, 1), r)), [a.shape for a in inputs]
    )
    scheduled = harness.schedule(function, [], conv2d)
    (expected,) = harness.run(function, scheduled, inputs)
    np.testing.assert_array_equal(harness.run_in_place(scheduled, inputs, 2), expected)


@pytest.mark.parametrize(("stride", "kernel", "padding"), [(2, 2, 0), (2, 3, 1), (1, 3, 1)])
def test_transposed_convolution_matches_float64(harness, assert_close, stride, kernel, padding):
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(s).astype("f4") for s in ((1, 4, 6, 7), (4, 5, kernel, kernel)))

    def build(emit, x, w):
        return emit(op.nn.conv2d_transpose(x, w, strides=(stride, stride), padding=(padding, padding)))

    spread = np.zeros((1, 4, 5 * stride + 1, 6 * stride + 1))
    spread[:, :, ::stride, ::stride] = x
    flipped = w.astype("f8").transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
    expected = reference_conv(spread, flipped, 1, kernel - 1 - padding, 1, 1)
    function = harness.function(build, [x.shape, w.shape])
    (result,) = harness.run(function, harness.schedule(function, [1], conv2d), [x, w])
    assert_close(result, expected)


def test_weights_are_packed_only_where_they_are_constant(avx2):
    function = avx2.function(lambda emit, x, w: _conv(emit, x, w, 1, 1, 1, 1), [(1, 3, 8, 8), (10, 3, 3, 3)])
    constant, variable = avx2.schedule(function, [1], conv2d), avx2.schedule(function, (), conv2d)
    ((position, packing),) = constant.packings
    assert position == 1 and not variable.packings
    weight = np.arange(10 * 27, dtype="f4").reshape(10, 3, 3, 3)
    packed = packing.apply(weight)
    blocks, rows = packed.shape[0], packed.shape[-1]
    unpacked = packed.transpose(0, 4, 1, 2, 3).reshape(blocks * rows, 3, 3, 3)
    np.testing.assert_array_equal(unpacked[:10], weight)
    assert not unpacked[10:].any()


def test_tiles_are_offered_and_taken_by_their_label(avx2):
    function = avx2.function(
        lambda emit, x, w: _conv(emit, x, w, 1, 1, 1, 1), [(1, 3, 20, 20), (10, 3, 3, 3)]
    )
    first = avx2.schedule(function, [1], conv2d)
    assert len(first.choices) > 2
    request = Request(function, frozenset([1]), Target((), avx2.isa))
    shapes = set()
    for choice in first.choices:
        chosen = conv2d(replace(request, choice=choice))
        assert chosen is not None and chosen.choices == first.choices
        shapes.add(chosen.packings[0][1].shape)
    again = conv2d(request)
    assert len(shapes) > 1 and again is not None and first.packings == again.packings
