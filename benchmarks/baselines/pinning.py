"""What stays in the GPU's memory: the pinning problem by itself.

Each tensor has a lifetime in steps, a size, and a value, the time that is saved if it is pinned: stays in
memory throughout. At every step the pinned tensors must fit the capacity. With one step this is the
knapsack problem; with lifetimes that are nested or apart, as forward and backward pass make them, it is
solved to optimality in pseudo-polynomial time by a dynamic programme over the tree of lifetimes. Overlaps
in general make it the unsplittable flow problem on a line, whose linear programme is nearly whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from hybridc.passes.planner.bounds.linear import LinearProgramme, Vector, minimise

LARGEST_TABLE = 20_000_000
"""Entries, tensors times units of capacity, up to which the dynamic programme is chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that may be pinned from step `first` to step `last`, both included."""

    first: int
    last: int
    size_bytes: int
    value: float


@dataclass(frozen=True, slots=True)
class Pinning:
    """Which candidates are pinned, what that is worth, and what no choice exceeds."""

    pinned: tuple[bool, ...]
    value: float
    bound: float


def pin(candidates: Sequence[Candidate], capacity_bytes: Sequence[int]) -> Pinning:
    """Choose by the dynamic programme where it applies and is small enough, else by the linear programme.

    `capacity_bytes` is per step. Requires: lifetimes lie within the steps; values are not negative.
    """
    unit = _unit_bytes(candidates)
    entries = len(candidates) * (max(capacity_bytes, default=0) // unit + 1)
    if are_nested(candidates) and entries <= LARGEST_TABLE:
        return pin_nested(candidates, capacity_bytes)
    return pin_by_rounding(candidates, capacity_bytes)


def are_nested(candidates: Sequence[Candidate]) -> bool:
    """Whether any two lifetimes are apart or one within the other."""
    open_until: list[int] = []
    for candidate in sorted(candidates, key=lambda c: (c.first, -c.last)):
        while open_until and open_until[-1] < candidate.first:
            open_until.pop()
        if open_until and open_until[-1] < candidate.last:
            return False
        open_until.append(candidate.last)
    return True


def pin_nested(candidates: Sequence[Candidate], capacity_bytes: Sequence[int]) -> Pinning:
    """The optimum for nested lifetimes. Time and space grow with candidates times units of capacity.

    `best[u]` of a tensor is the most that it and all within its lifetime are worth if those around it take
    u units: without it the sum of its children's `best[u]`, with it its value and the sum of their
    `best[u + size]`, as long as that fits every step of its lifetime.
    """
    unit = _unit_bytes(candidates)
    largest = max(capacity_bytes, default=0) // unit
    children, roots = _tree(candidates)
    best: dict[int, Vector] = {}
    within: dict[int, Vector] = {}
    for index in _children_first(children, roots):
        candidate = candidates[index]
        below = np.zeros(largest + 1)
        for child in children[index]:
            below += best.pop(child)
        size = candidate.size_bytes // unit
        room = min(capacity_bytes[candidate.first : candidate.last + 1]) // unit - size
        taken = np.full(largest + 1, -np.inf)
        if room >= 0:
            taken[: room + 1] = candidate.value + below[size : size + room + 1]
        within[index] = taken - below
        best[index] = np.maximum(below, taken)
    value = float(sum(best[root][0] for root in roots))
    pinned = [False] * len(candidates)
    todo = [(root, 0) for root in roots]
    while todo:
        index, used = todo.pop()
        pinned[index] = bool(within[index][used] > 0)
        used += candidates[index].size_bytes // unit if pinned[index] else 0
        todo += [(child, used) for child in children[index]]
    return Pinning(tuple(pinned), value, value)


def pin_by_rounding(candidates: Sequence[Candidate], capacity_bytes: Sequence[int]) -> Pinning:
    """A choice for any lifetimes, and the linear programme's bound on all choices.

    Fractions are rounded by taking candidates with the largest first, then those worth most a byte, as far
    as they fit.
    """
    lp = LinearProgramme()
    scale = max(max(capacity_bytes, default=0), 1)
    free = np.array(capacity_bytes, np.int64)
    fits = [bool(free[c.first : c.last + 1].min() >= c.size_bytes) for c in candidates]
    variables = [lp.variable(0, float(fit), -c.value) for c, fit in zip(candidates, fits, strict=True)]
    alive: list[list[int]] = [[] for _ in capacity_bytes]
    for index, candidate in enumerate(candidates):
        for step in range(candidate.first, candidate.last + 1):
            alive[step].append(index)
    for step, indices in enumerate(alive):
        if sum(candidates[i].size_bytes for i in indices) > capacity_bytes[step]:
            terms = [(variables[i], candidates[i].size_bytes / scale) for i in indices]
            lp.at_most(terms, capacity_bytes[step] / scale)
    found = minimise(lp)
    share = found.values if found.values.size else np.zeros(len(candidates))
    worth = [c.value / max(c.size_bytes, 1) for c in candidates]
    pinned = [False] * len(candidates)
    for index in sorted(range(len(candidates)), key=lambda i: (-round(float(share[i]), 3), -worth[i], i)):
        span = slice(candidates[index].first, candidates[index].last + 1)
        if fits[index] and free[span].min() >= candidates[index].size_bytes:
            free[span] -= candidates[index].size_bytes
            pinned[index] = True
    value = sum(c.value for c, taken in zip(candidates, pinned, strict=True) if taken)
    return Pinning(tuple(pinned), value, max(value, -found.bound))


def _unit_bytes(candidates: Sequence[Candidate]) -> int:
    """What all sizes are multiples of."""
    return gcd(*(c.size_bytes for c in candidates)) or 1


def _tree(candidates: Sequence[Candidate]) -> tuple[list[list[int]], list[int]]:
    """`(children, roots)`: each candidate below the shortest lifetime around it."""
    if not are_nested(candidates):
        raise ValueError("lifetimes overlap without being nested")
    children: list[list[int]] = [[] for _ in candidates]
    roots: list[int] = []
    around: list[int] = []
    for index in sorted(range(len(candidates)), key=lambda i: (candidates[i].first, -candidates[i].last)):
        while around and candidates[around[-1]].last < candidates[index].first:
            around.pop()
        (children[around[-1]] if around else roots).append(index)
        around.append(index)
    return children, roots


def _children_first(children: Sequence[Sequence[int]], roots: Sequence[int]) -> list[int]:
    order = list(roots)
    for index in order:  # grows meanwhile
        order.extend(children[index])
    return order[::-1]
