"""Softmax against float64: its error bound, masks, and extreme rows."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, topi

op = relax.op
LOWEST = np.finfo(np.float32).min


def reference(x, axis=-1):
    x = x.astype("f8")
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def softmax(axis=-1):
    return lambda e, x: e(op.nn.softmax(x, axis))


def run(harness, build, inputs):
    function = harness.function(build, [x.shape for x in inputs])
    scheduled = harness.schedule(function)
    assert scheduled.rule == "softmax"
    (result,) = harness.run(function, scheduled, inputs)
    return result


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 1021), -1),
        ((40, 31), -1),
        ((2, 8, 197), -1),
        ((3, 9, 5, 21), 1),
        ((4, 600, 40), 1),
        ((2, 3, 65, 65), 1),
        ((1, 2, 7, 11), 1),
        ((70, 2), -1),
    ],
)
def test_error_stays_within_the_stated_bound(harness, shape, axis):
    x = (np.random.default_rng(1).standard_normal(shape) * 8).astype("f4")
    bound = 1e-6 if axis == -1 else 1e-6 + 6e-8 * shape[axis]
    assert np.abs(run(harness, softmax(axis), [x]) - reference(x, axis)).max() <= bound


def test_small_probabilities_keep_their_relative_accuracy(harness):
    x = -np.linspace(0, 86, 4099, dtype="f4")[None]
    relative = run(harness, softmax(), [x]) / reference(x) - 1
    assert (np.abs(relative) <= 4e-7 + 1.5e-7 * np.abs(x)).all()


def test_what_is_far_below_the_maximum_becomes_zero(harness):
    x = np.array([[0, -88, -104, -1000, LOWEST, -np.inf] * 7], np.float32)
    result = run(harness, softmax(), [x]).reshape(7, 6)
    np.testing.assert_allclose(result[:, 0], 1 / 7, rtol=1e-6)
    assert not result[:, 1:].any()


@pytest.mark.parametrize("value", [LOWEST, 3e38, 1e30, 0.0])
def test_equal_elements_share_evenly_whatever_their_size(harness, value):
    x = np.full((3, 37), value, "f4")
    np.testing.assert_allclose(run(harness, softmax(), [x]), 1 / 37, rtol=1e-6)


def test_nan_fills_its_row_alone(harness):
    x = np.zeros((3, 37), "f4")
    x[1, 5] = np.nan
    assert np.isnan(run(harness, softmax(), [x])).any(1).tolist() == [False, True, False]
    assert np.isnan(run(harness, softmax(), [x])[1]).all()


def test_log_softmax_is_accurate(harness):
    x = (np.random.default_rng(2).standard_normal((7, 101)) * 8).astype("f4")
    result = run(harness, lambda e, x: e(op.nn.log_softmax(x)), [x])
    np.testing.assert_allclose(result, np.log(reference(x)), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("length", [24, 53])
def test_what_is_added_afterwards_joins_the_kernel(harness, length):
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((6, length)).astype("f4") for _ in range(2))
    result = run(harness, lambda e, x, y: e(op.add(e(op.nn.softmax(x)), y)), [x, y])
    np.testing.assert_allclose(result, reference(x) + y, atol=1e-6)


@pytest.mark.parametrize("length", [64, 53])
def test_scale_and_mask_before_it_are_computed_on_the_way(harness, length):
    x = te.placeholder((2, 3, 5, length), name="x")
    mask = te.placeholder((2, 1, 1, length), name="mask")
    scores = te.compute(x.shape, lambda b, h, i, j: x[b, h, i, j] * 0.125 + mask[b, 0, 0, j], name="scores")
    function = te.create_prim_func([x, mask, topi.nn.softmax(scores)]).with_attr("tirx.noalias", True)
    rng = np.random.default_rng(4)
    inputs = [rng.standard_normal([int(e) for e in t.shape]).astype("f4") for t in (x, mask)]
    scheduled = harness.schedule(function)
    assert scheduled.workspace_bytes == ()
    (result,) = harness.run(function, scheduled, inputs)
    np.testing.assert_allclose(result, reference(inputs[0] * 0.125 + inputs[1]), atol=1e-6)
