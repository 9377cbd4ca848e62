"""Of the ways to run each member of a group, those that together fit a budget and take the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a member."""

    kept_bytes: int
    """Nobody else ever has."""
    shared_bytes: int
    """What its turn needs beside them; others have them in their turns."""
    us: float
    """Of its turn."""
    copied_bytes: int = 0
    """Weights that come to the GPU once more in its turn."""


def needed_bytes(options: Sequence[Option]) -> int:
    """What a group needs whose members run in these ways: kept bytes add up, shared ones do not."""
    return sum(each.kept_bytes for each in options) + max((each.shared_bytes for each in options), default=0)


def choose(options: Sequence[Sequence[Option]], budget_bytes: int) -> tuple[int, ...] | None:
    """The position of an option for each member, of the least sum of times within the budget.

    Exact: all combinations are looked at, but for options that another is better than in every respect, and
    those that cannot be faster. The last two members are looked at as arrays. So with a larger budget, which
    allows the same combinations and more, the sum is never larger. Of equally fast ones that is taken which
    copies the fewest bytes. None: no combination fits.
    """
    padding: list[Sequence[Option]] = [(Option(0, 0, 0.0),)] * (2 - len(options))
    padded = [*padding, *options]
    useful = [_undominated(each) for each in padded]
    tail = _Pairs(*([each[i] for i in order] for each, order in zip(padded[-2:], useful[-2:], strict=True)))
    best: tuple[int, ...] | None = None
    limit = math.inf, 0
    for head in product(*useful[:-2]):
        chosen = [each[position] for each, position in zip(padded, head, strict=False)]
        found = tail.fastest(chosen, budget_bytes, limit)
        if found is not None:
            limit, (one, other) = found
            best = (*head, useful[-2][one], useful[-1][other])
    return None if best is None else best[len(padding) :]


def _undominated(options: Sequence[Option]) -> list[int]:
    """Positions, fastest first, of options that no other is at least as good as in every respect."""
    kept: list[int] = []
    for position in sorted(range(len(options)), key=lambda i: _key(options[i])):
        one = options[position]
        if not any(
            options[i].kept_bytes <= one.kept_bytes
            and options[i].shared_bytes <= one.shared_bytes
            and options[i].copied_bytes <= one.copied_bytes
            for i in kept  # none of which is slower
        ):
            kept.append(position)
    return kept


def _key(option: Option) -> tuple[float, int, int, int]:
    return option.us, option.copied_bytes, option.kept_bytes, option.shared_bytes


class _Pairs:
    """All combinations of two members' options, fastest first."""

    def __init__(self, one: Sequence[Option], other: Sequence[Option]) -> None:
        kept, shared, us, copied = (
            combined.outer(*(np.array([getattr(option, name) for option in each]) for each in (one, other)))
            for combined, name in (
                (np.add, "kept_bytes"),
                (np.maximum, "shared_bytes"),
                (np.add, "us"),
                (np.add, "copied_bytes"),
            )
        )
        self._order = np.lexsort((copied.ravel(), us.ravel()))
        self._kept, self._shared, self._us, self._copied = (
            array.ravel()[self._order] for array in (kept, shared, us, copied)
        )
        self._width = len(other)

    def fastest(
        self, head: Sequence[Option], budget_bytes: int, limit: tuple[float, int]
    ) -> tuple[tuple[float, int], tuple[int, int]] | None:
        """Of those that fit beside the head, time and copied bytes of the best, and its positions.

        None unless these are below the limit.
        """
        head_us = math.fsum(option.us for option in head)
        if head_us + self._us[0] > limit[0]:
            return None
        head_kept = sum(option.kept_bytes for option in head)
        head_shared = max((option.shared_bytes for option in head), default=0)
        fits = self._kept + np.maximum(self._shared, head_shared) <= budget_bytes - head_kept
        first = int(np.argmax(fits))
        copied_bytes = sum(option.copied_bytes for option in head) + int(self._copied[first])
        reached = head_us + float(self._us[first]), copied_bytes
        if not fits[first] or reached >= limit:
            return None
        return reached, divmod(int(self._order[first]), self._width)
