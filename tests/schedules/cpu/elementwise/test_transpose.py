"""Data movement whose operands lie in another order than the output, bit for bit against numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.blocked_operators import to_blocked, to_plain
from hybridc.schedules.cpu.elementwise.elementwise import elementwise
from hybridc.schedules.cpu.fallback import fallback

op = relax.op


def numbered(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Every element another number, so that one in a wrong place shows."""
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def moved(harness: Any, build: Any, *inputs: np.ndarray) -> np.ndarray:
    function = harness.function(build, [x.shape for x in inputs], [str(x.dtype) for x in inputs])
    (result,) = harness.run(function, harness.schedule(function, rule=elementwise), list(inputs))
    return result


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((40, 72), (1, 0)),
        ((37, 19), (1, 0)),  # tails on both sides
        ((9, 300), (1, 0)),  # rows of half a cache line
        ((5, 6), (1, 0)),
        ((600, 70), (1, 0)),  # several blocks, several tasks
        ((2, 17, 3, 21), (0, 3, 1, 2)),
        ((2, 3, 50, 18), (0, 1, 3, 2)),
        ((3, 50, 4, 16), (0, 2, 1, 3)),
        ((3, 50, 4, 16), (0, 2, 3, 1)),
        ((64, 3), (1, 0)),  # too narrow for tiles
    ],
)
def test_axes_are_permuted(harness, shape, axes):
    x = numbered(shape)
    np.testing.assert_array_equal(
        moved(harness, lambda e, x: e(op.permute_dims(x, axes)), x), x.transpose(axes)
    )


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int32", "int64"])
def test_other_types_are_transposed(avx2, dtype):
    x = numbered((20, 33)).astype(dtype)
    np.testing.assert_array_equal(moved(avx2, lambda e, x: e(op.permute_dims(x, [1, 0])), x), x.T)


@pytest.mark.parametrize(
    ("size", "channels"), [((5, 7), 32), ((7, 7), 21), ((1, 3), 16), ((40, 40), 24), ((9, 33), 3)]
)
@pytest.mark.parametrize("lanes", [8, 16])
def test_channels_are_blocked_and_unblocked(harness, size, channels, lanes):
    shape = (2, channels, *size)
    x, blocks = numbered(shape), -(-channels // lanes)
    padded = np.pad(x, ((0, 0), (0, blocks * lanes - channels), (0, 0), (0, 0)))
    expected = padded.reshape(2, blocks, lanes, *size).transpose(0, 1, 3, 4, 2)
    function = to_blocked(shape, lanes)
    (result,) = harness.run(function, harness.schedule(function, rule=elementwise), [x])
    np.testing.assert_array_equal(result, expected)
    function = to_plain(expected.shape, channels)
    (result,) = harness.run(function, harness.schedule(function, rule=elementwise), [expected])
    np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("first", [0, 4, 5])
def test_few_columns_of_many_are_transposed(harness, first):
    """Four are read at once, but not beyond the end of the operand."""
    x = numbered((37, 8))

    def build(e, x):
        return e(op.permute_dims(e(op.strided_slice(x, [1], [first], [first + 3])), [1, 0]))

    np.testing.assert_array_equal(moved(harness, build, x), x[:, first : first + 3].T)


@pytest.mark.parametrize(("factor", "size"), [(2, (5, 24)), (3, (6, 19)), (4, (3, 5)), (5, (2, 3))])
def test_pixels_are_shuffled_to_space_and_back(harness, factor, size):
    r, (h, w) = factor, size
    x = numbered((2, 3 * r * r, h, w))

    def to_space(e, x):
        x = e(op.permute_dims(e(op.reshape(x, (2, 3, r, r, h, w))), [0, 1, 4, 2, 5, 3]))
        return e(op.reshape(x, (2, 3, h * r, w * r)))

    def to_depth(e, x):
        x = e(op.permute_dims(e(op.reshape(x, (2, 3, h, r, w, r))), [0, 3, 5, 1, 2, 4]))
        return e(op.reshape(x, (2, 3 * r * r, h, w)))

    space = x.reshape(2, 3, r, r, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, h * r, w * r)
    np.testing.assert_array_equal(moved(harness, to_space, x), space)
    depth = space.reshape(2, 3, h, r, w, r).transpose(0, 3, 5, 1, 2, 4).reshape(x.shape)
    np.testing.assert_array_equal(moved(harness, to_depth, space), depth)


@pytest.mark.parametrize("step", [-1, -3, 2, 3, 8])
def test_a_strided_slice_reads_nothing_beyond_its_last_element(harness, step):
    x = numbered((3, 103))
    begin, end = (102, 0) if step < 0 else (0, 103)
    result = moved(harness, lambda e, x: e(op.strided_slice(x, [1], [begin], [end], [step])), x)
    np.testing.assert_array_equal(result, x[:, begin:end:step])


@pytest.mark.parametrize(("scale", "width"), [(2, 24), (3, 7), (2, 3)])
def test_nearest_neighbours_are_repeated(harness, scale, width):
    x = numbered((1, 2, 5, width))
    size = (5 * scale, width * scale)
    mode = {"coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"}

    def resize(e, x):
        return e(op.image.resize2d(x, size, method="nearest_neighbor", **mode))

    np.testing.assert_array_equal(moved(harness, resize, x), x.repeat(scale, 2).repeat(scale, 3))


@pytest.mark.parametrize("mode", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize(("scale", "width"), [(2, 56), (3, 21), (2, 5), (1.5, 40)])
def test_rows_are_enlarged_as_by_gathering(harness, mode, scale, width):
    x = np.random.default_rng(21).standard_normal((1, 3, 6, width)).astype("f4")

    def resize(e, x):
        size = (int(6 * scale), int(width * scale))
        return e(op.image.resize2d(x, size, method="linear", coordinate_transformation_mode=mode))

    function = harness.function(resize, [x.shape])
    (expected,) = harness.run(function, harness.schedule(function, rule=fallback), [x])
    np.testing.assert_allclose(moved(harness, resize, x), expected, rtol=1e-5, atol=1e-6)


def test_what_is_transposed_may_be_used_in_arithmetic(harness):
    x, b, y = numbered((2, 19, 35)), numbered((19,)), numbered((2, 35, 19))

    def build(e, x, b, y):
        return e(op.nn.relu(e(op.subtract(e(op.add(e(op.permute_dims(x, [0, 2, 1])), b)), y))))

    expected = np.maximum(x.transpose(0, 2, 1) + b - y, 0)
    np.testing.assert_array_equal(moved(harness, build, x, b, y), expected)


def test_two_operands_may_be_transposed_differently(harness):
    x, y = numbered((20, 18, 24)), numbered((24, 20, 18))

    def build(e, x, y):
        return e(op.add(e(op.permute_dims(x, [1, 2, 0])), e(op.permute_dims(y, [2, 0, 1]))))

    expected = x.transpose(1, 2, 0) + y.transpose(2, 0, 1)
    np.testing.assert_array_equal(moved(harness, build, x, y), expected)


def test_a_transpose_may_overwrite_what_it_is_added_to(harness):
    x, y = numbered((37, 19)), numbered((19, 37))
    function = harness.function(
        lambda e, x, y: e(op.add(e(op.permute_dims(x, [1, 0])), y)), [x.shape, y.shape]
    )
    result = harness.run_in_place(harness.schedule(function), [x, y], 1)
    np.testing.assert_array_equal(result, x.T + y)


@pytest.mark.parametrize("length", [1, 7, 16, 31, 97, 20011])
def test_lines_of_any_length_may_be_overwritten(harness, length):
    x, y = numbered((3, length)), numbered((3, 1))
    function = harness.function(lambda e, x, y: e(op.multiply(e(op.add(x, y)), x)), [x.shape, y.shape])
    result = harness.run_in_place(harness.schedule(function), [x, y], 0)
    np.testing.assert_array_equal(result, (x + y) * x)


@pytest.mark.parametrize(("extents", "axis"), [((5, 3, 9), 2), ((1, 40, 2), 1), ((16, 33), 0)])
def test_operands_are_concatenated_along_any_axis(harness, extents, axis):
    parts = [numbered(tuple(extents[axis] + k if a == axis else 6 for a in range(3))) for k in range(3)]

    def build(e, *parts):
        return e(op.concat(list(parts), axis))

    np.testing.assert_array_equal(moved(harness, build, *parts), np.concatenate(parts, axis))


@pytest.mark.parametrize("pads", [*itertools.product((0, 1, 17), repeat=2)])
def test_padding_is_written_around_the_operand(avx2, pads):
    before, after = pads
    x = numbered((2, 5, 21))
    widths = [0, 0, before, after, after, before]
    result = moved(avx2, lambda e, x: e(op.nn.pad(x, widths, pad_value=7.0)), x)
    expected = np.pad(x, ((0, 0), (before, after), (after, before)), constant_values=7)
    np.testing.assert_array_equal(result, expected)
