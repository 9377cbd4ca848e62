"""Sectors and bank conflicts of accesses whose counts are known."""

from __future__ import annotations

import numpy as np
import pytest

from hybridc.gpu_model.memory import (
    NONE,
    least_sectors,
    least_wavefronts,
    lines_of,
    sector_counts,
    sectors_of,
    wavefronts,
)

LANES = np.arange(32)
EVERYONE = np.ones((1, 32), bool)


@pytest.mark.parametrize(
    ("addresses", "size_bytes", "sectors", "lines"),
    [
        (4 * LANES, 4, 4, 1),
        (16 * LANES, 16, 16, 4),
        (8 * LANES, 4, 8, 2),
        (32 * LANES, 4, 32, 8),
        (4096 * LANES, 4, 32, 32),
        (4 * LANES + 16, 4, 5, 2),
        (0 * LANES, 4, 1, 1),
        (24 * LANES, 16, 24, 6),  # some reach over into the next sector
    ],
)
def test_global_access_takes_as_many_sectors(
    addresses: np.ndarray, size_bytes: int, sectors: int, lines: int
) -> None:
    found = sectors_of(addresses[None], size_bytes, EVERYONE)
    assert sector_counts(found) == [sectors]
    assert lines_of(found) == [lines]
    expected = {byte // 32 for a in addresses for byte in range(a, a + size_bytes)}
    assert set(found[found != NONE]) == expected


def test_threads_that_do_not_take_part_touch_nothing() -> None:
    mask = np.zeros((2, 32), bool)
    mask[1, 5] = True
    addresses = np.tile(128 * LANES, (2, 1))
    assert sector_counts(sectors_of(addresses, 4, mask)).tolist() == [0, 1]
    assert wavefronts(addresses, 4, mask).tolist() == [0, 1]


def test_fewest_sectors_are_those_of_distinct_bytes_side_by_side() -> None:
    strided, same = 32 * LANES[None], 0 * LANES[None]
    assert least_sectors(strided, 4, EVERYONE) == [4]
    assert least_sectors(same, 4, EVERYONE) == [1]


@pytest.mark.parametrize(
    ("addresses", "size_bytes", "conflicts"),
    [
        (4 * LANES, 4, 1),
        (8 * LANES, 4, 2),
        (128 * LANES, 4, 32),
        (132 * LANES, 4, 1),  # a row of 33 words: the usual padding
        (0 * LANES, 4, 1),  # one word for all
        (16 * LANES, 16, 4),
        (8 * LANES, 8, 2),
        (16 * (LANES // 8), 16, 1),  # four pieces of 128 bits, each for eight lanes
    ],
)
def test_shared_access_takes_as_many_wavefronts(
    addresses: np.ndarray, size_bytes: int, conflicts: int
) -> None:
    assert wavefronts(addresses[None], size_bytes, EVERYONE) == [conflicts]


def test_fewest_wavefronts_fill_all_banks() -> None:
    assert least_wavefronts(128 * LANES[None], 4, EVERYONE) == [1]
    assert least_wavefronts(16 * LANES[None], 16, EVERYONE) == [4]
