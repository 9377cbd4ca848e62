"""What an access of each warp costs: sectors of global memory, wavefronts of shared memory.

Functions take byte addresses of shape (warps, 32) and a mask of the same shape, which says whose access takes
place; they give a value or a row for each warp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SECTOR = 32
"""Bytes of the pieces in which global memory is read (CUDA C++ best practices guide, "Coalesced access")."""
LINE = 128
"""Bytes that share a tag of L1."""
BANKS = 32
_WORD = 4
NONE = -1
"""In place of a sector where a row has fewer."""

Array = np.ndarray[Any, Any]


def sectors_of(addresses: Array, size_bytes: int, mask: Array) -> Array:
    """Distinct sectors that each warp touches, in order, then NONE: shape (warps, at most 64)."""
    first, last = addresses // SECTOR, (addresses + size_bytes - 1) // SECTOR
    touched = first if (first == last).all() else np.concatenate([first, last], axis=1)
    masks = mask if touched is first else np.concatenate([mask, mask], axis=1)
    return _distinct(np.where(masks, touched, NONE))


def sector_counts(sectors: Array) -> Array:
    return (sectors != NONE).sum(axis=1)


def least_sectors(addresses: Array, size_bytes: int, mask: Array) -> Array:
    """Sectors that would do if each warp's distinct pieces lay side by side."""
    pieces = sector_counts(_distinct(np.where(mask, addresses, NONE)))
    return -(-pieces * size_bytes // SECTOR)


def lines_of(sectors: Array) -> Array:
    """How many lines of L1 each warp's sectors lie in."""
    return sector_counts(_distinct(np.where(sectors == NONE, NONE, sectors * SECTOR // LINE)))


def wavefronts(addresses: Array, size_bytes: int, mask: Array) -> Array:
    """Cycles that the banks of shared memory take for each warp's access, 0 where no thread makes one.

    A bank gives one word of 4 bytes a cycle, to any threads of the warp that want the same word (CUDA C++
    programming guide, "Shared memory"). Words of a wide access are counted together for the whole warp.
    """
    words = addresses // _WORD
    if size_bytes > _WORD:
        words = (words[:, :, None] + np.arange(size_bytes // _WORD)).reshape(len(words), -1)
        mask = np.repeat(mask, size_bytes // _WORD, axis=1)
    distinct = _distinct(np.where(mask, words, NONE))
    warp, column = np.nonzero(distinct != NONE)
    banks = np.zeros((len(words), BANKS), np.int64)
    np.add.at(banks, (warp, distinct[warp, column] % BANKS), 1)
    return banks.max(axis=1)


def least_wavefronts(addresses: Array, size_bytes: int, mask: Array) -> Array:
    """Wavefronts if the same distinct words lay in banks as evenly as can be."""
    words = addresses // _WORD
    if size_bytes > _WORD:
        words = (words[:, :, None] + np.arange(size_bytes // _WORD)).reshape(len(words), -1)
        mask = np.repeat(mask, size_bytes // _WORD, axis=1)
    return -(-sector_counts(_distinct(np.where(mask, words, NONE))) // BANKS)


def _distinct(rows: Array) -> Array:
    """Each row's distinct values in descending order, then NONE; columns that hold nothing are cut off."""
    ordered = -np.sort(-rows, axis=1)
    ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = NONE
    ordered = -np.sort(-ordered, axis=1)
    return ordered[:, : max(1, int((ordered != NONE).sum(axis=1).max(initial=0)))]
