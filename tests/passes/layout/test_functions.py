"""Functions that work channel by channel, rewritten for blocks of channels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from hybridc.passes.layout.functions import Channels, in_blocks
from hybridc.schedules.blocked_operators import extents, sum_over
from tests.support.programs import drawn

CHANNELS = Channels(16, 8)
SHAPE = (2, 16, 3, 5)


def _run(function: tirx.PrimFunc, *inputs: np.ndarray) -> list[np.ndarray]:
    results = [np.zeros([int(e) for e in p.shape], str(p.dtype)) for p in function.params[len(inputs) :]]
    tensors = [tvm.runtime.tensor(a) for a in (*inputs, *results)]
    tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), target="llvm")["main"](
        *tensors
    )
    return [t.numpy() for t in tensors[len(inputs) :]]


def _blocks(array: np.ndarray) -> np.ndarray:
    """What `Channels.shape` says, of an array."""
    if array.ndim == 1:
        return array.reshape(-1, 8)
    n, c, h, w = array.shape
    return np.ascontiguousarray(array.reshape(n, c // 8, 8, h, w).transpose(0, 1, 3, 4, 2))


def _normalised() -> tirx.PrimFunc:
    """(x - mean) * scale, and the sum of its squares for each channel."""
    x = te.placeholder(extents(*SHAPE), "float32", "x")
    mean, scale = (te.placeholder(extents(16), "float32", name) for name in ("mean", "scale"))
    factor = te.placeholder([], "float32", "factor")
    y = te.compute(x.shape, lambda n, c, h, w: (x[n, c, h, w] - mean[c]) * scale[c], name="y")
    n, h, w = (sum_over(e, "r") for e in (2, 3, 5))
    squares = te.compute(
        extents(16), lambda c: te.sum(y[n, c, h, w] * y[n, c, h, w], axis=[n, h, w]), name="s"
    )
    total = te.compute(extents(16), lambda c: squares[c] * factor[()], name="total")
    return te.create_prim_func([x, mean, scale, factor, y, total])


def test_maps_and_sums_of_channels_compute_the_same_on_blocks():
    function = _normalised()
    blocked = in_blocks(function, CHANNELS)
    assert blocked is not None
    inputs = [drawn(0, *SHAPE), drawn(1, 16), drawn(2, 16), np.array(0.5, "f4")]
    expected = _run(function, *inputs)
    results = _run(blocked, *(a if a.ndim == 0 else _blocks(a) for a in inputs))
    for result, plain in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, _blocks(plain), rtol=1e-5)


def test_neighbours_in_the_image_may_be_read_and_annotations_stay():
    x = te.placeholder(extents(*SHAPE), "float32", "x")
    out = te.compute(
        extents(2, 16, 2, 5),
        lambda n, c, h, w: x[n, c, h + 1, w] - x[n, c, h, w],
        "d",
        attrs={"operator": "d"},
    )
    function = te.create_prim_func([x, out])
    blocked = in_blocks(function, CHANNELS)
    assert blocked is not None and '"operator": "d"' in blocked.script()
    data = drawn(0, *SHAPE)
    (result,), (expected,) = _run(blocked, _blocks(data)), _run(function, data)
    np.testing.assert_array_equal(result, _blocks(expected))


@pytest.mark.parametrize(
    "mixes", [lambda x, n, c, h, w: x[n, 15 - c, h, w], lambda x, n, c, h, w: x[n, 0, h, w]]
)
def test_functions_that_mix_channels_are_refused(mixes):
    x = te.placeholder(extents(*SHAPE), "float32", "x")
    out = te.compute(x.shape, lambda *at: mixes(x, *at))
    assert in_blocks(te.create_prim_func([x, out]), CHANNELS) is None


def test_sums_over_channels_and_extrema_are_refused():
    x = te.placeholder(extents(*SHAPE), "float32", "x")
    c, h = sum_over(16, "c"), sum_over(3, "h")
    over = te.compute(extents(2, 3, 5), lambda n, y, w: te.sum(x[n, c, y, w], axis=c))
    largest = te.compute(extents(2, 16, 5), lambda n, k, w: te.max(x[n, k, h, w], axis=h))
    for result in (over, largest):
        assert in_blocks(te.create_prim_func([x, result]), CHANNELS) is None
