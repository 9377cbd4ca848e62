"""Winograd's convolutions along one axis: strides, dilations, padding and ragged ends against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from hybridc.schedules.cpu.conv1d.winograd.plan import plans_of
from hybridc.schedules.cpu.conv1d.winograd.winograd_conv1d import DIRECT, schedule_plan, winograd_conv1d
from hybridc.schedules.cpu.conv2d.read import read_convolution
from hybridc.schedules.rule import Request, Rule, Scheduled, schedule_rule
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.random_examples import random_examples

op = relax.op

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, length, attributes
    (1, 16, 15, 3, 701, {"stride": 2}),
    (2, 19, 20, 3, 150, {"padding": 1}),
    (1, 33, 7, 7, 400, {"padding": 3}),
    (3, 32, 6, 5, 211, {"stride": 2, "padding": 4, "groups": 2}),
    (1, 16, 4, 2, 333, {"dilation": 2}),
    (1, 16, 17, 3, 500, {"dilation": 4, "padding": 4}),
    (1, 17, 5, 7, 90, {"stride": 4}),
    (1, 20, 3, 11, 63, {"padding": 5}),
    (2, 16, 2, 3, 9, {"padding": (2, 0)}),
]


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


def convolved(emit: Any, x: relax.Var, w: relax.Var, attributes: dict[str, Any]) -> relax.Expr:
    renamed = {"strides" if name == "stride" else name: value for name, value in attributes.items()}
    return emit(op.nn.conv1d(x, w, **renamed))


def expected_of(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """In float64, a tap at a time."""
    padding, groups = attributes.get("padding", 0), attributes.get("groups", 1)
    around = padding if isinstance(padding, tuple) else (padding, padding)
    stride, dilation = attributes.get("stride", 1), attributes.get("dilation", 1)
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), around))
    outputs = (x.shape[2] - dilation * (w.shape[2] - 1) - 1) // stride + 1
    parts = []
    for data, weight in zip(np.split(x, groups, 1), np.split(w.astype("f8"), groups), strict=True):
        taps = (
            data[:, :, k * dilation :][:, :, : (outputs - 1) * stride + 1 : stride] for k in range(w.shape[2])
        )
        parts.append(sum(np.einsum("oc,ncx->nox", weight[:, :, k], tap) for k, tap in enumerate(taps)))
    return np.concatenate(parts, 1)


def planned(number: int = 0) -> Rule:
    """A rule that takes one of the plans, whether that is predicted to be fast or not."""

    @schedule_rule(family="winograd")
    def rule(request: Request) -> Scheduled | None:
        conv = read_convolution(request.function)
        assert conv is not None
        plans = sorted(plans_of(conv, request.target.isa, request.threads), key=lambda plan: plan.cost)
        return schedule_plan(request, plans[number % len(plans)])

    return rule


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_with_bias_residual_and_relu_matches_float64(
    harness: Harness, assert_close: Any, case: Any
) -> None:
    batch, inputs, outputs, taps, length, attributes = case
    x, w = normal(0, (batch, inputs, length), (outputs, inputs // attributes.get("groups", 1), taps))
    expected = expected_of(x, w, attributes)
    bias, residual = normal(1, (1, outputs, 1), expected.shape)

    def build(emit: Any, x: relax.Var, w: relax.Var, b: relax.Var, r: relax.Var) -> relax.Expr:
        y = emit(op.add(convolved(emit, x, w, attributes), b))
        return emit(op.nn.relu(emit(op.add(y, r))))

    arrays = [x, w, bias, residual]
    function = harness.function(build, [a.shape for a in arrays])
    (result,) = harness.run(function, harness.schedule(function, (1,), planned()), arrays)
    assert_close(result, np.maximum(expected + bias + residual, 0))


@random_examples(20)
@given(data=st.data())
def test_any_plan_of_any_filter(data: st.DataObject) -> None:
    harness = Harness(ISAS["avx2"])
    draw = data.draw
    attributes = draw(
        st.fixed_dictionaries({"padding": st.integers(0, 4), "stride": st.integers(1, 3)})
        | st.fixed_dictionaries({"padding": st.integers(0, 4), "dilation": st.integers(1, 4)})
    )
    taps, length = draw(st.integers(3, 6)), draw(st.integers(30, 200))
    x, w = normal(2, (1, draw(st.integers(16, 24)), length), (draw(st.integers(1, 19)), 0, taps))
    w = normal(3, (w.shape[0], x.shape[1], taps))[0]
    function = harness.function(lambda emit, x, w: convolved(emit, x, w, attributes), [x.shape, w.shape])
    number = draw(st.integers(0, 200))
    scheduled = harness.schedule(function, [1], planned(number))
    (result,) = harness.run(function, scheduled, [x, w])
    expected = expected_of(x, w, attributes)
    assert np.abs(result - expected).max() <= 2e-6 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (7, 1)])
def test_errors_stay_within_the_bound(harness: Harness, taps: int, stride: int) -> None:
    x, w = normal(4, (1, 512, 700), (5, 512, taps))
    function = harness.function(
        lambda emit, x, w: convolved(emit, x, w, {"stride": stride}), [x.shape, w.shape]
    )
    (result,) = harness.run(function, harness.schedule(function, [1], planned()), [x, w])
    expected = expected_of(x, w, {"stride": stride})
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


def test_input_that_is_not_a_parameter(
    harness: Harness, assert_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schedule_plan.__globals__, "unpadded", lambda conv: None)
    x, w = normal(5, (1, 16, 120), (9, 16, 3))
    function = harness.function(lambda emit, x, w: convolved(emit, x, w, {"padding": 1}), [x.shape, w.shape])
    (result,) = harness.run(function, harness.schedule(function, [1], planned()), [x, w])
    assert_close(result, expected_of(x, w, {"padding": 1}))


def test_residual_may_share_its_bytes_with_the_output(harness: Harness) -> None:
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    x, w, r = normal(6, (1, 16, 203), (5, 16, 3), (1, 5, 101))
    function = harness.function(
        lambda emit, x, w, r: emit(op.add(convolved(emit, x, w, {"stride": 2}), r)),
        [x.shape, w.shape, r.shape],
    )
    scheduled = harness.schedule(function, [1], planned())
    (expected,) = harness.run(function, scheduled, [x, w, r])
    packed = [x, scheduled.packings[0][1].apply(w), r]
    np.testing.assert_array_equal(harness.run_in_place(scheduled, packed, 2), expected)


def request(
    harness: Harness,
    shapes: tuple[tuple[int, ...], ...],
    constants: frozenset[int] = frozenset([1]),
    **more: Any,
) -> Request:
    attributes = more.pop("attributes", {})
    function = harness.function(lambda emit, x, w: convolved(emit, x, w, attributes), list(shapes))
    return Request(function, constants, Target((), harness.isa), **more)


LARGE = ((1, 256, 4001), (256, 256, 3))


def test_choices_are_taken_and_direct_sums_are_one(avx2: Harness) -> None:
    first = winograd_conv1d(request(avx2, LARGE))
    assert first is not None and first.choices[-1] == DIRECT and "F(4, 3)" in first.choices[0]
    other = winograd_conv1d(request(avx2, LARGE, choice=first.choices[1]))
    assert other is not None and other.choices == first.choices
    assert winograd_conv1d(request(avx2, LARGE, choice=DIRECT)) is None


def test_leaves_other_convolutions_to_direct_sums(avx2: Harness) -> None:
    for refused in (
        request(avx2, LARGE, frozenset()),
        request(avx2, LARGE, winograd=False),
        request(avx2, LARGE, many_sizes=True),
        request(avx2, LARGE, attributes={"stride": 2, "dilation": 2}),
        request(avx2, LARGE, attributes={"dilation": 16}),
        request(avx2, ((1, 3, 4001), (256, 3, 3))),
        request(avx2, ((1, 64, 40), (64, 64, 2)), attributes={"stride": 2}),
    ):
        assert winograd_conv1d(refused) is None
