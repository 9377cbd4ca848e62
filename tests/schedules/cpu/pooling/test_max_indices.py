"""Max pooling that remembers the taps that won, against PyTorch's rules written in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.layout.max_pool import blocked_max_pool_with_indices
from hybridc.passes.training.kernels.pooling import Pool, max_pool_with_indices
from hybridc.schedules.cpu.pooling.max_indices import max_pool_indices

# taps, strides, padding in front, dilation; image; positions
CASES = [
    (((3, 3), (2, 2), (1, 1), (1, 1)), (9, 11), (5, 6)),
    (((3, 3), (2, 2), (0, 0), (1, 1)), (8, 8), (4, 4)),  # the last windows reach beyond the image
    (((2, 2), (2, 2), (0, 0), (1, 1)), (6, 8), (3, 4)),
    (((3, 2), (1, 2), (2, 0), (2, 1)), (7, 5), (7, 2)),
    (((20, 16), (1, 1), (3, 3), (1, 1)), (24, 18), (11, 9)),
]


def _reference(x, window, positions):
    (kh, kw), (sh, sw), (top, left), (dh, dw) = window
    n, blocks, height, width, lanes = x.shape
    values = np.full((n, blocks, *positions, lanes), -np.inf, "f4")
    numbers = np.zeros(values.shape, "i8")
    for y in range(positions[0]):
        for z in range(positions[1]):
            for a in range(kh):
                for b in range(kw):
                    row, column = y * sh - top + a * dh, z * sw - left + b * dw
                    if 0 <= row < height and 0 <= column < width:
                        new, old = x[:, :, row, column], values[:, :, y, z]
                        wins = (new > old) | np.isnan(new)
                        numbers[:, :, y, z] = np.where(wins, a * kw + b, numbers[:, :, y, z])
                        values[:, :, y, z] = np.where(wins, new, old)
    return values, numbers


@pytest.mark.parametrize(("window", "image", "positions"), CASES)
def test_values_and_numbers_of_the_first_maxima(harness, window, image, positions):
    data = (2, 2, *image, harness.isa.lanes())
    dtype = "uint8" if np.prod(window[0]) <= 256 else "int32"
    function = blocked_max_pool_with_indices(data, positions, window, dtype)
    x = np.random.default_rng(0).integers(-3, 4, data).astype("f4")
    x[0, 0, 1, 1, 3] = np.nan
    values, numbers = harness.run(function, harness.schedule(function, rule=max_pool_indices), [x])
    expected = _reference(x, window, positions)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(numbers, expected[1].astype(dtype))


def test_a_plain_volume_is_no_blocked_image(harness):
    """Both have five dimensions."""
    pool = Pool((1, 2, 2), (1, 2, 2), (0,) * 3, (0,) * 3, (1,) * 3, counts_padding=False)
    data = relax.Var("x", relax.TensorType((2, 3, 4, 6, 8), "float32"))
    function = max_pool_with_indices(data, pool, (4, 3, 4))
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6, 8)).astype("f4")
    values, numbers = harness.run(function, harness.schedule(function), [x])
    windows = x.reshape(2, 3, 4, 3, 2, 4, 2).transpose(0, 1, 2, 3, 5, 4, 6).reshape(2, 3, 4, 3, 4, 4)
    np.testing.assert_array_equal(values, windows.max(-1))
    np.testing.assert_array_equal(numbers, windows.argmax(-1))
