"""GeePS's policy, by hand and against its own rules."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.baselines.geeps import place


def test_nothing_is_pinned_where_only_the_double_buffer_fits() -> None:
    placement = place([(0, 1), (1, 2)], [4, 4, 4], [False] * 3, 16)
    assert placement is not None
    assert (placement.pinned, placement.buffer_bytes) == ((False, False, False), 16)
    assert place([(0, 1), (1, 2)], [4, 4, 4], [False] * 3, 15) is None


def test_the_largest_access_is_made_smaller_first() -> None:
    """Tensor 2 takes 6 and lets the buffer shrink from 16 to 8: 14 in all."""
    placement = place([(0, 1), (1, 2)], [2, 2, 6], [False] * 3, 16)
    assert placement is not None
    assert placement.pinned[2]
    assert placement.buffer_bytes <= 8


def test_everything_is_pinned_where_it_fits() -> None:
    placement = place([(0, 1), (1, 2), (2, 0)], [3, 5, 7], [False, False, True], 15 + 14)
    assert placement is not None
    assert placement.pinned == (True, True, True)


def test_parameters_come_last_and_do_not_make_the_buffer_smaller() -> None:
    placement = place([(0, 1), (0, 2)], [8, 2, 2], [True, False, False], 28)
    assert placement is not None
    assert placement == place([(0, 1), (0, 2)], [8, 2, 2], [True, False, False], 28)
    assert placement.pinned == (True, True, True)
    assert placement.buffer_bytes == 16
    less = place([(0, 1), (0, 2)], [8, 2, 2], [True, False, False], 27)
    assert less is not None
    assert less.pinned == (False, True, True)


def test_no_kernels_pin_nothing() -> None:
    placement = place([], [], [], 10)
    assert placement is not None
    assert placement.pinned == ()


@pytest.mark.parametrize("seed", range(50))
def test_what_is_pinned_fits_beside_twice_the_largest_access(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randrange(1, 20) for _ in range(20)]
    parameters = [random.random() < 0.3 for _ in sizes]
    accesses = [random.sample(range(20), 4) for _ in range(15)]
    peak = max(sum(sizes[t] for t in access) for access in accesses)
    capacity = 2 * peak + random.randrange(150)
    placement = place(accesses, sizes, parameters, capacity)
    assert placement is not None
    pinned_bytes = sum(s for s, pinned in zip(sizes, placement.pinned, strict=True) if pinned)
    assert pinned_bytes + placement.buffer_bytes <= capacity
    unpinned = [sum(sizes[t] for t in access if not placement.pinned[t]) for access in accesses]
    assert 2 * max(unpinned) <= placement.buffer_bytes
    left = capacity - pinned_bytes - placement.buffer_bytes
    used = {t for access in accesses for t in access}
    assert all(placement.pinned[t] or parameters[t] or sizes[t] > left for t in used)
