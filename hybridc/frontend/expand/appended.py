"""Operators that no file can have: new rows of a cache, and how many come before."""

from __future__ import annotations

import onnx_ir as ir

from hybridc.frontend.expand.builder import Builder, dtype_of, shape_of, typed

CHECKED_COUNT = "CheckedCount"
"""Fed counts as they are, each checked to be from 0 to the attribute `most`."""
APPENDED = "AppendedRows"
"""A past in which new positions have taken their places: past, new and how many positions come before, as
`hybridc/appended_rows.py` has them."""


def checked_count(counts: ir.Value, most: int, operator: str, build: Builder) -> ir.Value:
    """The counts, which a run refuses with HC560 where `operator` is fed others than from 0 to `most`."""
    checked = build.op(CHECKED_COUNT, counts, most=most, operator=operator)
    return typed(checked, dtype_of(counts), shape_of(counts))


def appended_rows(past: ir.Value, new: ir.Value, before: ir.Value, build: Builder) -> ir.Value:
    """Past (batch, heads, positions, depth) with new rows behind so many, (batch, 1, 1, 1), which are checked
    already."""
    return typed(build.op(APPENDED, past, new, before), dtype_of(past), shape_of(past))
