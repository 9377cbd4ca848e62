"""Arrays that have a shape and a type but no values: weights that are planned for without being read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

_NOTHING = np.zeros(16, np.uint8)
"""The one element of all placeholders: as large as the largest element type."""
_NOTHING.flags.writeable = False


def placeholder(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """An array that takes no memory, whatever its shape. Its elements are zeros, which mean nothing."""
    return np.ndarray(tuple(shape), dtype, buffer=_NOTHING.data, strides=(0,) * len(shape))


def is_placeholder(array: np.ndarray) -> bool:
    """Whether an array is one, or a view of one."""
    return array.__array_interface__["data"][0] == _ADDRESS


_ADDRESS = _NOTHING.__array_interface__["data"][0]
