"""Values of a JSON file that anybody may have written: each is of the type asked for, or an error.

All raise TypeError for another type, and ValueError for a number out of range.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

_LARGEST_WHOLE = 2**63 - 1
"""The runtime counts in 64 bits."""


def as_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} is not a text")
    return value


def as_whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{reprlib.repr(value)} is not a whole number")
    if not -_LARGEST_WHOLE <= value <= _LARGEST_WHOLE:
        raise ValueError(f"{reprlib.repr(value)} has more than 64 bits")
    return value


def as_count(value: object) -> int:
    count = as_whole(value)
    if count < 0:
        raise ValueError(f"{count} is not a count")
    return count


def as_number(value: object) -> float:
    """Finite."""
    number = value if isinstance(value, float) else as_whole(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return float(number)


def as_list(value: object) -> Sequence[Any]:
    """A tuple is one, too, before it is written."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{reprlib.repr(value)} is not a list")
    return value


def as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{reprlib.repr(value)} is not an object")
    return value
