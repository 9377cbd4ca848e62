"""Positions of maxima and minima against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from hybridc.passes.program.nan_semantics import with_infinite_bounds

op = relax.op
OPERATORS = {"max": (op.argmax, np.argmax), "min": (op.argmin, np.argmin)}


def run(harness, build, x, rule="arg_extremum"):
    function = with_infinite_bounds(harness.function(build, [x.shape], str(x.dtype)))
    scheduled = harness.schedule(function)
    assert scheduled.rule == rule
    (result,) = harness.run(function, scheduled, [x])
    return result


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("shape", [(7, 1000), (3, 5, 53), (40, 3), (97,)], ids=str)
def test_first_of_equal_elements_is_found(harness, kind, shape):
    operator, expected = OPERATORS[kind]
    x = np.random.default_rng(1).integers(-20, 20, shape).astype("f4")
    np.testing.assert_array_equal(run(harness, lambda e, x: e(operator(x, -1)), x), expected(x, -1))


def test_kept_axis_and_cast_join_the_kernel(harness):
    x = np.random.default_rng(2).standard_normal((6, 77)).astype("f4")
    result = run(harness, lambda e, x: e(op.astype(e(op.argmax(x, -1, True)), "float32")), x)
    np.testing.assert_array_equal(result, x.argmax(-1)[:, None])


def test_lines_of_infinities_have_their_extremum_first(harness):
    x = np.full((2, 45), -np.inf, "f4")
    x[1, 17] = np.inf
    assert run(harness, lambda e, x: e(op.argmax(x, -1)), x).tolist() == [0, 17]


def test_position_of_nothing_but_nan_lies_inside(harness):
    x = np.full((1, 45), np.nan, "f4")
    assert 0 <= run(harness, lambda e, x: e(op.argmax(x, -1)), x)[0] < 45


def test_integers_are_compared_exactly(harness):
    x = np.random.default_rng(3).integers(-(2**40), 2**40, (4, 61))
    np.testing.assert_array_equal(run(harness, lambda e, x: e(op.argmin(x, -1)), x), x.argmin(-1))


def test_other_axes_are_left_to_the_compiler(harness):
    x = np.random.default_rng(4).standard_normal((2, 9, 40)).astype("f4")
    np.testing.assert_array_equal(run(harness, lambda e, x: e(op.argmax(x, 1)), x, "fallback"), x.argmax(1))
