"""Rows that take their places among those of a cache: what frontend and schedules both know of it.

    result[b, h, p, d] = new[b, h, p - before[b], d]    where before[b] <= p < before[b] + length
                         past[b, h, p, d]               elsewhere

A decoder's step appends its keys and values so. Where the result has the past's place in memory, only the new
rows are written.

A cache may have rows of 8-bit integers: those nearest to the row's numbers over their scale, which is their
greatest magnitude over 127, and then the four bytes of this float32.
"""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, te, tirx

APPENDED_ROWS = "appended_rows"
"""What the block of such a function is annotated with. Its parameters are past, new, before and result."""
PEAKS_OF_ROWS = "peaks_of_rows"
"""The block in front of it where rows are rounded to integers."""
SCALE_BYTES = 4
"""Behind each row of integers."""
MOST_CODE = 127


def appended_rows(past: te.Tensor, new: te.Tensor, before: te.Tensor) -> te.Tensor:
    """past [batch, heads, positions, depth], new [batch, heads, length, depth], before [batch, 1, 1, 1]."""
    length = int(new.shape[2])

    def element(b: te.Var, h: te.Var, p: te.Var, d: te.Var) -> te.Expr:
        row = p.astype("int64") - before[b, 0, 0, 0].astype("int64")
        is_new = tirx.all(row >= 0, row < length)
        place = tirx.max(tirx.min(row, te.const(length - 1, "int64")), te.const(0, "int64"))
        return tirx.Select(is_new, new[b, h, place, d], past[b, h, p, d])

    return te.compute(past.shape, element, name=APPENDED_ROWS, attrs={"operator": APPENDED_ROWS})


def appended_integer_rows(past: te.Tensor, new: te.Tensor, before: te.Tensor) -> te.Tensor:
    """past int8 [batch, heads, positions, depth + SCALE_BYTES], the others as in `appended_rows`; `new` may
    be 16-bit floats."""
    batch, heads, length, depth = (int(extent) for extent in new.shape)

    def wide(number: te.Expr) -> te.Expr:
        return number if str(new.dtype) == "float32" else number.astype("float32")

    column = te.reduce_axis((0, tirx.IntImm("int64", depth)), "column")
    peaks = te.compute(
        [tirx.IntImm("int64", extent) for extent in (batch, heads, length)],
        lambda b, h, r: te.max(tirx.abs(wide(new[b, h, r, column])), axis=column),
        name=PEAKS_OF_ROWS,
        attrs={"operator": PEAKS_OF_ROWS},
    )

    def element(b: te.Var, h: te.Var, p: te.Var, j: te.Var) -> te.Expr:
        row = p.astype("int64") - before[b, 0, 0, 0].astype("int64")
        place = tirx.max(tirx.min(row, te.const(length - 1, "int64")), te.const(0, "int64"))
        peak, most = peaks[b, h, place], te.const(float(MOST_CODE), "float32")
        number = wide(new[b, h, place, tirx.min(j, te.const(depth - 1, "int64"))])
        code = tirx.Select(peak > te.const(0.0, "float32"), number * (most / peak), te.const(0.0, "float32"))
        bits = tirx.reinterpret("uint32", peak / most)
        byte = bits >> (tirx.max(j - te.const(depth, "int64"), te.const(0, "int64")) * 8).astype("uint32")
        made = tirx.Select(
            j < te.const(depth, "int64"), tirx.nearbyint(code).astype("int8"), byte.astype("int8")
        )
        return tirx.Select(tirx.all(row >= 0, row < length), made, past[b, h, p, j])

    return te.compute(past.shape, element, name=APPENDED_ROWS, attrs={"operator": APPENDED_ROWS})


def is_appended_rows(function: tirx.PrimFunc) -> bool:
    """Whether a function that is not scheduled yet is one of these, of any type, and nothing else."""
    return _operators(function) in ([APPENDED_ROWS], [PEAKS_OF_ROWS, APPENDED_ROWS])


def rounds_rows(function: tirx.PrimFunc) -> bool:
    """Whether such a function rounds its rows to integers."""
    return PEAKS_OF_ROWS in _operators(function)


def _operators(function: tirx.PrimFunc) -> list[object]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, found.append))
    return [block.annotations.get("operator") for block in found if block.iter_vars]
