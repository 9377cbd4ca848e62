"""Offsets for blocks of memory with known lifetimes: dynamic storage allocation, offline."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from random import Random

from hybridc.native import build_library

_SOURCE = Path(__file__).parent / "native" / "offsets.cpp"

_CAPACITY_EFFORT = 1_000_000_000
"""Blocks looked at in search of a packing within a given capacity: up to some fifteen seconds."""

_BOUND_EFFORT = 50_000_000
"""The same within the live bound, which may be out of reach: up to one second."""

_STEP_EFFORT = 30_000_000
"""The same for each step between what was not reached and what was found."""

_PRECISION = 1000
"""Steps end when what was not reached and what was found differ by less than one in so many."""

# Of the repair alone, which takes the place of the search where that cannot be built.
_REPAIR_ROUNDS = 24
"""How often the blocks that stand highest are put first; later rounds rarely help."""

_LOCAL_PLACEMENTS = 60_000
"""Blocks placed by the local search in all: about 50 ms."""

_MOST_SEARCHED = 10_000
"""Blocks that the search takes: it is recursive, and the stack is finite."""

_PACKED = 1
"""Returned by the search if it wrote offsets."""


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """Bytes held from the begin of step `first` to the end of step `last`, both included."""

    size_bytes: int
    first: int
    last: int


def live_bound(blocks: Sequence[MemoryBlock]) -> int:
    """The largest sum of sizes that are live at one step: no packing can be smaller."""
    # differences at the steps where something changes; an interval ends after its last step
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first] = change.get(block.first, 0) + block.size_bytes
        change[block.last + 1] = change.get(block.last + 1, 0) - block.size_bytes
    live = largest = 0
    for step in sorted(change):
        live += change[step]
        largest = max(largest, live)
    return largest


def pack(
    blocks: Sequence[MemoryBlock], capacity_bytes: int | None = None, effort: float = 1.0
) -> tuple[int, ...]:
    """An offset for each block, so that blocks with a common step share no byte.

    Ends as soon as all blocks lie within `capacity_bytes`, or, without it, within the live bound; if
    no such packing is found, gives the smallest one that was. `effort` below one searches for less long
    than some seconds. Blocks held all the time, such as weights, are stacked at the bottom, which costs
    nothing; the others go on top of them. Offline dynamic storage allocation, which is NP-hard (Garey and
    Johnson 1979, problem SR2): best fit in several orders, then a complete search that is cut short.
    """
    begin = min((b.first for b in blocks), default=0)
    end = max((b.last for b in blocks), default=0)
    offsets = [0] * len(blocks)
    floor, passing = 0, list[int]()
    for i, block in enumerate(blocks):
        if block.first == begin and block.last == end:
            offsets[i] = floor
            floor += block.size_bytes
        # empty ones may lie anywhere, and stay at offset 0
        elif block.size_bytes > 0:
            passing.append(i)
    packed = _pack_passing([blocks[i] for i in passing], (capacity_bytes or 0) - floor, effort)
    for i, offset in zip(passing, packed, strict=True):
        offsets[i] = floor + offset
    return tuple(offsets)


def _pack_passing(blocks: Sequence[MemoryBlock], capacity_bytes: int, effort: float) -> list[int]:
    """The best of several packings; ends as soon as one meets the capacity, or the live bound if larger.

    The problem is NP-hard. Blocks are put one after the other into the tightest hole, in several
    orders (Pisarchyk and Lee, arXiv 2001.03288: by size; also by lifetime, by area, by begin). If no
    order will do, a search for a packing within given bytes comes next: complete, but cut short. Where
    it cannot be built, the orders are repaired instead.
    """
    if not blocks:
        return []
    bound = live_bound(blocks)
    # below the live bound nothing is to be found
    goal = max(bound, capacity_bytes)
    library = build_library(_SOURCE, "offsets")
    place = _placer(library, blocks)
    best: _Packing | None = None
    # the orders take milliseconds: the search below is for what none of them packs
    for key in _ORDERS:
        # ties by position, so that the result does not depend on the platform
        order = sorted(range(len(blocks)), key=lambda i: (key(blocks[i]), i))
        found = place(order)
        if best is None or found.total_bytes < best.total_bytes:
            best = found
        if best.total_bytes <= goal:
            return best.offsets
    assert best is not None
    if library is None or len(blocks) > _MOST_SEARCHED:
        return _repair(blocks, place, best, goal, effort).offsets
    # a capacity that may be reached is worth more than a bound that may not
    most = _CAPACITY_EFFORT if capacity_bytes >= bound else _BOUND_EFFORT
    found_offsets = _search_within(library, blocks, goal, int(most * effort))
    return found_offsets or _approach(library, blocks, best, goal, int(_STEP_EFFORT * effort))


def _approach(
    library: ctypes.CDLL, blocks: Sequence[MemoryBlock], best: _Packing, missed_bytes: int, effort: int
) -> list[int]:
    """The smallest packing that short searches find, by bisection between what was missed and the best."""
    offsets, total_bytes = best.offsets, best.total_bytes
    while total_bytes - missed_bytes > max(1, total_bytes // _PRECISION):
        # what is missed was not found with this effort; that is no proof
        middle = (missed_bytes + total_bytes) // 2
        found = _search_within(library, blocks, middle, effort)
        if found is None:
            missed_bytes = middle
        else:
            offsets, total_bytes = found, _total(blocks, found)
    return offsets


def _search_within(
    library: ctypes.CDLL, blocks: Sequence[MemoryBlock], capacity_bytes: int, effort: int
) -> list[int] | None:
    """Offsets within the capacity, or None if there are none or the effort does not suffice."""
    vector = ctypes.c_int64 * len(blocks)
    offsets = vector()
    outcome = library.hybridc_pack(
        len(blocks),
        vector(*(b.size_bytes for b in blocks)),
        vector(*(b.first for b in blocks)),
        vector(*(b.last for b in blocks)),
        ctypes.c_int64(capacity_bytes),
        ctypes.c_int64(effort),
        offsets,
    )
    return list(offsets) if outcome == _PACKED else None


def _repair(
    blocks: Sequence[MemoryBlock], place: _Place, best: _Packing, goal: int, effort: float
) -> _Packing:
    """Put first what stands highest and pack again, as in squeaky wheel optimisation (Joslin and
    Clements, JAIR 10, 1999); then a local search over orders moves one block to another place.
    """
    found = best
    for _ in range(ceil(_REPAIR_ROUNDS * effort)):
        ends = [o + b.size_bytes for o, b in zip(found.offsets, blocks, strict=True)]
        order = sorted(found.order, key=lambda i: ends[i] < found.total_bytes)
        found = place(order)
        if found.total_bytes < best.total_bytes:
            best = found
        if best.total_bytes <= goal:
            return best
    # seeded: the same blocks get the same offsets everywhere
    random = Random(0)
    for _ in range(int(_LOCAL_PLACEMENTS * effort) // len(blocks)):
        order = list(best.order)
        # also to equally good orders: a plateau is left that way
        order.insert(random.randrange(len(order)), order.pop(random.randrange(len(order))))
        found = place(order)
        if found.total_bytes <= best.total_bytes:
            best = found
        if best.total_bytes <= goal:
            break
    return best


@dataclass(frozen=True, slots=True)
class _Packing:
    order: list[int]
    """In which the blocks were placed."""
    offsets: list[int]
    total_bytes: int


_Place = Callable[[list[int]], _Packing]
"""Places blocks in the given order, one after the other."""

_ORDERS: tuple[Callable[[MemoryBlock], tuple[int, ...]], ...] = (
    lambda b: (-b.size_bytes, b.first),  # by size
    lambda b: (b.first - b.last, -b.size_bytes),  # by lifetime
    lambda b: (-b.size_bytes * (b.last - b.first + 1), b.first),  # by area
    lambda b: (b.first, b.first - b.last, -b.size_bytes),  # by begin
    lambda b: (-b.last, b.first - b.last, -b.size_bytes),  # by end, from behind
)


def _total(blocks: Sequence[MemoryBlock], offsets: Sequence[int]) -> int:
    return max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def _placer(library: ctypes.CDLL | None, blocks: Sequence[MemoryBlock]) -> _Place:
    """Best fit, in C++ if it can be built: the results are the same."""
    if library is None:
        return partial(_best_fit, blocks, conflicts=_conflicts(blocks))
    count = len(blocks)
    vector = ctypes.c_int64 * count
    sizes, firsts, lasts = (
        vector(*values) for values in zip(*((b.size_bytes, b.first, b.last) for b in blocks), strict=True)
    )

    def place(order: list[int]) -> _Packing:
        offsets = vector()
        numbers = (ctypes.c_int * count)(*order)
        total_bytes = library.hybridc_best_fit(count, sizes, firsts, lasts, numbers, offsets)
        return _Packing(order, list(offsets), total_bytes)

    library.hybridc_best_fit.restype = ctypes.c_int64
    return place


def _conflicts(blocks: Sequence[MemoryBlock]) -> list[list[int]]:
    """For each block the blocks live at a common step, found by a sweep over the first steps."""
    found: list[list[int]] = [[] for _ in blocks]
    live: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].first):
        # those that ended before this one begins conflict with nothing later
        live = [j for j in live if blocks[j].last >= blocks[i].first]
        for j in live:
            found[i].append(j)
            found[j].append(i)
        live.append(i)
    return found


def _best_fit(
    blocks: Sequence[MemoryBlock], order: list[int], conflicts: Sequence[Sequence[int]]
) -> _Packing:
    """Put each block into the smallest hole that takes it, or on top of what it conflicts with."""
    offsets = [-1] * len(blocks)
    ends = [0] * len(blocks)
    for i in order:
        size = blocks[i].size_bytes
        top, best, best_hole = 0, -1, -1
        # holes between the blocks that are placed and live together with this one
        for start, end in sorted((offsets[j], ends[j]) for j in conflicts[i] if offsets[j] >= 0):
            hole = start - top
            # the tightest hole leaves the large ones for large blocks
            if hole >= size and (best < 0 or hole < best_hole):
                best, best_hole = top, hole
            top = max(top, end)
        offsets[i] = top if best < 0 else best
        ends[i] = offsets[i] + size
    return _Packing(order, offsets, max(ends, default=0))
