"""Weight gradients along one axis in bf16: every way to fill tiles and vectors against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx

from hybridc.passes.training.kernels.convolution import Window, convolution_weight_gradient
from hybridc.schedules.cpu.low_precision.bf16_wgrad1d import bf16_conv1d_wgrad, read_wgrad
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing, tiles_here
from tests.support.narrow import UNIT, in_bf16, rounded, vectors_here

torch = pytest.importorskip("torch")

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, positions, attributes
    (1, 15, 15, 51, 2500, {"dilation": 8, "padding": 200}),
    (2, 3, 20, 7, 501, {"padding": 3}),
    (3, 20, 4, 9, 211, {"dilation": 3, "padding": 5}),
    (1, 33, 40, 5, 1100, {"dilation": 2}),
    (2, 64, 32, 3, 70, {"padding": 1}),
    (1, 1, 1, 5, 400, {"dilation": 16, "padding": 8}),
    (1, 40, 7, 1, 33, {}),
    (2, 9, 2, 3, 9, {"padding": 4}),
]


@pytest.fixture(params=[vectors_here(), tiles_here()])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


def function_of(case: tuple[Any, ...]) -> tirx.PrimFunc:
    batch, inputs, outputs, taps, positions, attributes = case
    stride, padding, dilation, groups = (attributes.get(n, d) for n, d in DEFAULTS.items())
    length = (positions - 1) * stride + (taps - 1) * dilation + 1 - 2 * padding
    shapes = (batch, inputs * groups, length), (batch, outputs, positions)
    data, gradient = (relax.Var("v", relax.TensorType(shape, "float32")) for shape in shapes)
    window = Window((stride,), (padding,), (padding,), (dilation,), groups)
    return in_bf16(convolution_weight_gradient(data, gradient, window, [taps]))


DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def drawn(function: tirx.PrimFunc) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal([int(e) for e in p.shape]).astype("f4") for p in function.params[:2]]


def gradient_of(case: tuple[Any, ...], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """By PyTorch in float64."""
    _, inputs, outputs, taps, _, attributes = case
    weight = torch.zeros((outputs, inputs, taps), dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv1d(torch.from_numpy(x).double(), weight, **attributes)
    y.backward(torch.from_numpy(dy).double())
    assert weight.grad is not None
    return weight.grad.numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_rounded_factors(narrow: Harness, case: tuple[Any, ...]) -> None:
    function = function_of(case)
    operands = drawn(function)
    scheduled = narrow.schedule(function, rule=bf16_conv1d_wgrad)
    (result,) = narrow.run(function, scheduled, operands)
    exact = gradient_of(case, *map(rounded, operands))
    products = gradient_of(case, *(np.abs(rounded(o)) for o in operands))
    # float32 sums of n products: n roundings at most, of each sum of magnitudes
    assert (np.abs(result - exact) <= 2.0**-24 * case[0] * case[4] * products + 1e-30).all()
    true = gradient_of(case, *operands)
    assert (np.abs(result - true) <= (2 * UNIT + UNIT**2) * 1.001 * products * (1 + UNIT) ** 2).all()


def test_values_outside_of_the_data_are_not_read(narrow: Harness) -> None:
    """Infinite channels spoil their own weights only."""
    function = function_of(CASES[1])
    x, dy = drawn(function)
    x[:, 1], dy[:, 7] = np.inf, np.nan
    scheduled = narrow.schedule(function, rule=bf16_conv1d_wgrad)
    (result,) = narrow.run(function, scheduled, [x, dy])
    kept = np.delete(np.delete(result, 7, axis=0), 1, axis=1)
    assert np.isfinite(kept).all()


@pytest.mark.parametrize("attributes", [{"stride": 2}, {"groups": 2}], ids=str)
def test_strides_and_groups_are_left_to_other_rules(attributes: dict[str, int]) -> None:
    function = function_of((1, 4, 8, 3, 40, attributes))
    assert read_wgrad(Request(function, frozenset(), Target((), ISAS["amx"]))) is None


def test_nothing_is_rounded_unless_asked_for() -> None:
    function = function_of(CASES[0])
    request = Request(function, frozenset(), Target((), ISAS["amx"]))
    assert read_wgrad(request) is not None
    assert read_wgrad(replace(request, function=function.without_attr("precision"))) is None
    assert read_wgrad(replace(request, target=Target((), ISAS["avx512"]))) is None
