"""Weight gradients by Fourier transforms: transforms, dilation, padding, batch and tails against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx

from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient
from hybridc.schedules.cpu.wgrad.fourier import fft_conv1d_wgrad, schedule_plan
from hybridc.schedules.cpu.wgrad.fourier_plan import read_plans
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import ISAS, Target

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, dilation, padding, positions, transform, whether gradients fill the lanes
    (1, 15, 15, 51, 8, 200, 1501, (8, 16), True),
    (3, 7, 20, 15, 1, 7, 500, (6, 12), True),
    (2, 20, 5, 5, 3, 0, 211, (4, 6), False),
    (1, 1, 6, 7, 2, 33, 320, (4, 8), False),
    (2, 33, 1, 9, 16, 64, 300, (6, 8), False),
    (1, 2, 2, 7, 1, 3, 5, (4, 4), True),
]


def _function(
    batch: int, channels: tuple[int, int], positions: int, taps: int, **window: int
) -> tirx.PrimFunc:
    stride, dilation, padding, groups = (window.get(k, v) for k, v in _WINDOW.items())
    length = (positions - 1) * stride + (taps - 1) * dilation + 1 - 2 * padding
    shapes = (batch, channels[0], length), (batch, channels[1], positions)
    data, gradient = (relax.Var("v", relax.TensorType(shape, "float32")) for shape in shapes)
    attributes = Window((stride,), (padding,), (padding,), (dilation,), groups)
    return convolution_weight_gradient(data, gradient, attributes, [taps])


_WINDOW = {"stride": 1, "dilation": 1, "padding": 0, "groups": 1}


def _reference(x: np.ndarray, dy: np.ndarray, taps: int, dilation: int, padding: int) -> np.ndarray:
    """In float64, a tap at a time."""
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), (padding, padding)))
    sources = (x[:, :, k * dilation : k * dilation + dy.shape[-1]] for k in range(taps))
    return np.stack([np.einsum("nox,ncx->oc", dy.astype("f8"), source) for source in sources], -1)


def _planned(request: Request, transform: tuple[int, int], gradient_lanes: bool) -> Scheduled:
    (plan,) = [
        p
        for p in read_plans(request)
        if (p.transform.first, p.transform.second) == transform and p.gradient_lanes == gradient_lanes
    ]
    return schedule_plan(request, plan)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_matches_float64(costly_harness, case):
    batch, inputs, outputs, taps, dilation, padding, positions, transform, gradient_lanes = case
    function = _function(batch, (inputs, outputs), positions, taps, dilation=dilation, padding=padding)
    random = np.random.default_rng(1)
    x, dy = (
        random.standard_normal([int(e) for e in parameter.shape]).astype("f4")
        for parameter in function.params[:2]
    )
    rule = partial(_planned, transform=transform, gradient_lanes=gradient_lanes)
    (result,) = costly_harness.run(function, costly_harness.schedule(function, rule=rule), [x, dy])
    expected = _reference(x, dy, taps, dilation, padding)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= 1e-6 * np.abs(expected).max()


def test_splits_share_the_segments_of_long_signals(costly_harness):
    """Sums over 400 tasks of random signs: rounding does not add up."""
    function = _function(2, (2, 3), 60000, 11)

    def rule(request: Request) -> Scheduled:
        return schedule_plan(request, min(read_plans(request), key=lambda plan: plan.cost))

    scheduled = costly_harness.schedule(function, rule=rule)
    random = np.random.default_rng(2)
    x, dy = (
        random.standard_normal([int(e) for e in parameter.shape]).astype("f4")
        for parameter in function.params[:2]
    )
    (result,) = costly_harness.run(function, scheduled, [x, dy])
    expected = _reference(x, dy, 11, 1, 0)
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


def test_long_kernels_are_chosen_and_short_ones_are_not(avx2):
    def rule(taps: int, positions: int) -> str:
        return avx2.schedule(_function(1, (16, 16), positions, taps)).rule

    assert rule(51, 10000) == rule(25, 10000) == "fft_conv1d_wgrad"
    assert rule(1, 10000) == rule(2, 10000) == rule(51, 60) == "conv1d_wgrad"


def test_rounding_as_in_direct_sums_can_be_demanded(avx2):
    request = Request(_function(1, (16, 16), 10000, 51), frozenset(), Target((), ISAS["avx2"]))
    scheduled = fft_conv1d_wgrad(request)
    assert scheduled is not None and scheduled.choices[-1] == "direct"
    for changed in ({"winograd": False}, {"choice": "direct"}):
        assert fft_conv1d_wgrad(Request(request.function, frozenset(), request.target, **changed)) is None


@pytest.mark.parametrize("changed", [{"stride": 2}, {"groups": 2}], ids=str)
def test_strides_and_groups_are_left_to_other_rules(avx2, changed):
    assert avx2.schedule(_function(1, (16, 16), 10000, 51, **changed)).rule == "conv1d_wgrad"
