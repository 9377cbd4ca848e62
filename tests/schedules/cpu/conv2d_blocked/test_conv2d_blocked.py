"""Blocked convolutions: strides, padding, dilation, batches, channel tails and chunks against float64."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx

from hybridc.ir import Device
from hybridc.schedules.blocked_operators import ConvWindow, blocked_depthwise
from hybridc.schedules.cpu.conv2d_blocked import plan as blocked_plan
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.conv2d_blocked.plan import BlockedConvPlan, even_spans, rank_plans
from hybridc.schedules.cpu.conv2d_blocked.read import read_blocked_convolution
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
from hybridc.targets import ISAS, Isa, Target
from tests.support.blocked_convolutions import CASES, THREE, Case, convolved, fused, inputs_of

THREADS = 2


def _plans(case: Case, isa: Isa) -> list[BlockedConvPlan]:
    conv = read_blocked_convolution(_request(fused(case)))
    assert conv is not None
    return list(rank_plans(conv, isa, THREADS).values())


def _request(function: tirx.PrimFunc, isa: str = "avx512", choice: str | None = None) -> Request:
    return Request(function, frozenset([1]), Target((), ISAS[isa]), choice=choice)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_with_bias_residual_and_relu_matches_float64(harness, assert_close, case):
    function = fused(case)
    inputs = inputs_of(function)
    scheduled = harness.schedule(function, [1], conv2d_blocked)
    (result,) = harness.run(function, scheduled, inputs)
    assert_close(result, np.maximum(convolved(case, *inputs[:2]) + inputs[2] + inputs[3], 0))


def test_sums_wait_between_chunks_of_input_channels(harness, assert_close, monkeypatch):
    monkeypatch.setattr(blocked_plan, "WEIGHT_SHARE", 1 << 8)
    case = Case(64, 32, (6, 6), **THREE)
    function = fused(case)
    assert _plans(case, harness.isa)[0].chunk < 4
    inputs = inputs_of(function)
    (result,) = harness.run(function, harness.schedule(function, [1], conv2d_blocked), inputs)
    assert_close(result, np.maximum(convolved(case, *inputs[:2]) + inputs[2] + inputs[3], 0))


def test_convolution_without_epilogue_writes_the_output(harness, assert_close):
    case = Case(16, 16, (5, 5), **THREE)
    function = fused(case, epilogue=False)
    inputs = inputs_of(function)
    (result,) = harness.run(function, harness.schedule(function, [1], conv2d_blocked), inputs)
    assert_close(result, convolved(case, *inputs))


def test_residual_may_share_its_bytes_with_the_output(harness):
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    function = fused(Case(256, 32, (7, 7), **THREE))
    inputs = inputs_of(function)
    scheduled = harness.schedule(function, [1], conv2d_blocked)
    (expected,) = harness.run(function, scheduled, inputs)
    inputs[1] = scheduled.packings[0][1].apply(inputs[1])
    np.testing.assert_array_equal(harness.run_in_place(scheduled, inputs, 3), expected)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(16, 64, (5, 7), **THREE), marks=pytest.mark.slow, id="3x3"),
        pytest.param(Case(16, 64, (7, 7), batches=2), id="1x1"),
    ],
)
def test_every_offered_tile_computes_the_same(harness, assert_close, case):
    function = fused(case)
    inputs = inputs_of(function)
    expected = np.maximum(convolved(case, *inputs[:2]) + inputs[2] + inputs[3], 0)
    choices = harness.schedule(function, [1], conv2d_blocked).choices
    assert 1 < len(choices) <= 8
    for choice in choices:
        scheduled = conv2d_blocked(_request(function, harness.isa.name, choice))
        (result,) = harness.run(function, scheduled, inputs)
        assert_close(result, expected)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_sums_weights_and_a_scalar_fit_the_registers(isa):
    for case in CASES:
        for plan in _plans(case, ISAS[isa]):
            assert (plan.pixels + 1) * plan.vectors < ISAS[isa].vector_registers


def test_offered_tiles_include_some_that_cross_the_ends_of_short_lines():
    assert any(
        plan.tile_lines == 0 for plan in _plans(Case(512, 512, (7, 7), i=8, o=8, **THREE), ISAS["avx2"])
    )


def test_tasks_share_the_tiles_of_an_image_that_no_division_fits():
    (plan, *_) = _plans(Case(256, 64, (7, 7)), ISAS["avx512"])
    assert plan.parts > 1 and 49 % plan.parts


@pytest.mark.parametrize(("extent", "largest"), [(56, 14), (197, 14), (7, 4), (5, 8), (13, 1)])
def test_spans_cover_their_extent_once_with_nearly_equal_tiles(extent, largest):
    spans = even_spans(extent, largest)
    covered = [s.start + t * s.size + i for s in spans for t in range(s.count) for i in range(s.size)]
    assert covered == list(range(extent))
    assert max(s.size for s in spans) <= largest
    assert max(s.size for s in spans) - min(s.size for s in spans) <= 1
    assert sum(s.count for s in spans) == -(-extent // largest)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_weights_known_at_run_time_are_read_in_place(harness, assert_close, case):
    function = fused(case)
    inputs = inputs_of(function)
    scheduled = harness.schedule(function, rule=conv2d_blocked)
    assert not scheduled.packings
    (result,) = harness.run(function, scheduled, inputs)
    assert_close(result, np.maximum(convolved(case, *inputs[:2]) + inputs[2] + inputs[3], 0))


def test_rule_leaves_depthwise_convolutions_alone(avx2):
    depthwise = blocked_depthwise((1, 2, 8, 8, 8), (2, 3, 3, 8), ConvWindow((1, 1), (1, 1, 1, 1), (1, 1)))
    assert conv2d_blocked(_request(depthwise, "avx2")) is None


def test_rule_is_tried_first_among_convolutions():
    scheduled = schedule(_request(fused(CASES[0])), Device.CPU)
    assert scheduled is not None and scheduled.rule == "conv2d_blocked"
