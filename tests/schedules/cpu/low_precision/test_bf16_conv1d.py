"""Convolutions along one axis in bf16: every way to fill tiles and vectors against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tvm import relax, tirx

from hybridc.schedules.cpu.low_precision.bf16_conv1d import (
    Lines,
    bf16_conv1d,
    floats_are_faster,
    fourier_is_faster,
    read_bf16_line,
)
from hybridc.schedules.rule import Request
from hybridc.targets import ISAS, Target
from tests.schedules.cpu.conftest import Harness
from tests.support.amx import executing, tiles_here
from tests.support.narrow import UNIT, assembly, in_bf16, instructions, rounded, vectors_here

THREADS = 2

op = relax.op

CASES = [
    # batch, inputs, outputs, taps, stride, dilation, padding, length
    (1, 15, 15, 51, 1, 8, 200, 1501),
    (1, 15, 15, 11, 1, 8, 0, 5000),
    (2, 3, 5, 5, 1, 3, 6, 211),
    (1, 40, 33, 7, 1, 2, 6, 300),
    (1, 64, 64, 5, 1, 1, 2, 400),
    (1, 6, 20, 7, 2, 2, 5, 333),
    (2, 1, 17, 9, 1, 16, 64, 300),
    (1, 2, 2, 7, 1, 1, 3, 5),
    (1, 35, 4, 3, 3, 1, 0, 100),
]


@pytest.fixture
def tiles() -> Iterator[Harness]:
    with executing(tiles_here()) as isa:
        yield Harness(isa)


def function_of(harness: Harness, case: tuple[int, ...]) -> tirx.PrimFunc:
    batch, inputs, outputs, taps, stride, dilation, padding, length = case

    def build(emit, x, w, b):
        y = emit(op.nn.conv1d(x, w, strides=stride, padding=padding, dilation=dilation))
        return emit(op.nn.relu(emit(op.add(y, b))))

    shapes = [(batch, inputs, length), (outputs, inputs, taps), (1, outputs, 1)]
    return in_bf16(harness.function(build, shapes))


def drawn(case: tuple[int, ...]) -> list[np.ndarray]:
    batch, inputs, outputs, taps, *_, length = case
    rng = np.random.default_rng(1)
    shapes = [(batch, inputs, length), (outputs, inputs, taps), (1, outputs, 1)]
    return [rng.standard_normal(shape).astype("f4") for shape in shapes]


def convolved(case: tuple[int, ...], x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """In float64, a tap at a time."""
    *_, taps, stride, dilation, padding, _ = case
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), (padding, padding)))
    last = x.shape[-1] - dilation * (taps - 1)
    parts = (x[:, :, k * dilation : k * dilation + last : stride] for k in range(taps))
    return sum(np.einsum("oc,ncx->nox", w[:, :, k].astype("f8"), part) for k, part in enumerate(parts))


@pytest.fixture(params=[vectors_here(), tiles_here()])
def narrow(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with executing(request.param) as isa:
        yield Harness(isa)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_differs_from_float64_by_no_more_than_promised(narrow, case):
    function, inputs = function_of(narrow, case), drawn(case)
    (result,) = narrow.run(function, narrow.schedule(function, [1], bf16_conv1d), inputs)
    x, w, bias = inputs
    scale = convolved(case, np.abs(x), np.abs(w)) + np.abs(bias)
    rounding = 2 * (case[1] * case[3] + 2) * 2.0**-24
    of_rounded = np.maximum(convolved(case, rounded(x), rounded(w)) + bias, 0)
    assert (np.abs(result - of_rounded) <= rounding * scale).all()
    exact = np.maximum(convolved(case, x, w) + bias, 0)
    assert (np.abs(result - exact) <= (2 * UNIT + UNIT**2 + rounding) * scale).all()


@pytest.mark.parametrize(
    ("channels", "taps_of_a_step"), [(1, 16), (2, 16), (5, 4), (15, 2), (16, 2), (17, 1)]
)
def test_few_channels_share_a_step_with_other_taps(tiles, channels, taps_of_a_step):
    request = Request(
        function_of(tiles, (1, channels, 4, 9, 1, 1, 4, 64)), frozenset([1]), Target((), tiles.isa)
    )
    conv = read_bf16_line(request)
    assert conv is not None and Lines(conv, tiles.isa, THREADS).folded == taps_of_a_step


def test_tap_that_does_not_exist_reads_no_uninitialised_memory(narrow):
    """Three taps of a step of four: what is read for the fourth meets zeros, which NaN would survive."""
    case = (1, 8, 16, 3, 1, 2, 0, 68)
    function, inputs = function_of(narrow, case), drawn(case)
    (result,) = narrow.run(function, narrow.schedule(function, [1], bf16_conv1d), inputs)
    assert np.isfinite(result).all()


def test_without_instructions_for_bf16_the_rule_is_not_tried(avx2):
    request = Request(function_of(avx2, CASES[0]), frozenset([1]), Target((), ISAS["avx512"]))
    assert bf16_conv1d(request) is None


def test_fourier_transforms_are_faster_than_vectors_for_long_kernels_and_never_than_tiles(avx2):
    def is_faster(taps: int, isa: str, *, winograd: bool = True) -> bool:
        function = function_of(avx2, (1, 15, 15, taps, 1, 8, 0, 60000))
        request = Request(function, frozenset([1]), Target((), ISAS[isa]), winograd=winograd)
        conv = read_bf16_line(request)
        assert conv is not None
        return fourier_is_faster(request, conv)

    assert [is_faster(taps, "avx512_bf16") for taps in (3, 51)] == [False, True]
    assert not is_faster(51, "avx512_bf16", winograd=False)
    assert not is_faster(51, "amx")


@pytest.mark.parametrize(
    ("inputs", "outputs", "taps", "expected"), [(1, 64, 21, True), (4, 8, 1, True), (32, 32, 9, False)]
)
def test_floats_are_faster_than_words_that_serve_few_products(avx2, inputs, outputs, taps, expected):
    function = function_of(avx2, (1, inputs, outputs, taps, 1, 4, 0, 20000))
    for isa, is_faster in (("avx512_bf16", expected), ("amx", False)):
        conv = read_bf16_line(Request(function, frozenset([1]), Target((), ISAS[isa])))
        assert conv is not None
        assert floats_are_faster(conv, ISAS[isa], THREADS) is is_faster


def test_vectors_are_multiplied_by_vdpbf16ps(avx2):
    isa = ISAS["avx512_bf16"]
    scheduled = bf16_conv1d(Request(function_of(avx2, CASES[1]), frozenset([1]), Target((), isa)))
    assert scheduled is not None
    text = assembly(scheduled, isa)
    assert {"vdpbf16ps", "vcvtneps2bf16"} <= set(instructions(text))


def test_tiles_are_multiplied_by_amx(tiles):
    isa = ISAS["amx"]
    scheduled = bf16_conv1d(Request(function_of(tiles, CASES[1]), frozenset([1]), Target((), isa)))
    assert scheduled is not None
    found = instructions(assembly(scheduled, isa))
    assert {"ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease", "vcvtneps2bf16"} <= set(found)
