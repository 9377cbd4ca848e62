"""Rows of 8-bit integers with the bytes of a float32 behind each, by numpy."""

from __future__ import annotations

import numpy as np


def rows_of(numbers: np.ndarray) -> np.ndarray:
    """Each row over its scale, which is its greatest magnitude over 127, to the nearest integers."""
    peaks = np.abs(numbers).max(axis=-1, keepdims=True).astype(np.float32)
    scales = peaks / np.float32(127)
    steps = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 0)
    codes = np.rint(numbers.astype(np.float32) * steps).astype(np.int8)
    return np.concatenate([codes, scales.view(np.int8)], axis=-1)


def numbers_of(rows: np.ndarray) -> np.ndarray:
    """What rows stand for, as float32."""
    scales = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4].astype(np.float32) * scales


def assert_appended(found: np.ndarray, past: np.ndarray, new: np.ndarray, before: np.ndarray) -> None:
    """That `found` is the past with the rows of `new` behind so many of each batch, and nothing else."""
    length, expected = new.shape[2], past.copy()
    for b, first in enumerate(before.ravel()):
        expected[b, :, first : first + length] = rows_of(new[b])
        placed = found[b, :, first : first + length]
        np.testing.assert_array_equal(placed[..., -4:], rows_of(new[b])[..., -4:])
        # a number half way between two may be rounded to either
        np.testing.assert_allclose(numbers_of(placed), new[b], rtol=0, atol=0.51 / 127 * np.abs(new[b]).max())
        kept = np.delete(found[b], np.arange(first, first + length), axis=1)
        np.testing.assert_array_equal(kept, np.delete(past[b], np.arange(first, first + length), axis=1))
    assert (found == expected).mean() > 0.999
