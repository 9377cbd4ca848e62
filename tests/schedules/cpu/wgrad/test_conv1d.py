"""Direct weight gradients along one axis: strides, padding, groups and ragged ends against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx

from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient
from hybridc.schedules.cpu.wgrad.conv1d import conv1d_wgrad, schedule_plan
from hybridc.schedules.cpu.wgrad.conv1d_plan import plans_of
from hybridc.schedules.cpu.wgrad.read import read_weight_gradient

THREADS = 2

torch = pytest.importorskip("torch")

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, positions, attributes
    (1, 15, 15, 51, 1500, {"dilation": 8, "padding": 200}),
    (2, 3, 20, 7, 500, {"stride": 2, "padding": 3}),
    (3, 20, 4, 9, 211, {"stride": 3, "dilation": 3, "padding": 5, "groups": 2}),
    (1, 1, 1, 5, 400, {"dilation": 16, "padding": 8}),
    (2, 8, 8, 3, 50, {"padding": 1, "groups": 8}),
    (1, 40, 7, 1, 33, {}),
    (2, 9, 2, 3, 77, {"padding": 4}),
]


def _function(case: tuple[Any, ...]) -> tirx.PrimFunc:
    batch, inputs, outputs, taps, positions, attributes = case
    found = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | attributes
    stride, padding, dilation, groups = found.values()
    length = (positions - 1) * stride + (taps - 1) * dilation + 1 - 2 * padding
    shapes = (batch, inputs, length), (batch, outputs, positions)
    data, gradient = (relax.Var("v", relax.TensorType(shape, "float32")) for shape in shapes)
    window = Window((stride,), (padding,), (padding,), (dilation,), groups)
    return convolution_weight_gradient(data, gradient, window, [taps])


def _operands(function: tirx.PrimFunc) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal([int(e) for e in p.shape]).astype("f4") for p in function.params[:2]]


def _expected(case: tuple[Any, ...], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    _, inputs, outputs, taps, _, attributes = case
    shape = (outputs, inputs // attributes.get("groups", 1), taps)
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv1d(torch.from_numpy(x).double(), weight, **attributes)
    y.backward(torch.from_numpy(dy).double())
    assert weight.grad is not None
    return weight.grad.numpy()


def _result(harness: Any, function: tirx.PrimFunc, operands: list[np.ndarray], exchanged: bool) -> np.ndarray:
    """By the best plan whose rows are of the data, or of the gradient."""
    wgrad = read_weight_gradient(function)
    assert wgrad is not None
    plans = [plan for plan in plans_of(wgrad, harness.isa, THREADS) if plan.of.exchanged == exchanged]
    plan = min(plans, key=lambda plan: plan.cost)
    scheduled = harness.schedule(function, rule=lambda request: schedule_plan(request, plan))
    (result,) = harness.run(function, scheduled, operands)
    return result


@pytest.mark.parametrize(
    ("case", "exchanged"),
    [(case, False) for case in CASES] + [(case, True) for case in CASES[3:]],
    ids=str,
)
def test_gradient_matches_float64(harness, case, exchanged):
    function = _function(case)
    x, dy = _operands(function)
    result, expected = _result(harness, function, [x, dy], exchanged), _expected(case, x, dy)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= 5e-7 * np.abs(expected).max()


def test_errors_do_not_grow_with_the_signal(harness):
    case: tuple[Any, ...] = (1, 2, 3, 3, 60000, {})
    function = _function(case)
    x, dy = _operands(function)
    (result,) = harness.run(function, harness.schedule(function, rule=conv1d_wgrad), [x, dy])
    expected = _expected(case, x, dy)
    assert np.abs(result - expected).max() <= 5e-7 * np.abs(expected).max()


def test_rule_is_tried_before_that_for_blocks_of_channels(avx2):
    assert avx2.schedule(_function(CASES[1])).rule == "conv1d_wgrad"
