"""What two lanes lose to each other, as rows of the relaxation.

While a kernel runs beside a copy to the GPU and both demand more of a memory than it reaches, each keeps a
share r of its speed (`emit/replay.py`). Weigh the kernel's own time with w = 1 - v + (1/r - 1) and the copy's
with v: one alone gets at most max(w, v) <= 1 done in a unit of time, both together r (w + v) = 1. So a window
of time is at least as long as the weighted work of both lanes in it, for every v from 1/r - 1 to 1. Without
the loss this is a mean of what both lanes say, which is nothing new.

A smaller copy demands less, as its latency counts: with a share s of the link's bandwidth, of which a memory
reaches 1/c, the weight that keeps the sum is v - c (1 - s). Its bytes then weigh (v - c (1 - s)) / s at the
link's bandwidth, least where s is largest. So all bytes may weigh v - c (1 - s) of the largest copy.

Windows reach from one cut to another, as all kernels between two cuts run between their ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile

from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.structure import cuts

_WEIGHTS = (0.5, 0.75)
"""Of copies, beside the least: any number gives a bound."""
_NEAR = 0.85
"""The share of the link's bandwidth that the largest copy has at least; else there are no rows."""


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """Weights of the work of a device's kernels and of copies to the GPU, between two cuts."""

    first: int | None
    """The cut at whose end it begins; None: the run's begin."""
    last: int
    """The cut at whose start it ends; the number of kernels: the run's end."""
    on_gpu: bool
    """Which device's kernels are meant."""
    weights: tuple[tuple[int, float], ...]
    """Kernels between both, each with the weight of its time."""
    copies: float
    """Weight of the time that bytes take at the rate of the largest copy."""


def shared_windows(problem: Problem) -> Iterator[SharedWindow]:
    """Those in which something may be lost."""
    share = _largest_share(problem)
    if share < _NEAR:
        return
    bounds = [-1, *cuts(problem), problem.kernel_count]
    spans = list(_spans(len(bounds)))
    contention = problem.contention
    for on_gpu, shares, demand in (
        (True, contention.gpu, contention.gpu_copy),
        (False, contention.cpu, contention.cpu_copy),
    ):
        lost = [1 / math.sqrt(share.h2d) - 1 for share in shares]
        for begin, end in spans:
            inside = range(bounds[begin] + 1, bounds[end])
            if not any(lost[k] for k in inside):
                continue
            for copies in (demand, *(weight for weight in _WEIGHTS if weight > demand)):
                yield SharedWindow(
                    None if begin == 0 else bounds[begin],
                    bounds[end],
                    on_gpu,
                    tuple((k, 1 - copies + lost[k]) for k in inside),
                    copies - demand * (1 - share),
                )


def _largest_share(problem: Problem) -> float:
    """Of the link's bandwidth, that the largest copy has."""
    h2d_gb_s = problem.contention.h2d_gb_s
    rates = (size / (us * 1e3) for size, us in zip(problem.size_bytes, problem.h2d_us, strict=True) if us > 0)
    return min(1.0, max(rates, default=0.0) / h2d_gb_s) if h2d_gb_s > 0 else 0.0


def _spans(bounds: int) -> Iterator[tuple[int, int]]:
    """Windows by the positions of their bounds: of one, two, four, ... of them, overlapping by a half.

    All would be a quadratic number.
    """
    last = bounds - 1
    for length in takewhile(lambda length: length < last, (1 << n for n in count())):
        for begin in range(0, last, max(1, length // 2)):
            yield begin, min(begin + length, last)
    yield 0, last
