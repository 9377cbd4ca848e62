"""Rows that are rounded to integers as they take their places in a cache, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx

from hybridc.appended_rows import appended_integer_rows
from hybridc.schedules.cpu.elementwise.appended_integer_rows import appended_integer_rows as rule
from hybridc.schedules.shapes import index_shape
from tests.support.integer_rows import assert_appended, numbers_of


def function(batch: int, heads: int, positions: int, length: int, depth: int, kind: str) -> tirx.PrimFunc:
    shapes = (batch, heads, positions, depth + 4), (batch, heads, length, depth), (batch, 1, 1, 1)
    dtypes = "int8", "float32", kind
    inputs = [te.placeholder(index_shape(s), d) for s, d in zip(shapes, dtypes, strict=True)]
    return te.create_prim_func([*inputs, appended_integer_rows(*inputs)])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "positions", "length", "depth", "kind"),
    [
        (1, 2, 40, 1, 64, "int32"),
        (3, 1, 9, 4, 20, "int64"),
        (2, 3, 70, 7, 5, "int32"),
        (1, 8, 64, 32, 128, "int64"),
    ],
)
def test_only_new_rows_change(harness, batch, heads, positions, length, depth, kind, in_place):
    made = function(batch, heads, positions, length, depth, kind)
    scheduled = harness.schedule(made)
    assert scheduled.rule == rule.__name__ and not scheduled.workspace_bytes
    rng = np.random.default_rng([positions, length, depth])
    past = rng.integers(-128, 128, (batch, heads, positions, depth + 4)).astype(np.int8)
    new = (rng.standard_normal((batch, heads, length, depth)) * 10).astype(np.float32)
    new[0, 0, 0] = 0
    before = rng.integers(0, positions - length + 1, (batch, 1, 1, 1)).astype(kind)
    inputs = [past, new, before]
    found = (
        harness.run_in_place(scheduled, inputs, 0) if in_place else harness.run(made, scheduled, inputs)[0]
    )
    assert_appended(found, past, new, before)


@pytest.mark.parametrize("wild", [-5, 38, 2**31 - 1, -(2**31)])
def test_no_position_leads_outside(harness, wild):
    """Positions are checked where they are fed; the function stays within its buffers all the same."""
    made = function(1, 2, 40, 3, 16, "int32")
    past, new = np.zeros((1, 2, 40, 20), np.int8), np.ones((1, 2, 3, 16), np.float32)
    before = np.full((1, 1, 1, 1), wild, np.int32)
    found = harness.run_in_place(harness.schedule(made), [past, new, before], 0)
    assert numbers_of(found).sum() == new.sum()
