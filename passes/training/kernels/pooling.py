"""Pooling that remembers where the maxima were, and the gradients of pooling; channels on axis 1.

Gradients are written as sums that each element of the data gathers, so that no two threads write one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax, te, tirx

from hybridc.passes.program.program import tensor_dtype
from hybridc.passes.training.gradients import extents, placeholder

WRITTEN_OUT = 9
"""Most windows per element that are written out as a sum; more become a loop. 9 covers 3x3 windows of stride
1."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the windows lie, one number for each spatial axis."""

    taps: tuple[int, ...]
    strides: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    counts_padding: bool
    """Means are divided by the taps in data and padding; what rounding up adds after it never counts."""

    @classmethod
    def of(cls, call: relax.Call) -> Pool:
        """That of a pooling operator."""
        attrs = call.attrs
        rank = len(attrs.pool_size)
        return cls(
            tuple(int(k) for k in attrs.pool_size),
            tuple(int(s) for s in attrs.strides),
            tuple(int(p) for p in attrs.padding)[:rank],
            tuple(int(p) for p in attrs.padding)[rank:],
            tuple(int(d) for d in attrs.dilation),
            bool(attrs.count_include_pad),
        )

    @property
    def index_dtype(self) -> str:
        """Of the number of a tap in its window."""
        return "uint8" if math.prod(self.taps) <= 256 else "int32"

    def attributes(self, operator: str) -> dict[str, object]:
        """For `te.compute`: what a schedule rule reads off the block's annotations."""
        return {
            "operator": operator,
            "taps": list(self.taps),
            "strides": list(self.strides),
            "before": list(self.before),
            "dilation": list(self.dilation),
        }


def max_pool_with_indices(data: relax.Expr, pool: Pool, positions: Sequence[int]) -> tirx.PrimFunc:
    """Data [N, C, X...]: the maxima [N, C, Y...], and the number of the first maximum's tap in its window.

    Padding never wins; a NaN does, as in PyTorch.
    """
    x = placeholder(data, "data")
    dtype = tensor_dtype(data)
    shape = [*x.shape[:2], *extents(positions)]
    taps = [te.reduce_axis((0, tirx.IntImm("int64", k)), f"k{i}") for i, k in enumerate(pool.taps)]
    lowest = tirx.const(-math.inf, dtype)

    def later_wins(first: Sequence[tirx.Expr], later: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        wins = tirx.any(later[0] > first[0], tirx.isnan(later[0]))
        return [tirx.Select(wins, new, old) for new, old in zip(later, first, strict=True)]

    first_maximum = te.comm_reducer(
        later_wins, lambda value, index: (lowest, tirx.const(0, index)), name="first_maximum"
    )

    def body(n: tirx.Var, c: tirx.Var, *at: tirx.Var) -> tirx.Expr:
        source = [
            o * s - b + k * d
            for o, s, b, k, d in zip(at, pool.strides, pool.before, taps, pool.dilation, strict=True)
        ]
        inside = [c for i, extent in zip(source, x.shape[2:], strict=True) for c in (i >= 0, i < extent)]
        value = tirx.if_then_else(tirx.all(*inside), x[(n, c, *source)], lowest)
        return first_maximum((value, _number(taps, pool).astype(pool.index_dtype)), axis=taps)

    values, indices = te.compute(shape, body, name="max_pool", attrs=pool.attributes("max_pool"))
    return te.create_prim_func([x, values, indices])


def max_pool_gradient(indices: relax.Expr, dy: relax.Expr, pool: Pool, shape: Sequence[int]) -> tirx.PrimFunc:
    """Indices and dy [N, C, Y...]: each dy goes to the element that was the maximum of its window."""
    taken, grad = placeholder(indices, "indices"), placeholder(dy, "dy")

    def share(at: tuple[tirx.Expr, ...], taps: Sequence[tirx.Expr]) -> tirx.Expr:
        chosen = taken[at].astype("int64") == _number(taps, pool)
        return tirx.Select(chosen, grad[at], tirx.const(0, grad.dtype))

    out = _gathered(grad, shape, pool, share, "max_pool_gradient")
    return te.create_prim_func([taken, grad, out])


def average_pool_gradient(dy: relax.Expr, pool: Pool, shape: Sequence[int]) -> tirx.PrimFunc:
    """dy [N, C, Y...], spread over the elements that each mean was taken of."""
    grad = placeholder(dy, "dy")

    def share(at: tuple[tirx.Expr, ...], taps: Sequence[tirx.Expr]) -> tirx.Expr:
        counts = [_counted(pool, axis, o, shape[2 + axis], grad) for axis, o in enumerate(at[2:])]
        count = math.prod(counts[1:], start=counts[0])
        if isinstance(count, int):
            return grad[at] * tirx.const(1 / count, grad.dtype)
        return grad[at] / count.astype(grad.dtype)

    out = _gathered(grad, shape, pool, share, "avg_pool_gradient")
    return te.create_prim_func([grad, out])


Share = Callable[["tuple[tirx.Expr, ...]", Sequence[tirx.Expr]], tirx.Expr]
"""(position in dy, taps) -> what a window gives to the element that these taps read."""


def _gathered(grad: te.Tensor, shape: Sequence[int], pool: Pool, share: Share, name: str) -> te.Tensor:
    """The sum of the shares of all windows that an element is in.

    A few are written out: a function without a reduction needs no memory between it and what is fused to it.
    """
    counts = [
        -(-((k - 1) * d + 1) // s) for k, d, s in zip(pool.taps, pool.dilation, pool.strides, strict=True)
    ]
    axes = [te.reduce_axis((0, tirx.IntImm("int64", n)), f"r{i}") for i, n in enumerate(counts)]

    def term(at: Sequence[tirx.Var], windows: Sequence[tirx.Expr | int]) -> tirx.Expr:
        positions, taps, valid = [], [], []
        for axis, i in enumerate(at[2:]):
            stride, dilation = pool.strides[axis], pool.dilation[axis]
            position = tirx.floordiv(i + pool.before[axis], stride) - windows[axis]
            offset = i + pool.before[axis] - position * stride
            tap = offset if dilation == 1 else tirx.floordiv(offset, dilation)
            valid += [position >= 0, position < grad.shape[2 + axis], tap < pool.taps[axis]]
            if dilation > 1:
                valid.append(tirx.floormod(offset, dilation) == 0)
            positions.append(position)
            taps.append(tap)
        zero = tirx.const(0, grad.dtype)
        return tirx.if_then_else(tirx.all(*valid), share((*at[:2], *positions), taps), zero)

    def body(*at: tirx.Var) -> tirx.Expr:
        if math.prod(counts) > WRITTEN_OUT:
            return te.sum(term(at, axes), axis=axes)
        first, *others = (term(at, windows) for windows in itertools.product(*map(range, counts)))
        return sum(others, start=first)

    return te.compute(extents(shape), body, name=name, attrs=pool.attributes(name))


def _number(taps: Sequence[tirx.Expr], pool: Pool) -> tirx.Expr:
    """The number of a tap in its window, in the order of memory."""
    number = taps[0]
    for tap, extent in zip(taps[1:], pool.taps[1:], strict=True):
        number = number * extent + tap
    return number


def _counted(pool: Pool, axis: int, position: tirx.Expr, extent: int, grad: te.Tensor) -> tirx.Expr | int:
    """How many taps of a window a mean is divided by; a number where it is the same for all windows."""
    taps, stride, dilation = pool.taps[axis], pool.strides[axis], pool.dilation[axis]
    low, high = (-pool.before[axis], extent + pool.after[axis]) if pool.counts_padding else (0, extent)
    last_window = (int(grad.shape[2 + axis]) - 1) * stride - pool.before[axis]
    if low <= -pool.before[axis] and last_window + (taps - 1) * dilation < high:
        return taps
    start = position * stride - pool.before[axis]
    if dilation == 1:
        return tirx.min(start + taps, high) - tirx.max(start, low)
    first = tirx.max(tirx.floordiv(low + dilation - 1 - start, dilation), 0)
    last = tirx.min(tirx.floordiv(high - 1 - start, dilation), taps - 1)
    return last - first + 1
