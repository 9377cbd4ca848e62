"""Rows that take their places in a cache on the emulated GPU, in place and apart from it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from hybridc.appended_rows import appended_rows
from hybridc.schedules.cuda.elementwise.appended_rows import appended_rows as rule
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import stored
from tests.schedules.cuda.harness import library_of, scheduled_for_gpu

SHAPES = {
    "one": (1, 2, 40, 1, 64, "int32", "float32", "float32"),
    "batch": (3, 1, 9, 4, 20, "int64", "float32", "float32"),
    "odd": (2, 3, 200, 7, 5, "int32", "float32", "float32"),
    "all": (1, 1, 6, 6, 16, "int64", "float32", "float32"),
    "half": (1, 2, 300, 3, 24, "int32", "float16", "float16"),
    "rounded": (2, 3, 70, 2, 64, "int32", "float16", "float32"),
    "rounded_odd": (1, 2, 33, 5, 7, "int64", "float16", "float32"),
    "large": (1, 8, 600, 1, 64, "int64", "float32", "float32"),
}
"""Batch, heads, positions, length, depth, and types of the counts, the cache and new rows."""


def function(
    batch: int, heads: int, positions: int, length: int, depth: int, kind: str, cache: str, dtype: str
) -> tirx.PrimFunc:
    shapes = (batch, heads, positions, depth), (batch, heads, length, depth), (batch, 1, 1, 1)
    types = dtype, dtype, kind
    inputs = [te.placeholder(index_shape(s), d) for s, d in zip(shapes, types, strict=True)]
    made = te.create_prim_func([*inputs, appended_rows(*inputs)])
    return made if cache == dtype else stored(made, {0: cache, 3: cache})


@pytest.fixture(scope="module")
def library() -> tvm.runtime.Module:
    found = {name: scheduled_for_gpu(function(*shape)) for name, shape in SHAPES.items()}
    assert {made.rule for made in found.values()} == {rule.__name__}
    assert not any(made.workspace_bytes for made in found.values())
    return library_of(found)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_only_new_rows_change(library: tvm.runtime.Module, name: str, in_place: bool) -> None:
    batch, heads, positions, length, depth, kind, cache, dtype = SHAPES[name]
    rng, device = np.random.default_rng(len(name)), tvm.cuda(0)
    past, new = (
        rng.standard_normal((batch, heads, n, depth)).astype(each)
        for n, each in ((positions, cache), (length, dtype))
    )
    before = rng.integers(0, positions - length + 1, (batch, 1, 1, 1)).astype(kind)
    expected = past.copy()
    for b, first in enumerate(before.ravel()):
        expected[b, :, first : first + length] = new[b].astype(cache)
    fed = [tvm.runtime.tensor(each, device) for each in (past, new, before)]
    result = fed[0] if in_place else tvm.runtime.empty(past.shape, cache, device)
    library[name](*fed, result)
    device.sync()
    np.testing.assert_array_equal(result.numpy(), expected)
    np.testing.assert_array_equal(fed[0].numpy(), expected if in_place else past)


@pytest.mark.parametrize("wild", [-5, 38, 2**31 - 1, -(2**31)])
def test_no_position_leads_outside(library: tvm.runtime.Module, wild: int) -> None:
    """Positions are checked where they are fed; the function stays within its buffers all the same."""
    device = tvm.cuda(0)
    past, new = np.zeros((1, 2, 40, 64), np.float32), np.ones((1, 2, 1, 64), np.float32)
    fed = [tvm.runtime.tensor(each, device) for each in (past, new, np.full((1, 1, 1, 1), wild, np.int32))]
    library["one"](*fed, fed[0])
    device.sync()
    assert fed[0].numpy().sum() == new.sum()
