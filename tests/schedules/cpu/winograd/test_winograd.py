from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d
from hybridc.schedules.cpu.conv2d_blocked.read import read_blocked_convolution
from hybridc.schedules.cpu.core.micro_kernel import Tile
from hybridc.schedules.cpu.winograd import toom_cook
from hybridc.schedules.cpu.winograd.toom_cook import F2, F4, ToomCook
from hybridc.schedules.cpu.winograd.winograd import WinogradPlan, candidates, schedule_plan, winograd
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import ISAS, Target

BOUND = {F2: 1e-6, F4: 5e-6}
"""Largest errors as a fraction of the output's scale that the rule promises."""

Epilogue = Callable[..., relax.Expr]


def relu(emit: Any, conv: relax.Expr) -> relax.Expr:
    return emit(relax.op.nn.relu(conv))


def convolution(
    harness: Any, data: Sequence[int], weight: Sequence[int], *extra: tuple[int, ...],
    epilogue: Epilogue | None = None, window: ConvWindow | None = None,
) -> tirx.PrimFunc:  # fmt: skip
    """Blocked convolution of parameters 0 and 1, and `epilogue(emit, conv, *extra)`."""
    window = window or ConvWindow((1, 1), (1, 1, 1, 1), (1, 1))
    function = blocked_conv2d(data, weight, window).without_attr("global_symbol")
    shape = function.params[2].shape

    def build(emit: Any, x: relax.Var, w: relax.Var, *rest: relax.Var) -> relax.Expr:
        name = relax.BlockBuilder.current().add_func(function, "conv")
        result = emit(relax.call_tir(name, [x, w], relax.TensorType(shape, "float32")))
        return result if epilogue is None else epilogue(emit, result, *rest)

    return harness.function(build, [tuple(data), tuple(weight), *extra])


def reference(data: np.ndarray, weight: np.ndarray, padding: tuple[int, int, int, int]) -> np.ndarray:
    """The convolution in float64."""
    top, left, bottom, right = padding
    padded = np.pad(data.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right), (0, 0)))
    rows, columns = (extent - 2 for extent in padded.shape[2:4])
    taps = [(y, x) for y in range(3) for x in range(3)]
    return sum(
        np.einsum("nbyxi,obip->noyxp", padded[:, :, y : y + rows, x : x + columns],
                  weight[:, :, y, x].astype(np.float64), optimize=True)
        for y, x in taps
    )  # fmt: skip


def planned(
    harness: Any, function: tirx.PrimFunc, algorithm: ToomCook,
    rows: int, width: int, tiles: int, splits: int = 1, groups: int = 1, *, constants: tuple[int, ...] = (1,),
) -> Scheduled:  # fmt: skip
    request = Request(function, frozenset(constants), Target((), harness.isa))
    conv = read_blocked_convolution(request)
    assert conv is not None
    return schedule_plan(
        request, conv, WinogradPlan(algorithm, Tile(rows, 1, width, conv.output_lanes), tiles, splits, groups)
    )


def normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


@pytest.mark.parametrize("algorithm", [F2, F4])
def test_algorithm_is_exact_in_rational_arithmetic(
    algorithm: ToomCook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toom_cook, "_times", lambda factor, term: factor * term)
    inputs, taps = (np.random.default_rng(0).standard_normal(n) for n in (algorithm.points, 3))
    weights = np.array(algorithm.filter_matrix()) @ taps
    outputs = algorithm.transform_output(list(weights * algorithm.transform_input(list(inputs))))
    direct = [inputs[i : i + 3] @ taps for i in range(algorithm.outputs)]
    np.testing.assert_allclose(outputs, direct, rtol=1e-13, atol=1e-13)


def test_every_coefficient_that_meets_an_activation_is_exact() -> None:
    for p in F4.magnitudes:
        for coefficient in (p, p**3, p * p, sum(q * q for q in F4.magnitudes), np.prod(F4.magnitudes) ** 2):
            assert float(np.float32(coefficient)) == coefficient


@pytest.mark.parametrize(
    ("algorithm", "size", "padding", "blocks", "plan"),
    [
        (F4, (13, 9), (1, 1, 1, 1), (2, 3), (4, 2, 8, 1, 1)),  # nothing divides anything
        (F2, (7, 6), (0, 2, 1, 0), (1, 2), (5, 2, 10, 1, 1)),  # uneven padding
        (F4, (8, 8), (1, 1, 1, 1), (1, 4), (4, 1, 4, 2, 2)),  # ranges of output channels
        (F4, (3, 1), (1, 1, 1, 1), (2, 1), (1, 1, 1, 1, 1)),  # an image smaller than a tile
        (F2, (5, 5), (3, 3, 3, 3), (1, 1), (3, 1, 9, 1, 1)),  # tiles of nothing but padding
    ],
)  # fmt: skip
def test_any_image_and_any_plan(
    harness: Any, assert_close: Any, algorithm: ToomCook, size: tuple[int, int],
    padding: tuple[int, int, int, int], blocks: tuple[int, int], plan: tuple[int, ...],
) -> None:  # fmt: skip
    lanes = harness.isa.lanes()
    shapes = (2, blocks[0], *size, lanes), (blocks[1], blocks[0], 3, 3, lanes, lanes)
    function = convolution(harness, *shapes, window=ConvWindow((1, 1), padding, (1, 1)))
    data, weight = normal(0, *shapes)
    (result,) = harness.run(function, planned(harness, function, algorithm, *plan), [data, weight])
    assert_close(result, reference(data, weight, padding))


@pytest.mark.parametrize(
    ("algorithm", "blocks", "plan"), [(F4, (2, 3), (4, 2, 8, 1, 1)), (F2, (1, 4), (4, 1, 4, 2, 2))]
)  # fmt: skip
def test_weights_known_at_run_time_are_transformed_first(
    harness: Any, assert_close: Any, algorithm: ToomCook, blocks: tuple[int, int], plan: tuple[int, ...]
) -> None:
    lanes = harness.isa.lanes()
    shapes = (2, blocks[0], 9, 7, lanes), (blocks[1], blocks[0], 3, 3, lanes, lanes)
    function = convolution(harness, *shapes)
    data, weight = normal(0, *shapes)
    scheduled = planned(harness, function, algorithm, *plan, constants=())
    (result,) = harness.run(function, scheduled, [data, weight])
    assert_close(result, reference(data, weight, (1, 1, 1, 1)))


def test_epilogue_reads_bias_and_residual(harness: Any, assert_close: Any) -> None:
    lanes = harness.isa.lanes()
    shapes = (1, 2, 10, 10, lanes), (2, 2, 3, 3, lanes, lanes), (1, 2, 1, 1, lanes), (1, 2, 10, 10, lanes)

    def epilogue(emit: Any, conv: relax.Expr, bias: relax.Var, residual: relax.Var) -> relax.Expr:
        return relu(emit, emit(relax.op.add(emit(relax.op.add(conv, bias)), residual)))

    function = convolution(harness, *shapes, epilogue=epilogue)
    inputs = normal(1, *shapes)
    (result,) = harness.run(function, planned(harness, function, F4, 3, 2, 9), inputs)
    sums = reference(inputs[0], inputs[1], (1, 1, 1, 1))
    assert_close(result, np.maximum(sums + inputs[2] + inputs[3], 0))


def test_output_may_overwrite_the_residual(harness: Any, assert_close: Any) -> None:
    lanes = harness.isa.lanes()
    shapes = (1, 1, 9, 9, lanes), (1, 1, 3, 3, lanes, lanes), (1, 1, 9, 9, lanes)
    function = convolution(harness, *shapes, epilogue=lambda emit, conv, rest: emit(relax.op.add(conv, rest)))
    inputs = normal(2, *shapes)
    scheduled = planned(harness, function, F4, 2, 1, 4)
    ((position, packing),) = scheduled.packings
    packed = list(inputs)
    packed[position] = packing.apply(packed[position])
    result = harness.run_in_place(scheduled, packed, 2)
    assert_close(result, reference(inputs[0], inputs[1], (1, 1, 1, 1)) + inputs[2])


def test_input_and_output_lanes_may_differ(harness: Any, assert_close: Any) -> None:
    lanes = harness.isa.lanes()
    shapes = (1, 3, 6, 6, 8), (1, 3, 3, 3, 8, lanes)
    function = convolution(harness, *shapes)
    data, weight = normal(3, *shapes)
    (result,) = harness.run(function, planned(harness, function, F4, 4, 1, 4), [data, weight])
    assert_close(result, reference(data, weight, (1, 1, 1, 1)))


def test_what_lies_around_the_image_is_not_read(harness: Any) -> None:
    """Transforms mix the inputs of a tile: one NaN from outside would reach outputs inside."""
    lanes = harness.isa.lanes()
    shapes = (1, 1, 5, 9, lanes), (1, 1, 3, 3, lanes, lanes)
    function = convolution(harness, *shapes, window=ConvWindow((1, 1), (0, 0, 1, 0), (1, 1)))
    data, weight = normal(5, *shapes)
    scheduled = planned(harness, function, F4, 1, 1, 1)
    surrounded = np.full(3 * data.size + 16, np.nan, np.float32)
    start = data.size + -(surrounded.ctypes.data // 4 + data.size) % 16
    image = surrounded[start : start + data.size].reshape(data.shape)
    image[...] = data
    packed = scheduled.packings[0][1].apply(weight)
    result = tvm.runtime.tensor(np.full((1, 1, 4, 7, lanes), np.nan, np.float32))
    harness.compile(scheduled)(tvm.runtime.from_dlpack(image), tvm.runtime.tensor(packed), result)
    assert np.isfinite(result.numpy()).all()


@pytest.mark.parametrize("algorithm", [F2, F4])
def test_error_stays_within_the_bound(algorithm: ToomCook, harness: Any) -> None:
    lanes = harness.isa.lanes()
    shapes = (1, 512 // lanes, 16, 16, lanes), (2, 512 // lanes, 3, 3, lanes, lanes)
    function = convolution(harness, *shapes)
    data, weight = normal(4, *shapes)
    (result,) = harness.run(function, planned(harness, function, algorithm, 4, 2, 16), [data, weight])
    exact = reference(data, weight, (1, 1, 1, 1))
    assert np.abs(result - exact).max() <= BOUND[algorithm] * np.abs(exact).max()


def request(avx2: Any, image: int, channels: tuple[int, int], **window: Any) -> Request:
    data, weight = (1, channels[0] // 8, image, image, 8), (channels[1] // 8, channels[0] // 8, 3, 3, 8, 8)
    strides = window.get("strides", (1, 1))
    function = convolution(
        avx2, data, weight, window=ConvWindow(strides, (1, 1, 1, 1), window.get("dilation", (1, 1)))
    )
    return Request(function, frozenset([1]), Target((), ISAS["avx2"]))


def test_large_images_take_large_tiles(avx2: Any) -> None:
    wanted = request(avx2, 56, (64, 64))
    scheduled = avx2.schedule(wanted.function, wanted.constants)
    assert scheduled.rule == "winograd"
    assert 1 < len(scheduled.choices) <= 8
    assert scheduled.choices[0].startswith("F4")


def test_a_choice_is_taken(avx2: Any) -> None:
    default = request(avx2, 28, (64, 64))
    first = winograd(default)
    assert first is not None
    other = first.choices[-1]
    second = winograd(Request(default.function, default.constants, default.target, choice=other))
    assert second is not None
    assert second.choices == first.choices
    assert str(second.function) != str(first.function)


def test_accumulators_fit_into_registers(avx2: Any) -> None:
    conv = read_blocked_convolution(request(avx2, 28, (64, 64)))
    assert conv is not None
    for plan in candidates(conv, ISAS["avx2"]):
        assert plan.kernel.rows * plan.kernel.width + plan.kernel.width + 1 <= 16


def test_small_weights_on_a_small_image_stay_direct(avx2: Any) -> None:
    """Two tiles of four outputs cover an axis of five."""
    assert winograd(request(avx2, 5, (8, 8))) is None


def test_leaves_other_convolutions_alone(avx2: Any) -> None:
    assert winograd(request(avx2, 28, (64, 64), strides=(2, 2))) is None
    assert winograd(request(avx2, 28, (64, 64), dilation=(2, 2))) is None
    plain = request(avx2, 28, (64, 64))
    assert winograd(Request(plain.function, plain.constants, plain.target, winograd=False)) is None
