"""Weight gradients of images in bf16 against float64: padding, odd sizes, few and many channels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tvm import tirx

from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d_wgrad
from hybridc.schedules.cpu.low_precision.bf16_wgrad2d import bf16_conv2d_wgrad, read_wgrad
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing, tiles_here
from tests.support.narrow import UNIT, in_bf16, rounded, vectors_here

torch = pytest.importorskip("torch")

CASES = [
    # batch, inputs, outputs, taps, stride, dilation, padding, size, plain data
    (2, 16, 32, (3, 3), 1, 1, 1, (32, 32), False),
    (3, 32, 16, (5, 5), 1, 1, 2, (8, 8), False),
    (2, 3, 16, (5, 3), 1, 1, 2, (9, 21), True),
    (1, 48, 48, (3, 2), 1, 2, 0, (17, 40), False),
    (2, 16, 16, (1, 1), 1, 1, 0, (7, 5), False),
]


@pytest.fixture(params=[vectors_here(), tiles_here()])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


Case = tuple[int, int, int, tuple[int, int], int, int, int, tuple[int, int], bool]


def positions(case: Case) -> tuple[int, ...]:
    _, _, _, taps, stride, dilation, padding, size, _ = case
    return tuple(
        (s + 2 * padding - (t - 1) * dilation - 1) // stride + 1 for s, t in zip(size, taps, strict=True)
    )


def function_of(case: Case, groups: int = 1) -> tirx.PrimFunc:
    batch, inputs, outputs, taps, stride, dilation, padding, size, plain = case
    data = (batch, inputs, *size) if plain else (batch, inputs // 16, *size, 16)
    window = ConvWindow((stride,) * 2, (padding,) * 4, (dilation,) * 2)
    weight = (outputs, inputs // groups, *taps)
    gradient = (batch, outputs // 16, *positions(case), 16)
    return in_bf16(blocked_conv2d_wgrad(data, gradient, weight, window, groups))


def drawn(case: Case) -> tuple[np.ndarray, np.ndarray]:
    batch, inputs, outputs, *_, size, _ = case
    random = np.random.default_rng(3)
    shapes = (batch, inputs, *size), (batch, outputs, *positions(case))
    x, dy = (random.standard_normal(shape).astype("f4") for shape in shapes)
    return x, dy


def in_blocks(array: np.ndarray) -> np.ndarray:
    n, channels, *size = array.shape
    return np.moveaxis(array.reshape(n, channels // 16, 16, *size), 2, -1)


def gradient_of(case: Case, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    _, inputs, outputs, taps, stride, dilation, padding, *_ = case
    weight = torch.zeros((outputs, inputs, *taps), dtype=torch.float64, requires_grad=True)
    data = torch.from_numpy(x).double()
    y = torch.nn.functional.conv2d(data, weight, stride=stride, dilation=dilation, padding=padding)
    y.backward(torch.from_numpy(dy).double())
    assert weight.grad is not None
    return weight.grad.numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_rounded_factors(narrow: Harness, case: Case) -> None:
    function, (x, dy) = function_of(case), drawn(case)
    scheduled = narrow.schedule(function, rule=bf16_conv2d_wgrad)
    operands = [x if case[-1] else in_blocks(x), in_blocks(dy)]
    (result,) = narrow.run(function, scheduled, operands)
    products = gradient_of(case, np.abs(x), np.abs(dy))
    exact = gradient_of(case, rounded(x), rounded(dy))
    count = case[0] * np.prod(positions(case))
    assert (np.abs(result - exact) <= 1.01 * 2.0**-24 * count * products + 1e-30).all()
    true = gradient_of(case, x, dy)
    assert (np.abs(result - true) <= 1.01 * (2 * UNIT + UNIT**2) * products).all()


def test_strides_and_groups_are_left_to_other_rules() -> None:
    strided = (1, 16, 16, (3, 3), 2, 1, 1, (8, 8), False)
    for function in (function_of(strided), function_of(CASES[0], groups=2)):
        assert read_wgrad(Request(function, frozenset(), Target((), ISAS["amx"]))) is None
