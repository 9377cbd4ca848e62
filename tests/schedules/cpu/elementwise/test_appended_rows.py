"""Rows that take their places in a cache, against numpy, in place and apart from it."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx

from hybridc.appended_rows import appended_rows
from hybridc.schedules.cpu.elementwise.appended_rows import appended_rows as rule
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import stored


def function(
    batch: int, heads: int, positions: int, length: int, depth: int, kind: str, cache: str = "float32"
) -> tirx.PrimFunc:
    shapes = (batch, heads, positions, depth), (batch, heads, length, depth), (batch, 1, 1, 1)
    dtypes = "float32", "float32", kind
    inputs = [te.placeholder(index_shape(s), d) for s, d in zip(shapes, dtypes, strict=True)]
    made = te.create_prim_func([*inputs, appended_rows(*inputs)])
    return made if cache == "float32" else stored(made, {0: cache, 3: cache})


@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "positions", "length", "depth", "kind"),
    [
        (1, 2, 40, 1, 64, "int32"),
        (3, 1, 9, 4, 20, "int64"),
        (2, 3, 200, 7, 5, "int32"),
        (1, 1, 6, 6, 16, "int64"),
    ],
)
def test_only_new_rows_change(harness, batch, heads, positions, length, depth, kind, in_place, cache):
    """Which are rounded where a cache has 16 bits; no copy of it is made for that."""
    made = function(batch, heads, positions, length, depth, kind, cache)
    scheduled = harness.schedule(made)
    assert scheduled.rule == rule.__name__ and not scheduled.workspace_bytes
    rng = np.random.default_rng([positions, length, depth])
    past, new = (
        rng.standard_normal((batch, heads, n, depth)).astype(np.float32) for n in (positions, length)
    )
    past = past.astype(cache)
    before = rng.integers(0, positions - length + 1, (batch, 1, 1, 1)).astype(kind)
    expected = past.copy()
    for b, first in enumerate(before.ravel()):
        expected[b, :, first : first + length] = new[b].astype(cache)
    inputs = [past, new, before]
    found = (
        harness.run_in_place(scheduled, inputs, 0) if in_place else harness.run(made, scheduled, inputs)[0]
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wild", [-5, 38, 2**31 - 1, -(2**31)])
def test_no_position_leads_outside(harness, wild):
    """Positions are checked where they are fed; the function stays within its buffers all the same."""
    made = function(1, 2, 40, 3, 16, "int32")
    past, new = np.zeros((1, 2, 40, 16), np.float32), np.ones((1, 2, 3, 16), np.float32)
    before = np.full((1, 1, 1, 1), wild, np.int32)
    found = harness.run_in_place(harness.schedule(made), [past, new, before], 0)
    assert found.sum() == new.sum()
