"""Offsets for blocks of memory with known lifetimes: dynamic storage allocation, offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

_REPAIR_ROUNDS = 24
"""How often the blocks that stand highest are put first; later rounds rarely help."""

_SEARCH_PLACEMENTS = 60_000
"""Blocks placed by the local search in all: about 50 ms."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes held from the begin of step `first` to the end of step `last`, both included."""

    size_bytes: int
    first: int
    last: int


def live_bound(blocks: Sequence[Block]) -> int:
    """The largest sum of sizes that are live at one step: no packing can be smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.first] = change.get(block.first, 0) + block.size_bytes
        change[block.last + 1] = change.get(block.last + 1, 0) - block.size_bytes
    live = largest = 0
    for step in sorted(change):
        live += change[step]
        largest = max(largest, live)
    return largest


def pack(blocks: Sequence[Block]) -> tuple[int, ...]:
    """An offset for each block, so that blocks with a common step share no byte.

    Blocks held all the time, such as weights, are stacked at the bottom, which costs nothing; the
    others go on top of them.
    """
    begin = min((b.first for b in blocks), default=0)
    end = max((b.last for b in blocks), default=0)
    offsets = [0] * len(blocks)
    floor, passing = 0, list[int]()
    for i, block in enumerate(blocks):
        if block.first == begin and block.last == end:
            offsets[i] = floor
            floor += block.size_bytes
        else:
            passing.append(i)
    for i, offset in zip(passing, _pack_passing([blocks[i] for i in passing]), strict=True):
        offsets[i] = floor + offset
    return tuple(offsets)


def _pack_passing(blocks: Sequence[Block]) -> list[int]:
    """The best of several packings; ends as soon as one meets the live bound.

    The problem is NP-hard. Blocks are put one after the other into the tightest hole, in several
    orders (Pisarchyk and Lee, arXiv 2001.03288: by size; also by lifetime, by area, by begin), and
    then what stands highest is put first and all is packed again, as in squeaky wheel optimisation
    (Joslin and Clements, JAIR 10, 1999). A short local search comes last.
    """
    bound = live_bound(blocks)
    conflicts = _conflicts(blocks)
    best: list[int] = []
    best_total = -1
    for order in _orders(blocks):
        offsets = _best_fit(blocks, order, conflicts)
        total = _total(blocks, offsets)
        if best_total < 0 or total < best_total:
            best, best_total, best_order = offsets, total, order
        if best_total <= bound:
            return best
    offsets, order = best, best_order
    for _ in range(_REPAIR_ROUNDS):
        top = _total(blocks, offsets)
        order = sorted(order, key=lambda i: offsets[i] + blocks[i].size_bytes < top)
        offsets = _best_fit(blocks, order, conflicts)
        total = _total(blocks, offsets)
        if total < best_total:
            best, best_total, best_order = offsets, total, order
        if best_total <= bound:
            return best
    return _search(blocks, conflicts, best_order, bound)


def _search(
    blocks: Sequence[Block], conflicts: Sequence[Sequence[int]], order: list[int], bound: int
) -> list[int]:
    """Local search over orders: move one block to another place, keep what is no worse."""
    random = Random(0)
    best = _best_fit(blocks, order, conflicts)
    best_total = _total(blocks, best)
    for _ in range(_SEARCH_PLACEMENTS // len(blocks)):
        if best_total <= bound:
            break
        changed = list(order)
        changed.insert(random.randrange(len(order)), changed.pop(random.randrange(len(order))))
        offsets = _best_fit(blocks, changed, conflicts)
        total = _total(blocks, offsets)
        if total <= best_total:
            order, best, best_total = changed, offsets, total
    return best


def _orders(blocks: Sequence[Block]) -> Iterator[list[int]]:
    for key in _ORDERS:
        yield sorted(range(len(blocks)), key=lambda i: (key(blocks[i]), i))


_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda b: (-b.size_bytes, b.first),
    lambda b: (b.first - b.last, -b.size_bytes),
    lambda b: (-b.size_bytes * (b.last - b.first + 1), b.first),
    lambda b: (b.first, b.first - b.last, -b.size_bytes),
    lambda b: (-b.last, b.first - b.last, -b.size_bytes),
)


def _total(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def _conflicts(blocks: Sequence[Block]) -> list[list[int]]:
    """For each block the blocks live at a common step, found by a sweep over the first steps."""
    found: list[list[int]] = [[] for _ in blocks]
    live: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].first):
        live = [j for j in live if blocks[j].last >= blocks[i].first]
        for j in live:
            found[i].append(j)
            found[j].append(i)
        live.append(i)
    return found


def _best_fit(blocks: Sequence[Block], order: Sequence[int], conflicts: Sequence[Sequence[int]]) -> list[int]:
    """Put each block into the smallest hole that takes it, or on top of what it conflicts with."""
    offsets = [-1] * len(blocks)
    ends = [0] * len(blocks)
    for i in order:
        size = blocks[i].size_bytes
        top, best, best_hole = 0, -1, -1
        for start, end in sorted((offsets[j], ends[j]) for j in conflicts[i] if offsets[j] >= 0):
            hole = start - top
            if hole >= size and (best < 0 or hole < best_hole):
                best, best_hole = top, hole
            top = max(top, end)
        offsets[i] = top if best < 0 else best
        ends[i] = offsets[i] + size
    return offsets
