"""Values in another type of floating point numbers."""

from __future__ import annotations

import numpy as np
from tvm import ir, tirx


def converted(value: ir.Expr, dtype: str) -> ir.Expr:
    """A value in another type; as it was read where it is only moved."""
    if str(value.ty.dtype).partition("x")[0] == dtype:
        return value
    lanes = str(value.ty.dtype).partition("x")[2]
    wanted = f"{dtype}x{lanes}" if lanes else dtype
    if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == wanted:
        return value.value
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm(dtype, float(np.asarray(value.value).astype(dtype)))
    if isinstance(value, tirx.Select):
        branches = converted(value.true_value, dtype), converted(value.false_value, dtype)
        return tirx.Select(value.condition, *branches)
    if isinstance(value, ir.Call) and value.op.name.rpartition(".")[2] == "if_then_else":
        condition, *values = value.args
        return tirx.if_then_else(condition, *(converted(v, dtype) for v in values))
    return tirx.Cast(wanted, value)
