"""Convolutions and matrix products of 8-bit numbers: sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hybridc.ir import Device
from hybridc.passes.precision.integer_functions import int8_conv2d as convolution
from hybridc.passes.precision.integer_functions import int8_matmul as product
from hybridc.passes.precision.integer_functions import int8_plain_conv2d as plain_convolution
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d
from hybridc.schedules.cpu.low_precision.int8_conv2d import floats_are_faster, int8_conv2d
from hybridc.schedules.cpu.low_precision.int8_matmul import int8_matmul
from hybridc.schedules.rule import Request
from hybridc.schedules.select import schedule
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


@pytest.fixture(params=["avx2", "avx2_vnni", "avx512", "avx512_vnni", *EMULATED, "amx"])
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
    function = product(left, right, dtype, 128 if dtype == "int8" else 0)
    a, b = drawn(shapes[0], dtype, 5), drawn(shapes[1], "int8", 6)
    (result,) = narrow.run(function, narrow.schedule(function, [1], int8_matmul), [a, b])
    np.testing.assert_array_equal(result, (a.astype("i8") + (128 if dtype == "int8" else 0)) @ b.astype("i8"))


@pytest.mark.parametrize(
    ("isa", "instruction"),
    [
        ("avx2", "vpmaddwd"),
        ("avx512", "vpmaddwd"),
        ("avx2_vnni", "vpdpbusd"),
        ("avx512_vnni", "vpdpbusd"),
        ("avx512_bf16", "vpdpbusd"),
        ("amx", "tdpbusd"),
    ],
)
def test_bytes_are_multiplied_by_instructions_for_them(isa, instruction):
    request = Request(product((64, 64), (64, 64), "uint8", 0), frozenset([1]), Target((), ISAS[isa]))
    scheduled = int8_matmul(request)
    assert scheduled is not None and instruction in instructions(assembly(scheduled, ISAS[isa]))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("shapes", [((10, 12), (12, 9)), ((2, 64, 96), (96, 40))], ids=str)
def test_floats_are_multiplied_where_the_right_factor_is_not_constant(shapes, dtype):
    harness, (left, right) = Harness(isa_here("avx2")), shapes
    function = product(left, right, dtype, 0)
    a, b = drawn(left, dtype, 7), drawn(right, "int8", 8)
    scheduled = harness.schedule(function)
    assert scheduled.rule in ("matmul", "skinny_gemm")
    (result,) = harness.run(function, scheduled, [a, b])
    np.testing.assert_array_equal(result, a.astype("i8") @ b.astype("i8"))


@pytest.mark.parametrize(
    ("isa", "kernel", "stride", "faster"),
    [
        ("avx2", 3, 1, True),
        ("avx512", 3, 1, True),
        ("avx2_vnni", 3, 1, False),
        ("avx2", 3, 2, False),
        ("avx2", 1, 1, False),
    ],
)
def test_winograd_in_floats_is_faster_only_than_extended_bytes(isa, kernel, stride, faster):
    pad = kernel // 2
    window = ConvWindow((stride, stride), (pad, pad, pad, pad), (1, 1))
    function = blocked_conv2d((1, 8, 28, 28, 8), (8, 8, kernel, kernel, 8, 8), window)
    request = Request(function, frozenset([1]), Target((), ISAS[isa]), threads=2)
    assert floats_are_faster(request) == faster


def test_signed_bytes_that_stay_signed_are_no_packed_lanes(narrow):
    function = product((10, 64), (64, 48), "int8", 0)
    a, b = drawn((10, 64), "int8", 9), drawn((64, 48), "int8", 10)
    scheduled = narrow.schedule(function, [1])
    (result,) = narrow.run(function, scheduled, [a, b])
    np.testing.assert_array_equal(result, a.astype("i8") @ b.astype("i8"))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("data", "weight", "window"),
    [
        ((2, 24, 9, 11), (17, 24, 1, 1), ConvWindow((1, 1), (0, 0, 0, 0), (1, 1))),
        ((1, 3, 20, 22), (16, 3, 7, 7), ConvWindow((2, 2), (3, 3, 3, 3), (1, 1))),
        ((2, 20, 9, 10), (24, 20, 3, 3), ConvWindow((1, 1), (1, 0, 2, 1), (1, 1))),
        ((1, 16, 12, 13), (20, 16, 3, 3), ConvWindow((1, 2), (2, 2, 2, 2), (2, 2))),
    ],
)
def test_plain_convolutions_are_those_of_floats(data, weight, window, dtype):
    harness, zero = Harness(isa_here("avx2")), 5
    function = plain_convolution(data, weight, window, dtype, zero)
    x, w = drawn(data, dtype, 11), drawn(weight, "int8", 12)
    request = Request(function, frozenset([1]), Target((), harness.isa), winograd=False, threads=4)
    scheduled = schedule(request, Device.CPU)
    assert scheduled is not None and scheduled.rule == "conv2d"
    (result,) = harness.run(function, scheduled, [x, w])
    top, left, bottom, right = window.padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=zero).astype("i8")
    (sh, sw), (dh, dw), total = window.strides, window.dilation, np.zeros(result.shape, "i8")
    for a in range(weight[2]):
        for b in range(weight[3]):
            tap = padded[:, :, a * dh :: sh, b * dw :: sw][:, :, : result.shape[2], : result.shape[3]]
            total += np.einsum("ncyx,oc->noyx", tap, w[:, :, a, b].astype("i8"))
    np.testing.assert_array_equal(result, total)
