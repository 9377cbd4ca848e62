"""Direct convolutions along one axis: strides, dilations, padding, groups and ragged ends against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.conv1d.conv1d import conv1d
from hybridc.schedules.rule import Request
from hybridc.targets import Target

torch = pytest.importorskip("torch")
op = relax.op
conv = torch.nn.functional.conv1d

CASES: list[tuple[Any, ...]] = [
    # batch, inputs, outputs, taps, length, attributes
    (1, 15, 15, 51, 1501, {"dilation": 8, "padding": 200}),
    (2, 3, 20, 7, 500, {"stride": 2, "padding": 3}),
    (3, 20, 4, 9, 211, {"stride": 3, "dilation": 3, "padding": 5, "groups": 2}),
    (1, 1, 1, 5, 400, {"dilation": 16, "padding": 8}),
    (2, 8, 8, 3, 50, {"padding": 1, "groups": 8}),
    (1, 40, 70, 1, 33, {}),
    (1, 2, 9, 2, 9, {"dilation": 7}),
    (1, 4, 3, 3, 2000, {"stride": 4, "dilation": 6}),
    (1, 2, 3, 10, 700, {"stride": 5}),
    (1, 2, 3, 12, 900, {"stride": 10}),
]


def _random(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype("f4") for shape in shapes]


def _operator(emit: Any, x: relax.Var, w: relax.Var, attributes: dict[str, Any]) -> relax.Expr:
    renamed = {"strides" if name == "stride" else name: value for name, value in attributes.items()}
    return emit(op.nn.conv1d(x, w, **renamed))


def _expected(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    return conv(torch.from_numpy(x).double(), torch.from_numpy(w).double(), **attributes).numpy()


@pytest.mark.parametrize(
    ("case", "constants"), [(case, (1,)) for case in CASES] + [(case, ()) for case in CASES[2::4]], ids=str
)
def test_result_with_bias_residual_and_relu_matches_float64(harness, assert_close, case, constants):
    batch, inputs, outputs, taps, length, attributes = case
    x, w = _random(0, (batch, inputs, length), (outputs, inputs // attributes.get("groups", 1), taps))
    expected = _expected(x, w, attributes)
    bias, residual = _random(1, (1, outputs, 1), expected.shape)

    def build(emit: Any, x: relax.Var, w: relax.Var, b: relax.Var, r: relax.Var) -> relax.Expr:
        y = emit(op.add(_operator(emit, x, w, attributes), b))
        return emit(op.nn.relu(emit(op.add(y, r))))

    arrays = [x, w, bias, residual]
    function = harness.function(build, [a.shape for a in arrays])
    (result,) = harness.run(function, harness.schedule(function, constants, conv1d), arrays)
    assert_close(result, np.maximum(expected + bias + residual, 0))


@pytest.mark.parametrize("taps", [1, 51])
def test_errors_grow_with_the_square_root_of_the_sums_length(harness, taps):
    x, w = _random(2, (1, 64, 700 + taps), (5, 64, taps))
    function = harness.function(lambda emit, x, w: _operator(emit, x, w, {}), [x.shape, w.shape])
    (result,) = harness.run(function, harness.schedule(function, [1], conv1d), [x, w])
    expected = _expected(x, w, {})
    assert np.abs(result - expected).max() <= 6e-8 * (64 * taps) ** 0.5 * np.abs(expected).max()


def test_every_choice_gives_the_same_result(harness, assert_close):
    """Tiles that stick out of blocks, of the output and of its channels, and parts of the channels."""
    x, w = _random(3, (1, 6, 1100), (13, 6, 3))
    function = harness.function(lambda emit, x, w: _operator(emit, x, w, {}), [x.shape, w.shape])
    scheduled = harness.schedule(function, [1], conv1d)
    assert len(scheduled.choices) > 2
    for choice in scheduled.choices[::3]:
        made = conv1d(Request(function, frozenset([1]), Target((), harness.isa), choice))
        assert made is not None
        assert_close(harness.run(function, made, [x, w])[0], _expected(x, w, {}))


def test_one_line_of_two_dimensions_is_accepted_and_more_are_not(harness, assert_close):
    x, w = _random(4, (1, 3, 1, 300), (4, 3, 1, 9))
    function = harness.function(
        lambda emit, x, w: emit(op.nn.conv2d(x, w, padding=(0, 4))), [x.shape, w.shape]
    )
    (result,) = harness.run(function, harness.schedule(function, [1], conv1d), [x, w])
    assert_close(result[:, :, 0], _expected(x[:, :, 0], w[:, :, 0], {"padding": 4}))
    image = harness.function(lambda emit, x, w: emit(op.nn.conv2d(x, w)), [(1, 3, 8, 30), (4, 3, 3, 3)])
    assert harness.schedule(image).rule == "conv2d"


def test_residual_may_share_its_bytes_with_the_output(harness):
    """The planner lets an output overwrite a residual: every element is read before it is written."""
    x, w, r = _random(5, (1, 3, 401), (5, 3, 3), (1, 5, 399))
    function = harness.function(
        lambda emit, x, w, r: emit(op.add(_operator(emit, x, w, {}), r)), [x.shape, w.shape, r.shape]
    )
    scheduled = harness.schedule(function, [1], conv1d)
    (expected,) = harness.run(function, scheduled, [x, w, r])
    packed = [x, scheduled.packings[0][1].apply(w), r]
    np.testing.assert_array_equal(harness.run_in_place(scheduled, packed, 2), expected)
