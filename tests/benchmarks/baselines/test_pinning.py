"""Which tensors are pinned, against trying all choices."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from benchmarks.baselines.pinning import (
    Candidate,
    Pinning,
    are_nested,
    pin,
    pin_by_rounding,
    pin_nested,
)


def best_value(candidates: list[Candidate], capacity: list[int]) -> float:
    """By brute force."""
    return max(
        sum(c.value for c, taken in zip(candidates, choice, strict=True) if taken)
        for choice in product((False, True), repeat=len(candidates))
        if fits(candidates, choice, capacity)
    )


def fits(candidates: list[Candidate], choice: tuple[bool, ...], capacity: list[int]) -> bool:
    held = [0] * len(capacity)
    for candidate, taken in zip(candidates, choice, strict=True):
        for step in range(candidate.first, candidate.last + 1):
            held[step] += candidate.size_bytes * taken
    return all(bytes_ <= limit for bytes_, limit in zip(held, capacity, strict=True))


def is_true(pinning: Pinning, candidates: list[Candidate], capacity: list[int]) -> bool:
    value = sum(c.value for c, taken in zip(candidates, pinning.pinned, strict=True) if taken)
    return fits(candidates, pinning.pinned, capacity) and value == pytest.approx(pinning.value)


def nested(random: Random, count: int, steps: int) -> list[Candidate]:
    """Random lifetimes, each within or apart from all before."""
    chosen: list[Candidate] = []
    while len(chosen) < count:
        first = random.randrange(steps)
        new = Candidate(first, random.randrange(first, steps), random.randrange(1, 12), random.uniform(0, 9))
        if are_nested([*chosen, new]):
            chosen.append(new)
    return chosen


@pytest.mark.parametrize("seed", range(25))
def test_nested_lifetimes_are_pinned_optimally(seed: int) -> None:
    random = Random(seed)
    candidates = nested(random, count=9, steps=12)
    capacity = [random.randrange(25) for _ in range(12)]
    pinning = pin_nested(candidates, capacity)
    assert is_true(pinning, candidates, capacity)
    assert pinning.value == pytest.approx(best_value(candidates, capacity)) == pytest.approx(pinning.bound)


@pytest.mark.parametrize("seed", range(25))
def test_rounded_choice_fits_and_lies_between_half_of_the_optimum_and_the_bound(seed: int) -> None:
    random = Random(seed)
    candidates = [
        Candidate(first, random.randrange(first, 12), random.randrange(0, 12), random.uniform(0, 9))
        for first in (random.randrange(12) for _ in range(9))
    ]
    capacity = [random.randrange(30) for _ in range(12)]
    pinning = pin_by_rounding(candidates, capacity)
    best = best_value(candidates, capacity)
    assert is_true(pinning, candidates, capacity)
    assert best / 2 <= pinning.value <= best + 1e-9 <= pinning.bound + 2e-9


def test_equal_sizes_make_the_linear_programme_whole() -> None:
    random = Random(1)
    candidates = [
        Candidate(first, min(79, first + random.randrange(40)), 4, random.uniform(1, 9))
        for first in (random.randrange(80) for _ in range(60))
    ]
    pinning = pin_by_rounding(candidates, [40] * 80)
    assert pinning.value == pytest.approx(pinning.bound)


def test_forward_and_backward_pass_are_one_knapsack() -> None:
    """All lifetimes hold the middle, so the best choice is that of a knapsack."""
    sizes, values = (3, 4, 5, 6), (4.0, 5.0, 6.5, 7.5)
    candidates = [Candidate(i, 9 - i, sizes[i], values[i]) for i in range(4)]
    assert pin(candidates, [10] * 10) == Pinning((False, True, False, True), 12.5, 12.5)


def test_large_or_crossing_lifetimes_go_to_the_linear_programme() -> None:
    crossing = [Candidate(0, 2, 5, 1.0), Candidate(1, 3, 7, 2.0)]
    assert pin(crossing, [7] * 4).pinned == (False, True)
    large = [Candidate(0, 3, (1 << 40) + 1, 1.0), Candidate(1, 2, 1 << 41, 2.0)]
    assert pin(large, [1 << 41] * 4).pinned == (False, True)
    with pytest.raises(ValueError):
        pin_nested(crossing, [7] * 4)


def test_nothing_to_pin() -> None:
    assert pin([], [5]) == Pinning((), 0.0, 0.0)
