"""Max pooling of blocked activations with the indices of the maxima, for training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import te, tirx

from hybridc.schedules.blocked_operators import extents, sum_over


def blocked_max_pool_with_indices(
    data: Sequence[int], positions: Sequence[int], window: Sequence[Sequence[int]], index_dtype: str
) -> tirx.PrimFunc:
    """`[N, CB, H, W, c]` to the maxima `[N, CB, Y, X, c]` and the number of each first maximum's tap.

    `window` is taps, strides, padding before the data and dilation of both axes. Padding never wins; a NaN
    does.
    """
    x = te.placeholder(extents(*data), "float32", "data")
    taps, strides, before, dilation = window
    lowest = tirx.const(-math.inf, "float32")
    a, b = (sum_over(k, name) for k, name in zip(taps, ("a", "b"), strict=True))

    def later_wins(first: Sequence[tirx.Expr], later: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        wins = tirx.any(later[0] > first[0], later[0] != later[0])
        return [tirx.Select(wins, new, old) for new, old in zip(later, first, strict=True)]

    first_maximum = te.comm_reducer(
        later_wins, lambda value, index: (lowest, tirx.const(0, index)), name="first_maximum"
    )

    def at(n: te.Var, cb: te.Var, y: te.Var, z: te.Var, c: te.Var) -> te.Expr:
        row = y * strides[0] - before[0] + a * dilation[0]
        column = z * strides[1] - before[1] + b * dilation[1]
        inside = [row >= 0, row < data[2], column >= 0, column < data[3]]
        value = tirx.if_then_else(tirx.all(*inside), x[n, cb, row, column, c], lowest)
        return first_maximum((value, (a * taps[1] + b).astype(index_dtype)), axis=[a, b])

    attributes = {"operator": "max_pool", "taps": list(taps), "strides": list(strides)}
    attributes |= {"before": list(before), "dilation": list(dilation)}
    shape = extents(data[0], data[1], *positions, data[4])
    values, indices = te.compute(shape, at, name="max_pool", attrs=attributes)
    return te.create_prim_func([x, values, indices]).with_attr("tirx.noalias", True)
