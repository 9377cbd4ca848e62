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
