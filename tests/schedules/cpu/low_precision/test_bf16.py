"""Convolutions and matrix products in bf16, on vectors and on tiles, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tvm import te
from tvm.relax import op

from hybridc.schedules.cpu.low_precision.bf16_conv2d import bf16_conv2d
from hybridc.schedules.cpu.low_precision.bf16_matmul import bf16_matmul
from hybridc.schedules.cpu.matmul.matmul import TASKS
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing
from tests.support.blocked_convolutions import CASES, THREE, Case, convolved, fused, inputs_of
from tests.support.narrow import EMULATED, UNIT, assembly, in_bf16, instructions, rounded

SHAPES = [
    ((10, 17), (17, 33)),
    ((1, 64), (64, 1000)),
    ((37, 65), (65, 100)),
    ((3, 5), (5, 3)),
    ((2, 5, 17), (17, 16)),
    ((70, 130), (130, 48)),
    ((1, 12), (12, 1)),
    ((70, 40), (40, 32 * TASKS)),
]
FEW_CHANNELS = [
    Case(4, 48, (6, 25), kernel=(2, 11), strides=(1, 4), padding=(1, 5, 0, 5), plain=True),
    Case(2, 16, (7, 19), kernel=(3, 3), dilation=(2, 2), padding=(2, 2, 2, 2), plain=True, batches=2),
    Case(7, 32, (9, 9), kernel=(3, 5), padding=(0, 2, 2, 2), plain=True),
]
"""Of plain data: taps that do not fit a row of a tile, or are not side by side; many channels."""


@pytest.fixture(params=["avx512_bf16", *EMULATED, "amx"])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


def bound(products: int, scale: np.ndarray, rounding: float = 0.0) -> np.ndarray:
    """What the modules promise of so many products and two epilogue steps, given the sums of magnitudes."""
    return (rounding + 2 * (products + 2) * 2.0**-24) * scale


@pytest.mark.parametrize("case", [*(CASES[i] for i in (0, 1, 2, 4, 6, 7, 9, 11, 14)), *FEW_CHANNELS], ids=str)
def test_convolution_differs_from_float64_by_no_more_than_promised(narrow, case):
    function = in_bf16(fused(case))
    inputs = inputs_of(function)
    scheduled = narrow.schedule(function, [1], bf16_conv2d)
    (result,) = narrow.run(function, scheduled, inputs)
    products = case.inputs * case.kernel[0] * case.kernel[1]
    scale = convolved(case, *map(np.abs, inputs[:2])) + np.abs(inputs[2]) + np.abs(inputs[3])
    of_rounded = np.maximum(convolved(case, *map(rounded, inputs[:2])) + inputs[2] + inputs[3], 0)
    assert (np.abs(result - of_rounded) <= bound(products, scale)).all()
    exact = np.maximum(convolved(case, *inputs[:2]) + inputs[2] + inputs[3], 0)
    assert (np.abs(result - exact) <= bound(products, scale, 2 * UNIT + UNIT**2)).all()


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_product_differs_from_float64_by_no_more_than_promised(narrow, shapes):
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(shape).astype("f4") for shape in shapes)
    function = in_bf16(narrow.function(lambda emit, x, w: emit(op.nn.relu(emit(op.matmul(x, w)))), shapes))
    (result,) = narrow.run(function, narrow.schedule(function, [1], bf16_matmul), [a, b])
    depth, scale = shapes[1][0], np.abs(a).astype("f8") @ np.abs(b)
    of_rounded = np.maximum(rounded(a).astype("f8") @ rounded(b), 0)
    assert (np.abs(result - of_rounded) <= bound(depth, scale)).all()
    exact = np.maximum(a.astype("f8") @ b, 0)
    assert (np.abs(result - exact) <= bound(depth, scale, 2 * UNIT + UNIT**2)).all()


def test_transposed_weights_are_packed_as_they_are_read(narrow):
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((20, 41)).astype("f4"), rng.standard_normal((24, 41)).astype("f4")
    x, w = te.placeholder((20, 41), name="x"), te.placeholder((24, 41), name="w")
    k = te.reduce_axis((0, 41), "k")
    y = te.compute((20, 24), lambda i, j: te.sum(x[i, k] * w[j, k], axis=[k]))
    function = in_bf16(te.create_prim_func([x, w, y], index_dtype_override="int64"))
    (result,) = narrow.run(function, narrow.schedule(function, [1], bf16_matmul), [a, b])
    np.testing.assert_allclose(result, rounded(a).astype("f8") @ rounded(b).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few_channels", [False, True])
def test_tiles_and_vectors_leave_nan_where_it_is(narrow, few_channels):
    case = Case(3, 16, (6, 6), plain=True, **THREE) if few_channels else Case(32, 16, (6, 6), **THREE)
    function = in_bf16(fused(case, epilogue=False))
    x, w = inputs_of(function)
    x[(0, 1, 2, 3) if few_channels else (0, 1, 2, 3, 5)] = np.nan
    (result,) = narrow.run(function, narrow.schedule(function, [1], bf16_conv2d), [x, w])
    expected = np.zeros((6, 6), bool)
    expected[1:4, 2:5] = True
    np.testing.assert_array_equal(np.isnan(result[0, 0, :, :, 0]), expected)


def test_residual_may_share_its_bytes_with_the_output(narrow):
    function = in_bf16(fused(Case(64, 32, (7, 7), **THREE)))
    inputs = inputs_of(function)
    scheduled = narrow.schedule(function, [1], bf16_conv2d)
    (expected,) = narrow.run(function, scheduled, inputs)
    inputs[1] = scheduled.packings[0][1].apply(inputs[1])
    np.testing.assert_array_equal(narrow.run_in_place(scheduled, inputs, 3), expected)


def test_every_offered_choice_computes_the_same(narrow):
    function = in_bf16(fused(Case(32, 64, (8, 9), **THREE)))
    inputs = inputs_of(function)
    choices = narrow.schedule(function, [1], bf16_conv2d).choices
    results = []
    for choice in choices:
        scheduled = bf16_conv2d(Request(function, frozenset([1]), Target((), narrow.isa), choice=choice))
        results += narrow.run(function, scheduled, inputs)
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ["avx512", "avx512_bf16"])
def test_rules_accept_only_what_bf16_is_asked_for_and_there_are_instructions_for(isa):
    function = fused(CASES[0])
    for asked in (function, in_bf16(function)):
        request = Request(asked, frozenset([1]), Target((), ISAS[isa]))
        assert (bf16_conv2d(request) is not None) == (asked is not function and isa == "avx512_bf16")


def test_vectors_are_multiplied_by_vdpbf16ps():
    isa = ISAS["avx512_bf16"]
    scheduled = bf16_conv2d(Request(in_bf16(fused(CASES[4])), frozenset([1]), Target((), isa)))
    assert scheduled is not None
    found = instructions(assembly(scheduled, isa))
    assert {"vdpbf16ps", "vcvtneps2bf16"} <= set(found)


@pytest.mark.parametrize("rule", [bf16_conv2d, bf16_matmul])
def test_tiles_are_configured_multiplied_and_released_by_amx(avx2, rule):
    isa = ISAS["amx"]
    function = fused(Case(64, 64, (14, 14), **THREE))
    if rule is bf16_matmul:
        function = avx2.function(lambda emit, x, w: emit(op.matmul(x, w)), [(64, 64), (64, 64)])
    text = assembly(rule(Request(in_bf16(function), frozenset([1]), Target((), isa))), isa)
    found = instructions(text)
    for name in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert name in found
    assert found.index("ldtilecfg") < found.index("tdpbf16ps") < found.index("tilerelease")
    assert "call\thybridc" not in text  # every tile function is inlined
