"""Least times as functions of how far copies are ahead: monotone, with a slope of at most 1.

A frontier is an array, one row for each case and one column for each point of a grid: F(v), the least time at
which copies worth v us of the link, or more, have been made ahead. More copies take longer, so F grows; one
can wait for them, so it grows by at most 1 us for 1 us. All results are rounded down, so they stay bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_WHOLE = 8
"""Copies that are tried in all combinations; of more the last one may be made in part."""


class Grid:
    """Points from 0 to the `most_us` of each case, and operations on frontiers of a row for each."""

    def __init__(self, points: int, most_us: Vector) -> None:
        self.last = points
        self.most_us = most_us[:, None]
        self.step_us = np.where(self.most_us > 0, self.most_us / points, 1.0)
        self.points_us = np.arange(points + 1, dtype=np.float64) * self.step_us
        self.first = np.arange(len(most_us))[:, None] * (points + 1)
        """Where the rows of a frontier begin."""

    def waiting(self) -> Vector:
        """At time 0 nothing has been copied."""
        return self.points_us

    def at(self, frontier: Vector, ahead_us: Vector) -> Vector:
        """F, or a little less, where asked for; infinite beyond the grid. Requires: not negative."""
        place = np.minimum(ahead_us / self.step_us, self.last)
        left = np.minimum(place.astype(np.intp), self.last - 1)
        is_between, short_us = place > left, (left + 1 - place) * self.step_us
        left += self.first
        values = frontier.ravel()
        found = values.take(left)
        # at a point nothing is rounded, and the next one may be infinite
        found = np.where(is_between, np.maximum(found, values.take(left + 1) - short_us), found)
        found[ahead_us > self.most_us * (1 + 1e-9) + 1e-9] = math.inf
        return found

    def within(self, frontier: Vector, most_us: Vector) -> Vector:
        """The link cannot be further ahead than this, by case; the next point is left, to round down from."""
        return np.where(self.points_us > most_us[:, None] + 1.5 * self.step_us, math.inf, frontier)

    def after(self, frontier: Vector, us: float) -> Vector:
        """While the link goes on."""
        if us == 0:
            return frontier
        before = np.broadcast_to(np.maximum(self.points_us - us, 0.0), frontier.shape)
        return self.at(frontier, before) + us

    def after_kernel(self, frontier: Vector, link_us: float, us: float, most_us: Vector) -> Vector:
        """A kernel of `us` needs copies of `link_us`; meanwhile the link is ahead by `most_us` at most.

        `most_us` is by case; negative where the kernel cannot run.
        """
        limit = most_us[:, None]
        during = np.maximum(np.minimum(self.points_us, limit) - us, 0.0)
        value = self.at(frontier, link_us + during) + us + np.maximum(self.points_us - limit, 0.0)
        value[most_us < 0] = math.inf
        return value

    def after_all(self, frontier: Vector, link_us: float, us: float, most_us: Vector) -> Vector:
        """Work that takes `us` or more, in which copies of `link_us` are used up at any time.

        `most_us`: how far the link can be ahead when it begins, by case.
        """
        wanted = np.maximum(self.points_us + link_us - us, 0.0)
        begin = np.minimum(wanted, np.minimum(most_us[:, None], self.most_us))
        return self.at(frontier, begin) + us + (wanted - begin)


def most_link_us(copies: Sequence[tuple[int, float]], room_bytes: Vector) -> Vector:
    """The longest time of the link that copies, each of (bytes, time), may have taken that lie in some room.

    A copy that is under way has all its bytes, too. A knapsack, filled to the brim if it has many things.
    """
    if not copies:
        return np.zeros(len(room_bytes))
    size, us = np.array(copies).T
    order = np.argsort(size / np.maximum(us, 1e-300), kind="stable")
    size, us = size[order], us[order]
    return np.array(
        [_fill(size[size <= room], us[size <= room], room) for room in np.maximum(room_bytes, 0).tolist()]
    )


def _fill(size: Vector, us: Vector, room: float) -> float:
    if size.sum() <= room:
        return float(us.sum())
    if len(size) <= _WHOLE:
        chosen = (np.arange(1 << len(size))[:, None] >> np.arange(len(size))) & 1
        return float((chosen @ us)[chosen @ size <= room].max())
    used = np.cumsum(size)
    whole = int(np.searchsorted(used, room, side="right"))
    rest = room - (used[whole - 1] if whole else 0.0)
    return float(us[:whole].sum() + us[whole] * rest / size[whole])
