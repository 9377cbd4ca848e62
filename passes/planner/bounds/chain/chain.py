"""A bound on time for networks that are chains of kernels, with every kernel whole on one device.

The linear programme of relaxation.py may run each kernel on both devices in part, and so hides copies behind
work that no plan has. Where kernels follow one another by their data, a dynamic programme over them decides
each kernel as a whole. Its state is how far the link is ahead: `F(v)` is the least time at which copies worth
at least v us of the link lie on the GPU for kernels to come. Between two kernels one can wait, so F grows, by
at most 1 us for 1 us; `Grid` keeps its values at points, and rounds down between them.

What holds for every plan, and so bounds it (k a kernel that every other one leads to or follows from)
  time     k starts when the kernel before has ended and, if that ran on the other device, its results have
           been copied. Kernels between two such form a stage: longest path, and work of each device.
  link     What k reads on the GPU, and is neither resident nor has stayed, was copied before. Copies follow
           one another; those counted are of weights for their first use, of inputs, and of results that come
           back. Copies of small tensors are mostly latency; they are counted in part or not at all.
  memory   While k runs on the GPU: working set + resident weights + results that stay + what lies there for
           later kernels, whole tensors, is at most the budget. That limits how far the link can be ahead.
  resident Plans are told apart by the bytes of their resident weights, and by which of the largest are
           (`Cell`). In a cell the memory that is left is known. That weights are resident with no more than
           its bytes enters by a price for each (Lagrangian relaxation): any price gives a bound.
Cells with the least bounds are divided, as in a branch and bound.

Results of kernels that may run again on the GPU come back for nothing if they do not stay; right after their
first run they take a copy or a second one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from hybridc.passes.planner.bounds.chain.frontier import Vector
from hybridc.passes.planner.bounds.chain.stages import Counted, stages_of
from hybridc.passes.planner.bounds.chain.sweep import Cell, Sweep
from hybridc.passes.planner.model.problem import Problem

# More cells tell plans apart more finely, and each costs a row of every array.
_FIRST_CELLS = 12
_DIVIDED = 8
"""Cells that are divided at a time."""
_FIRST_PRICES, _LATER_PRICES = 10, 6
"""Prices that are tried for a cell, and for a part of one."""
_NARROW = 1 / 8
"""Of the largest weight that a cell leaves open: a cell is halved until its bytes are as narrow as that."""
# Time grows with the stages, and exponentially with the kernels of one that are decided.
_MOST_KERNELS = 400
_LARGEST_STAGE = 12
# far above what thousands of additions of 64-bit floats may be wrong by
_ROUNDING = 1e-9


def is_chain(problem: Problem) -> bool:
    """Whether `chain_time_bound_us` is worth its time: enough kernels that all others come before or after.

    Parallel parts have at most `_LARGEST_STAGE` kernels, and the whole at most `_MOST_KERNELS`.
    """
    stages = stages_of(problem)
    return 0 < problem.kernel_count <= _MOST_KERNELS and max(map(len, stages)) <= _LARGEST_STAGE


def chain_time_bound_us(
    problem: Problem,
    *,
    again: Collection[int] = (),
    divisions: int = 4,
    points: int = 250,
    known_us: float = math.inf,
) -> float:
    """No plan is faster, nor one in which kernels of `again` run again on the GPU. Takes seconds.

    `divisions` times the cells with the least bounds are divided; F has values at `points` points. There is
    no use for a bound above `known_us`, the time of a plan. Deterministic.
    Requires: `is_chain(problem)`; every kernel can run on some device; no kernel stands twice.
    """
    counted = Counted(problem, again)
    most = min(float(problem.budget_bytes), float(sum(map(counted.size, chain(*counted.weights)))))
    edges = np.linspace(0, most, _FIRST_CELLS + 1).tolist() if most else [0.0, 0.0]
    cells = [Cell(least, most) for least, most in pairwise(edges)]
    cells = _priced(counted, cells, points, _FIRST_PRICES)
    for _ in range(divisions):
        cells.sort(key=lambda cell: cell.bound_us)
        if cells[0].bound_us >= known_us:
            break
        parts = [part for cell in cells[:_DIVIDED] for part in _divided(counted, cell)]
        cells = _priced(counted, parts, points, _LATER_PRICES) + cells[_DIVIDED:]
    return min([known_us, *((1 - _ROUNDING) * cell.bound_us for cell in cells)])


def _divided(counted: Counted, cell: Cell) -> list[Cell]:
    """Two cells, or fewer, that have the same plans: halves, or with and without the largest weight."""
    middle = (cell.least_bytes + cell.most_bytes) / 2
    open_weights = [t for t in counted.largest_weights if t not in cell.resident | cell.streamed]
    if not open_weights or cell.most_bytes - cell.least_bytes > _NARROW * counted.size(open_weights[0]):
        return [replace(cell, most_bytes=middle), replace(cell, least_bytes=middle)]
    one = open_weights[0]
    parts = [replace(cell, streamed=cell.streamed | {one})]
    resident = cell.resident | {one}
    resident_bytes = sum(map(counted.size, resident))
    if resident_bytes <= cell.most_bytes:
        parts.append(
            replace(cell, resident=resident, least_bytes=max(cell.least_bytes, float(resident_bytes)))
        )
    return parts


def _priced(counted: Counted, cells: Sequence[Cell], points: int, trials: int) -> list[Cell]:
    """The cells with bounds of good prices, by golden section: a bound is concave in its price."""
    if not cells:
        return []
    sweep = Sweep(counted, cells, points)
    best_price, best = np.zeros(len(cells)), np.array([cell.bound_us for cell in cells])

    def bound(price: Vector) -> Vector:
        nonlocal best, best_price
        value = sweep.run(price)
        best_price = np.where(value > best, price, best_price)
        best = np.maximum(best, value)
        return value

    known = np.array([cell.price for cell in cells])
    section = (math.sqrt(5) - 1) / 2
    low = np.where(known > 0, known / 3, 0.0)
    high = np.where(known > 0, known * 2, 2 * counted.us_per_byte)
    left, right = high - section * (high - low), low + section * (high - low)
    at_left, at_right = bound(left), bound(right)
    for _ in range(trials - 2):
        go_left = at_left > at_right
        low, high = np.where(go_left, low, left), np.where(go_left, right, high)
        new = np.where(go_left, high - section * (high - low), low + section * (high - low))
        value = bound(new)
        left, right = np.where(go_left, new, right), np.where(go_left, left, new)
        at_left, at_right = np.where(go_left, value, at_right), np.where(go_left, at_left, value)
    return [
        replace(cell, price=float(price) or cell.price, bound_us=float(us))
        for cell, price, us in zip(cells, best_price, best, strict=True)
    ]
