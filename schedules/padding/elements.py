"""Which elements of a tensor are padding: a description that every view of the tensor shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class OpenAxis:
    """Places along an open dimension, among a tensor's elements in row-major order: number // inner % extent.

    Places from a size on are padding. Reshaping a tensor leaves it as it is, whatever axes are merged.
    """

    inner: int
    extent: int
    size: str
    """Name of the int64[1] that says how many places there are in a run."""


def inner_extents(shape: Sequence[int]) -> tuple[int, ...]:
    """Of each axis how many elements lie between two of its places."""
    found, inner = [], 1
    for extent in reversed(shape):
        found.append(inner)
        inner *= extent
    return tuple(reversed(found))


def within_axis(each: OpenAxis, shape: Sequence[int], axis: int) -> int | None:
    """How many places of an axis are one of the open dimension, if it lies in that axis alone; else None."""
    inner = inner_extents(shape)[axis]
    if each.inner % inner or (inner * shape[axis]) % (each.inner * each.extent):
        return None
    return each.inner // inner
