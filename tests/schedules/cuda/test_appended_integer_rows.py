"""Rows that are rounded to integers as they take their places in a cache, on the emulated GPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from hybridc import emulator
from hybridc.appended_rows import appended_integer_rows
from hybridc.emulator import ThreadOrder
from hybridc.schedules.cuda.elementwise.appended_integer_rows import appended_integer_rows as rule
from hybridc.schedules.shapes import index_shape
from tests.schedules.cuda.harness import library_of, scheduled_for_gpu
from tests.support.integer_rows import assert_appended, numbers_of

SHAPES = {
    "one": (1, 2, 40, 1, 64, "int32"),
    "batch": (3, 1, 9, 4, 48, "int64"),
    "odd": (2, 3, 70, 7, 5, "int32"),
    "all": (1, 1, 6, 6, 80, "int64"),
    "large": (1, 8, 600, 33, 128, "int64"),
}
"""Batch, heads, positions, length, depth, and type of the counts."""


def function(batch: int, heads: int, positions: int, length: int, depth: int, kind: str) -> tirx.PrimFunc:
    shapes = (batch, heads, positions, depth + 4), (batch, heads, length, depth), (batch, 1, 1, 1)
    dtypes = "int8", "float32", kind
    inputs = [te.placeholder(index_shape(s), d) for s, d in zip(shapes, dtypes, strict=True)]
    return te.create_prim_func([*inputs, appended_integer_rows(*inputs)])


@pytest.fixture(scope="module")
def library() -> tvm.runtime.Module:
    found = {name: scheduled_for_gpu(function(*shape)) for name, shape in SHAPES.items()}
    assert {made.rule for made in found.values()} == {rule.__name__}
    assert not any(made.workspace_bytes for made in found.values())
    return library_of(found)


@pytest.mark.parametrize("order", [ThreadOrder.FORWARD, ThreadOrder.WARPS])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_only_new_rows_change(
    library: tvm.runtime.Module, name: str, in_place: bool, order: ThreadOrder
) -> None:
    emulator.start(64 << 20, thread_order=order)
    batch, heads, positions, length, depth, kind = SHAPES[name]
    rng, device = np.random.default_rng([positions, length, depth]), tvm.cuda(0)
    past = rng.integers(-128, 128, (batch, heads, positions, depth + 4)).astype(np.int8)
    new = (rng.standard_normal((batch, heads, length, depth)) * 10).astype(np.float32)
    new[0, 0, 0] = 0
    before = rng.integers(0, positions - length + 1, (batch, 1, 1, 1)).astype(kind)
    fed = [tvm.runtime.tensor(each, device) for each in (past, new, before)]
    result = fed[0] if in_place else tvm.runtime.empty(past.shape, "int8", device)
    library[name](*fed, result)
    device.sync()
    found = result.numpy()
    assert_appended(found, past, new, before)
    np.testing.assert_array_equal(fed[0].numpy(), found if in_place else past)


@pytest.mark.parametrize("wild", [-5, 40, 2**31 - 1, -(2**31)])
def test_no_position_leads_outside(library: tvm.runtime.Module, wild: int) -> None:
    """Positions are checked where they are fed; the function stays within its buffers all the same."""
    device = tvm.cuda(0)
    past, new = np.zeros((1, 2, 40, 68), np.int8), np.ones((1, 2, 1, 64), np.float32)
    fed = [tvm.runtime.tensor(each, device) for each in (past, new, np.full((1, 1, 1, 1), wild, np.int32))]
    library["one"](*fed, fed[0])
    device.sync()
    assert numbers_of(fed[0].numpy()).sum() == new.sum()
