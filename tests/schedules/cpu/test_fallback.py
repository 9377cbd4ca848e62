"""The rule of last resort is correct for whatever it is given."""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.schedules.cpu import RULES
from hybridc.schedules.cpu.fallback import fallback

op = relax.op


def test_fallback_is_the_last_rule():
    assert RULES[-1] is fallback


def test_fallback_schedules_a_convolution(harness, assert_close):
    rng = np.random.default_rng(16)
    x, w = (rng.standard_normal(s).astype("f4") for s in ((1, 3, 40, 40), (8, 3, 1, 1)))
    function = harness.function(lambda e, x, w: e(op.nn.relu(e(op.nn.conv2d(x, w)))), [x.shape, w.shape])
    (result,) = harness.run(function, harness.schedule(function, [1], fallback), [x, w])
    expected = np.einsum("nchw,oc->nohw", x.astype("f8"), w[:, :, 0, 0].astype("f8"))
    assert_close(result, np.maximum(expected, 0))


def test_arg_max_across_rows_is_left_to_the_fallback(harness):
    x = np.random.default_rng(17).standard_normal((6, 50)).astype("f4")
    function = harness.function(lambda e, x: e(op.argmax(x, 0)), [x.shape])
    scheduled = harness.schedule(function)
    assert scheduled.rule == "fallback"
    (result,) = harness.run(function, scheduled, [x])
    np.testing.assert_array_equal(result, x.argmax(0))
