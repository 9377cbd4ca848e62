"""Rows that take their places among those of a cache: what frontend and schedules both know of it.

    result[b, h, p, d] = new[b, h, p - before[b], d]    where before[b] <= p < before[b] + length
                         past[b, h, p, d]               elsewhere

A decoder's step appends its keys and values so. Where the result has the past's place in memory, only the new
rows are written.
"""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, te, tirx

APPENDED_ROWS = "appended_rows"
"""What the block of such a function is annotated with. Its parameters are past, new, before and result."""


def appended_rows(past: te.Tensor, new: te.Tensor, before: te.Tensor) -> te.Tensor:
    """past [batch, heads, positions, depth], new [batch, heads, length, depth], before [batch, 1, 1, 1]."""
    length = int(new.shape[2])

    def element(b: te.Var, h: te.Var, p: te.Var, d: te.Var) -> te.Expr:
        row = p.astype("int64") - before[b, 0, 0, 0].astype("int64")
        is_new = tirx.all(row >= 0, row < length)
        place = tirx.max(tirx.min(row, te.const(length - 1, "int64")), te.const(0, "int64"))
        return tirx.Select(is_new, new[b, h, place, d], past[b, h, p, d])

    return te.compute(past.shape, element, name=APPENDED_ROWS, attrs={"operator": APPENDED_ROWS})


def is_appended_rows(function: tirx.PrimFunc) -> bool:
    """Whether a function that is not scheduled yet is one of these, and nothing else."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, found.append))
    operators = [block.annotations.get("operator") for block in found if block.iter_vars]
    return operators == [APPENDED_ROWS]
