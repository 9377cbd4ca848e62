"""Rows that a mask keeps, in a place of their own and in that of their operand, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from hybridc.schedules.cpu.elementwise.kept_rows import kept_rows

DTYPES = ["bool", "float32", "float32"]


def chosen(emit: Any, mask: Any, kept: Any, other: Any) -> Any:
    return emit(relax.op.where(mask, kept, other))


@pytest.mark.parametrize("shape", [(1, 2, 40, 64), (2, 3, 9, 37), (300, 32)])
def test_kept_rows_stay_in_place(harness: Any, shape: tuple[int, ...]) -> None:
    """As those of a cache do, of which one row is new."""
    *outer, rows, width = shape
    shapes = [(*[1] * len(outer), rows, 1), shape, (*outer, 1, width)]
    function = harness.function(chosen, shapes, DTYPES)
    scheduled = harness.schedule(function)
    assert scheduled.rule == kept_rows.__name__
    random = np.random.default_rng(3)
    kept, other = (random.standard_normal(each).astype("f4") for each in shapes[1:])
    mask = random.integers(0, 2, shapes[0]).astype(bool)
    wanted = np.where(mask, kept, other)
    [found] = harness.run(function, scheduled, [mask, kept, other])
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(harness.run_in_place(scheduled, [mask, kept, other], 1), wanted)


def test_the_other_operand_may_be_overwritten_too(harness: Any) -> None:
    shape, random = (6, 48), np.random.default_rng(4)
    function = harness.function(chosen, [(6, 1), shape, shape], DTYPES)
    kept, other = (random.standard_normal(shape).astype("f4") for _ in range(2))
    mask = np.arange(6).reshape(6, 1) % 2 == 0
    found = harness.run_in_place(harness.schedule(function), [mask, kept, other], 2)
    np.testing.assert_array_equal(found, np.where(mask, kept, other))


@pytest.mark.parametrize(("mask", "width"), [((4, 64), 64), ((4, 1), 3)])
def test_other_choices_are_left_to_other_rules(harness: Any, mask: tuple[int, ...], width: int) -> None:
    """A mask that differs within a row, and rows shorter than a vector."""
    function = harness.function(chosen, [mask, (4, width), (4, width)], DTYPES)
    assert harness.schedule(function).rule != kept_rows.__name__
