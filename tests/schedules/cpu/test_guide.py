"""The worked example of the guide is a rule that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from tvm import relax

GUIDE = Path(__file__).parents[3] / "docs" / "writing_a_schedule.md"


def test_worked_example_schedules_row_maxima(harness):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(code, names)
    x = np.random.default_rng(19).standard_normal((5, 64)).astype("f4")
    function = harness.function(lambda e, x: e(relax.op.max(x, [-1])), [x.shape])
    scheduled = harness.schedule(function, [], names["row_max"])
    (result,) = harness.run(function, scheduled, [x])
    np.testing.assert_array_equal(result, x.max(-1))
