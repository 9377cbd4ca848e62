"""Convolution by Fourier transforms: every transform, dilation, padding, batch and tail against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.conv1d.fourier.dft import Transform
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import fft_conv1d, read_source, schedule_plan
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import ISAS, Target

op = relax.op

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, dilation, padding, length, transform
    (1, 15, 15, 51, 8, 200, 1501, (8, 16)),
    (3, 7, 9, 15, 1, 7, 500, (6, 12)),
    (2, 3, 5, 5, 3, 6, 211, (4, 6)),
    (1, 4, 4, 3, 12, 0, 97, (4, 4)),
    (1, 6, 1, 7, 2, 33, 320, (4, 8)),
    (2, 1, 17, 9, 16, 64, 300, (6, 8)),
    (1, 2, 2, 7, 1, 3, 5, (4, 4)),
    (1, 2, 3, 100, 1, 0, 2000, (12, 16)),
]


def reference_conv(x, w, dilation, padding):
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    length = x.shape[-1] - dilation * (w.shape[-1] - 1)
    taps = (x[:, :, k * dilation : k * dilation + length] for k in range(w.shape[-1]))
    return sum(np.einsum("oc,ncx->nox", w[:, :, k], tap) for k, tap in enumerate(taps))


def _conv(emit, x, w, dilation, padding):
    return emit(op.nn.conv1d(x, w, padding=padding, dilation=dilation))


def _planned(request: Request, transform: Transform) -> Scheduled:
    source = read_source(request)
    assert source is not None
    return schedule_plan(request, source.plan(transform))


def _error(result, expected):
    assert result.shape == expected.shape
    return np.abs(result - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "constants"), [(case, (1,)) for case in CASES] + [(case, ()) for case in CASES[1::4]], ids=str
)
def test_result_with_bias_residual_and_relu_matches_float64(costly_harness, case, constants):
    batch, inputs, outputs, taps, dilation, padding, length, transform = case
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((batch, inputs, length)), rng.standard_normal((outputs, inputs, taps))
    x, w = x.astype("f4"), w.astype("f4")
    expected = reference_conv(x.astype("f8"), w.astype("f8"), dilation, padding)
    bias = rng.standard_normal((1, outputs, 1)).astype("f4")
    residual = rng.standard_normal(expected.shape).astype("f4")

    def build(emit, x, w, b, r):
        y = emit(op.add(_conv(emit, x, w, dilation, padding), b))
        return emit(op.nn.relu(emit(op.add(y, r))))

    arrays = [x, w, bias, residual]
    function = costly_harness.function(build, [a.shape for a in arrays])
    scheduled = costly_harness.schedule(
        function, constants, partial(_planned, transform=Transform(*transform))
    )
    (result,) = costly_harness.run(function, scheduled, arrays)
    assert _error(result, np.maximum(expected + bias + residual, 0)) <= 1e-6


def test_two_dimensional_convolution_of_one_line_matches_float64(costly_harness):
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal(s).astype("f4") for s in ((1, 3, 1, 300), (4, 3, 1, 9)))
    function = costly_harness.function(
        lambda emit, x, w: emit(op.nn.conv2d(x, w, padding=(0, 4), dilation=(1, 1))), [x.shape, w.shape]
    )
    scheduled = costly_harness.schedule(function, [1], partial(_planned, transform=Transform(4, 8)))
    (result,) = costly_harness.run(function, scheduled, [x, w])
    expected = reference_conv(x[:, :, 0].astype("f8"), w[:, :, 0].astype("f8"), 1, 4)
    assert _error(result[:, :, 0], expected) <= 1e-6


def test_residual_may_share_its_bytes_with_the_output(costly_harness):
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(s).astype("f4") for s in ((1, 3, 400), (5, 3, 9), (1, 5, 400))]
    function = costly_harness.function(
        lambda emit, x, w, r: emit(op.add(_conv(emit, x, w, 4, 16), r)), [a.shape for a in inputs]
    )
    scheduled = costly_harness.schedule(function, [1], partial(_planned, transform=Transform(4, 8)))
    (expected,) = costly_harness.run(function, scheduled, inputs)
    packed = [inputs[0], scheduled.packings[0][1].apply(inputs[1]), inputs[2]]
    np.testing.assert_array_equal(costly_harness.run_in_place(scheduled, packed, 2), expected)


def test_images_of_a_batch_do_not_mix(costly_harness):
    """A NaN stays in its image, and a small image has small errors beside a large one."""
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((3, 2, 50)).astype("f4"), rng.standard_normal((2, 2, 5)).astype("f4")
    x[1] *= 1e9
    x[2, 0, 20] = np.nan
    function = costly_harness.function(lambda emit, x, w: _conv(emit, x, w, 1, 0), [x.shape, w.shape])
    scheduled = costly_harness.schedule(function, [1], partial(_planned, transform=Transform(4, 4)))
    (result,) = costly_harness.run(function, scheduled, [x, w])
    for image in range(2):
        expected = reference_conv(x[image : image + 1].astype("f8"), w.astype("f8"), 1, 0)
        assert _error(result[image : image + 1], expected) <= 1e-6
    assert np.isnan(result[2, :, 16:21]).all()


def test_long_kernels_are_chosen_and_short_ones_are_not(avx2):
    def rule(taps, length, channels=16, constants=(1,)):
        function = avx2.function(
            lambda emit, x, w: _conv(emit, x, w, 1, taps // 2),
            [(1, channels, length), (channels, channels, taps)],
        )
        return avx2.schedule(function, constants).rule

    assert rule(51, 10000) == rule(25, 10000) == rule(51, 10000, constants=()) == "fft_conv1d"
    assert rule(1, 10000) == rule(2, 10000) == rule(51, 60) == "conv1d"
    assert rule(51, 1500, channels=4) == "fft_conv1d"
    assert rule(51, 1500, channels=4, constants=()) == "conv1d"


def test_rounding_as_in_direct_sums_can_be_demanded(avx2):
    function = avx2.function(lambda emit, x, w: _conv(emit, x, w, 1, 25), [(1, 16, 10000), (16, 16, 51)])
    request = Request(function, frozenset([1]), Target((), ISAS["avx2"]))
    scheduled = fft_conv1d(request)
    assert scheduled is not None and scheduled.choices[-1] == "direct"
    for changed in ({"winograd": False}, {"choice": "direct"}):
        assert fft_conv1d(Request(function, frozenset([1]), Target((), ISAS["avx2"]), **changed)) is None


@pytest.mark.parametrize(("stride", "groups"), [(2, 1), (1, 2)])
def test_strides_and_groups_are_left_to_other_rules(avx2, stride, groups):
    function = avx2.function(
        lambda emit, x, w: emit(op.nn.conv1d(x, w, padding=25, strides=stride, groups=groups)),
        [(1, 16, 10000), (16, 16 // groups, 51)],
    )
    assert avx2.schedule(function, [1]).rule == "conv1d"


def test_packed_weights_are_conjugate_spectra(avx2):
    function = avx2.function(lambda emit, x, w: _conv(emit, x, w, 1, 4), [(1, 3, 500), (5, 3, 9)])
    scheduled = avx2.schedule(function, [1], partial(_planned, transform=Transform(4, 8)))
    ((position, packing),) = scheduled.packings
    weight = np.random.default_rng(4).standard_normal((5, 3, 9)).astype("f4")
    packed = packing.apply(weight)  # [f, O / rows, C, rows, 2]
    spectrum = (packed[..., 0] + 1j * packed[..., 1]).transpose(1, 3, 2, 0).reshape(-1, 3, 17)
    assert position == 1 and packed.flags.c_contiguous
    np.testing.assert_allclose(spectrum[:5], np.fft.rfft(weight, 32).conj() / 32, atol=1e-6)
    assert not spectrum[5:].any()
