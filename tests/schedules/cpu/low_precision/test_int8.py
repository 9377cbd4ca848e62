"""Convolutions and matrix products of 8-bit numbers: sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hybridc.passes.layout.operators import ConvWindow
from hybridc.passes.precision.quantized import int8_conv2d as convolution
from hybridc.passes.precision.quantized import int8_matmul as product
from hybridc.schedules.cpu.low_precision.int8_conv2d import int8_conv2d
from hybridc.schedules.cpu.low_precision.int8_matmul import int8_matmul
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing
from tests.support.blocked_convolutions import CASES, Case
from tests.support.narrow import EMULATED, assembly, instructions, isa_here

SHAPES = [
    ((10, 17), (17, 33)),
    ((1, 64), (64, 100)),
    ((2, 19, 70), (70, 48)),
    ((40, 256), (256, 16)),
    ((2, 16, 128), (128, 40)),
]


@pytest.fixture(params=["avx512_bf16", *EMULATED, "amx"])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


def drawn(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max, shape, dtype, endpoint=True)


def summed(case: Case, x: np.ndarray, w: np.ndarray, zero: int) -> np.ndarray:
    """A tap at a time; 128 is added to signed numbers, to those of the padding too."""
    top, left, bottom, right = case.padding
    around = ((0, 0), (0, 0), (top, bottom), (left, right))
    shift = 128 if x.dtype == np.int8 else 0
    if case.plain:
        x, w = np.pad(x, around, constant_values=zero).transpose(0, 2, 3, 1)[:, None], w[:, None]
    else:
        x = np.pad(x, (*around, (0, 0)), constant_values=zero)
    (sh, sw), (dh, dw) = case.strides, case.dilation
    rows, columns = (case.window.outputs(a, case.image[a], case.kernel[a]) for a in (0, 1))
    total: Any = 0
    for kh in range(case.kernel[0]):
        for kw in range(case.kernel[1]):
            tap = x[:, :, kh * dh :: sh, kw * dw :: sw][:, :, :rows, :columns].astype("i8") + shift
            total = total + np.einsum("ncyxi,ocip->noyxp", tap, w[:, :, kh, kw].astype("i8"), optimize=True)
    return total


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 6, 8, 11)], ids=str)
def test_sums_of_a_convolution_are_exact(narrow, case, dtype):
    zero = 7
    function = convolution(case.data, case.weight, case.window, dtype, zero)
    x, w = drawn(case.data, dtype, 1), drawn(case.weight, "int8", 2)
    (result,) = narrow.run(function, narrow.schedule(function, [1], int8_conv2d), [x, w])
    np.testing.assert_array_equal(result, summed(case, x, w, zero))


def test_padding_at_the_end_alone_is_the_zero_point_too(narrow):
    case = Case(16, 16, (5, 6), kernel=(2, 2), padding=(0, 0, 1, 1))
    function = convolution(case.data, case.weight, ConvWindow((1, 1), case.padding, (1, 1)), "uint8", 200)
    x, w = drawn(case.data, "uint8", 3), drawn(case.weight, "int8", 4)
    (result,) = narrow.run(function, narrow.schedule(function, [1], int8_conv2d), [x, w])
    np.testing.assert_array_equal(result, summed(case, x, w, 200))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_sums_of_a_product_are_exact(narrow, shapes, dtype):
    left, right = shapes
    function = product(left, right, dtype)
    a, b = drawn(shapes[0], dtype, 5), drawn(shapes[1], "int8", 6)
    (result,) = narrow.run(function, narrow.schedule(function, [1], int8_matmul), [a, b])
    np.testing.assert_array_equal(result, (a.astype("i8") + (128 if dtype == "int8" else 0)) @ b.astype("i8"))


@pytest.mark.parametrize(("isa", "instruction"), [("avx512_bf16", "vpdpbusd"), ("amx", "tdpbusd")])
def test_bytes_are_multiplied_by_instructions_for_them(isa, instruction):
    request = Request(product((64, 64), (64, 64), "uint8"), frozenset([1]), Target((), ISAS[isa]))
    scheduled = int8_matmul(request)
    assert scheduled is not None and instruction in instructions(assembly(scheduled, ISAS[isa]))


def test_without_instructions_for_bytes_other_rules_take_the_product():
    harness = Harness(isa_here("avx2"))
    function = product((10, 12), (12, 9), "uint8")
    a, b = drawn((10, 12), "uint8", 7), drawn((12, 9), "int8", 8)
    scheduled = harness.schedule(function, [1])
    assert scheduled.rule != "int8_matmul"
    (result,) = harness.run(function, scheduled, [a, b])
    np.testing.assert_array_equal(result, a.astype("i8") @ b.astype("i8"))
