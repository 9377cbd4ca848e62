"""Packing blocks with known lifetimes: sound, deterministic, and as small as can be."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridc.passes.planner.emit import offsets as offsets_module
from hybridc.passes.planner.emit.offsets import MemoryBlock, live_bound, pack
from tests.support.minimalloc import capacity_bytes, instance_files, read_blocks
from tests.support.random_examples import random_examples

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the search is built by g++")

LONG_INSTANCES = ("D", "F", "J", "K")


@pytest.fixture(params=["search", "repair"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The search, or what takes its place where it cannot be built."""
    if request.param == "repair":
        monkeypatch.setattr(offsets_module, "build_library", lambda source, name: None)
    elif shutil.which("g++") is None:
        pytest.skip("the search is built by g++")
    return request.param


def blocks(most: int, steps: int, sizes: int) -> st.SearchStrategy[list[MemoryBlock]]:
    def block(size_bytes: int, first: int, more: int) -> MemoryBlock:
        return MemoryBlock(size_bytes, first, first + more)

    one = st.builds(block, st.integers(0, sizes), st.integers(-1, steps), st.integers(0, steps // 2))
    return st.lists(one, max_size=most)


def total_bytes(blocks: Sequence[MemoryBlock], offsets: Sequence[int]) -> int:
    return max((o + b.size_bytes for o, b in zip(offsets, blocks, strict=True)), default=0)


def overlaps(blocks: Sequence[MemoryBlock], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of blocks that are live together and share a byte."""
    return [
        (i, j)
        for i, one in enumerate(blocks)
        for j, other in enumerate(blocks[:i])
        if one.first <= other.last and other.first <= one.last
        if offsets[i] < offsets[j] + other.size_bytes and offsets[j] < offsets[i] + one.size_bytes
    ]


def smallest_total_bytes(blocks: Sequence[MemoryBlock]) -> int:
    """By trying every order: some smallest packing has each block on the ground or on another one."""

    def stacked(order: Sequence[MemoryBlock]) -> int:
        ends: list[int] = []
        for i, block in enumerate(order):
            below = (
                ends[j] for j, b in enumerate(order[:i]) if b.first <= block.last and block.first <= b.last
            )
            ends.append(max(below, default=0) + block.size_bytes)
        return max(ends, default=0)

    return min(stacked(order) for order in permutations(blocks))


quick = random_examples(60)


@quick
@given(blocks=blocks(most=60, steps=20, sizes=40))
def test_blocks_live_together_share_no_byte(way: str, blocks: list[MemoryBlock]) -> None:
    offsets = pack(blocks)
    assert len(offsets) == len(blocks)
    assert all(offset >= 0 for offset in offsets)
    assert overlaps(blocks, offsets) == []
    assert total_bytes(blocks, offsets) >= live_bound(blocks)


@quick
@given(blocks=blocks(most=40, steps=12, sizes=60))
def test_same_blocks_same_offsets(way: str, blocks: list[MemoryBlock]) -> None:
    assert pack(blocks) == pack(list(blocks))


@needs_compiler
@random_examples(150)
@given(blocks=blocks(most=6, steps=6, sizes=12))
def test_few_blocks_are_packed_as_small_as_any_order_packs_them(blocks: list[MemoryBlock]) -> None:
    assert total_bytes(blocks, pack(blocks)) == smallest_total_bytes(blocks)


@needs_compiler
def test_blocks_that_cannot_be_packed_within_the_live_bound_end_at_the_optimum() -> None:
    lives = [(3, 0, 0), (2, 0, 1), (1, 0, 4), (1, 1, 3), (1, 1, 2), (1, 1, 2), (1, 2, 3), (1, 2, 2)]
    blocks = [MemoryBlock(*life) for life in (*lives, (3, 3, 4), (2, 4, 4))]
    assert live_bound(blocks) == 6
    assert total_bytes(blocks, pack(blocks)) == 7


def test_packing_within_the_capacity_is_good_enough(way: str) -> None:
    blocks = read_blocks(instance_files()[0])
    roomy = 2 * capacity_bytes(instance_files()[0])
    assert live_bound(blocks) < total_bytes(blocks, pack(blocks, roomy)) <= roomy


def test_capacity_below_the_live_bound_gives_a_packing_all_the_same(way: str) -> None:
    blocks = read_blocks(instance_files()[0])
    offsets = pack(blocks, 1)
    assert overlaps(blocks, offsets) == []
    assert offsets == pack(blocks)


def test_capacity_counts_blocks_that_are_held_all_the_time() -> None:
    path = instance_files()[1]
    steps = [step for b in read_blocks(path) for step in (b.first, b.last)]
    blocks = [*read_blocks(path), MemoryBlock(512, min(steps), max(steps))]
    assert total_bytes(blocks, pack(blocks, capacity_bytes(path) + 512)) <= capacity_bytes(path) + 512


def test_blocks_held_all_the_time_are_at_the_bottom_in_their_order() -> None:
    assert pack([MemoryBlock(5, 1, 2), MemoryBlock(3, 0, 9), MemoryBlock(4, 0, 9)]) == (7, 0, 3)


def test_more_blocks_than_the_search_takes_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets_module, "_MOST_SEARCHED", 100)
    blocks = read_blocks(instance_files()[0])
    assert overlaps(blocks, pack(blocks)) == []


def test_nothing_to_pack() -> None:
    assert pack([]) == ()
    assert pack([MemoryBlock(0, 0, 3), MemoryBlock(0, 1, 2)]) == (0, 0)


@needs_compiler
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=pytest.mark.slow if path.name[0] in LONG_INSTANCES else ())
        for path in instance_files()
    ],
)
def test_hard_instance_is_packed_within_its_capacity(path: Path) -> None:
    blocks = read_blocks(path)
    offsets = pack(blocks, capacity_bytes(path))
    assert overlaps(blocks, offsets) == []
    assert total_bytes(blocks, offsets) <= capacity_bytes(path)
