"""The worked examples of the guide are rules that work."""

from __future__ import annotations

import numpy as np
from tvm import relax

from tests.support.guide import rule_of_guide


def test_worked_example_schedules_row_maxima(harness):
    x = np.random.default_rng(19).standard_normal((5, 64)).astype("f4")
    function = harness.function(lambda e, x: e(relax.op.max(x, [-1])), [x.shape])
    scheduled = harness.schedule(function, [], rule_of_guide("row_max"))
    (result,) = harness.run(function, scheduled, [x])
    np.testing.assert_array_equal(result, x.max(-1))


def test_example_for_a_fused_operator_schedules_a_residual_connection(harness):
    generator = np.random.default_rng(20)
    x, y = (generator.standard_normal((3, 5, 32)).astype("f4") for _ in range(2))
    function = harness.function(
        lambda e, x, y: e(relax.op.nn.relu(e(relax.op.add(x, y)))), [x.shape, y.shape]
    )
    scheduled = harness.schedule(function, [], rule_of_guide("residual"))
    (result,) = harness.run(function, scheduled, [x, y])
    np.testing.assert_array_equal(result, np.maximum(x + y, 0))
