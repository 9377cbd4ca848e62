"""Sizes that an open dimension may have when a network runs, and the texts they are written as.

An artifact has a plan for each bucket, an interval of sizes of each open dimension. In a bucket every tensor
has the largest size; what lies behind the real one is padding, which no result depends on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from hybridc.errors import UsageError

MOST_BUCKETS = 8
"""That are chosen for all open dimensions together, or one more of two: each is compiled by itself."""
LARGEST_DIMENSION = 2**31 - 1
_WIDE = 16
"""From here on chosen bounds are multiples of half of it: whole vectors."""
_TEXT = re.compile(r"(?P<low>\d{1,10})\.\.(?P<high>\d{1,10})(?::(?P<bounds>[\d,]+))?", re.ASCII)
_NAME = re.compile(r"[^\W\d][\w.]*")
REMEDY = "write 1..32, with bounds of buckets 1..32:8,32, or the sizes that there are, 64,128"


def listing_remedy(names: Sequence[str]) -> str:
    """How sizes of open dimensions are listed, of any if none are known. `x[1]` is an axis of an input that
    has no name."""
    options = [
        f"64,128 for {name} in --shape" if "[" in name else f"--dim {name}=64,128"
        for name in names or ["NAME"]
    ]
    return f"list the sizes that you need, for example {' '.join(options)}"


def named_text(names: Sequence[str]) -> str:
    """Of open dimensions, behind what they are to blame for."""
    return f": {' and '.join(map(repr, names))}" if names else ""


@dataclass(frozen=True, slots=True)
class Interval:
    """The sizes from `low` to `high`."""

    low: int
    high: int

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high

    def __str__(self) -> str:
        return str(self.high) if self.is_exact else f"{self.low}..{self.high}"


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The sizes in any of them, as the fewest intervals. Requires: any two are equal or apart."""
    merged: list[Interval] = []
    for each in sorted(set(intervals), key=lambda each: each.low):
        if merged and each.low == merged[-1].high + 1:
            merged[-1] = Interval(merged[-1].low, each.high)
        else:
            merged.append(each)
    return tuple(merged)


def union_text(intervals: Iterable[Interval]) -> str:
    """What sizes there are, such as `1..32` or `64 or 128`."""
    return " or ".join(map(str, union(intervals)))


Bucket = tuple[Interval, ...]
"""An interval for each open dimension."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an open dimension may be: sizes of at least 1."""

    intervals: tuple[Interval, ...]
    """Ascending and apart from each other."""
    is_divided: bool = True
    """Whether they are the buckets; else they are one interval, to be divided."""
    follows: str | None = None
    """The dimension whose sizes these go with, each with the one at its place; None if they are free."""

    def __post_init__(self) -> None:
        ends = [end for each in self.intervals for end in (each.low, each.high)]
        is_ascending = all(i.low <= i.high for i in self.intervals) and all(
            one.high < other.low for one, other in pairwise(self.intervals)
        )
        if not ends or ends[0] < 1 or ends[-1] > LARGEST_DIMENSION or not is_ascending:
            what = f"sizes {self} are not ascending numbers from 1 to {LARGEST_DIMENSION}"
            raise UsageError("HC512", what, remedy=REMEDY)

    @property
    def high(self) -> int:
        return self.intervals[-1].high

    def divided(self, most: int) -> tuple[Interval, ...]:
        """The buckets: those given, or at most so many of about equal ratio. Size 1 has one of its own, as
        networks often treat it as none."""
        if self.is_divided:
            return self.intervals
        [whole] = self.intervals
        bounds = _bounds(whole, most)
        lows = [whole.low, *(bound + 1 for bound in bounds)]
        return tuple(Interval(low, high) for low, high in zip(lows, bounds, strict=False))

    def __str__(self) -> str:
        if not self.is_divided or len(self.intervals) == 1:
            return ",".join(map(str, self.intervals))
        if all(each.is_exact for each in self.intervals):
            return ",".join(str(each.high) for each in self.intervals)
        return f"{self.intervals[0].low}..{self.high}"


@dataclass(frozen=True, slots=True)
class Sum:
    """The size of a dimension, as those of others and a number."""

    names: tuple[str, ...]
    more: int = 0

    @staticmethod
    def of(text: str) -> Sum | None:
        """Read `past + sequence` or `past + 1`; None for any other text."""
        terms = [term.strip() for term in text.split("+")]
        names = tuple(term for term in terms if not re.fullmatch(r"\d{1,9}", term, re.ASCII))
        if len(terms) < 2 or not names or not all(map(_NAME.fullmatch, names)):
            return None
        return Sum(names, sum(int(term) for term in terms if term not in names))

    def __str__(self) -> str:
        return " + ".join((*self.names, *([str(self.more)] if self.more else [])))


def with_sums(names: Iterable[str], given: Mapping[str, int | Sizes | Sum]) -> dict[str, int | Sizes]:
    """Sizes by dimension, with those that are sums of others: `given` as such, or of `names` that say so.

    Raises UsageError HC512 for one that is given as a sum of what has no size, a range, or several lists.
    """
    known = {name: size for name, size in given.items() if not isinstance(size, Sum)}
    told = {name: size for name, size in given.items() if isinstance(size, Sum)}
    read = {name: size for name in names if name not in given and (size := Sum.of(name))}
    found = {name: _added(each, known) for name, each in (read | told).items()}
    wrong = next((name for name in told if found[name] is None), None)
    if wrong is not None:
        what = (
            f"dimension {wrong!r} is given as {told[wrong]}, whose sizes are not known, or more than one list"
        )
        options = " ".join(f"--dim {name}=64" for name in told[wrong].names)
        raise UsageError("HC512", what, remedy=f"give them sizes, for example {options}")
    return known | {name: size for name, size in found.items() if size is not None}


def _added(each: Sum, known: Mapping[str, int | Sizes]) -> int | Sizes | None:
    """The size, or those that follow a dimension with a list of sizes; None if it is not known."""
    terms = {name: known.get(name) for name in each.names}
    fixed = each.more + sum(size for name in each.names if isinstance(size := terms[name], int))
    others = [(name, size) for name, size in terms.items() if not isinstance(size, int)]
    if not others:
        return fixed
    [(name, size), *more] = others
    if more or each.names.count(name) > 1 or not isinstance(size, Sizes):
        return None
    if not all(interval.is_exact for interval in size.intervals):
        return None
    return replace(listed(interval.high + fixed for interval in size.intervals), follows=name)


def _bounds(whole: Interval, most: int) -> list[int]:
    """Largest sizes of buckets, the last of them that of the interval."""
    if whole.is_exact or most < 2:
        return [whole.high]
    first = [1] if whole.low == 1 else []
    doublings = math.ceil(math.log2(whole.high / whole.low))
    steps = min(most - len(first), doublings)
    ratio = (whole.high / whole.low) ** (1 / steps)
    bounds = [_rounded(whole.low * ratio**step) for step in range(1, steps)]
    return sorted({*first, *(b for b in bounds if whole.low < b < whole.high), whole.high})


def _rounded(size: float) -> int:
    step = _WIDE // 2 if size > _WIDE else 1
    return math.ceil(round(size / step, 6)) * step


def divided(sizes: Sequence[Sizes]) -> tuple[Bucket, ...]:
    """The buckets of several open dimensions, each with each; that of the largest sizes comes last.

    Those that are chosen grow by about one factor in all dimensions: the least with which there are few.
    """
    wholes = [each.intervals[0] for each in sizes if not each.is_divided]
    given = math.prod(len(each.intervals) for each in sizes if each.is_divided)
    most = max(MOST_BUCKETS // given, 1) + (len(wholes) == 2)
    counts = iter(_counts(wholes, most))
    return tuple(product(*(each.divided(1 if each.is_divided else next(counts)) for each in sizes)))


def _counts(wholes: Sequence[Interval], most: int) -> list[int]:
    """Buckets of each interval, at most so many of all together, unless two of each are more."""
    doublings = [math.log2(whole.high / whole.low) for whole in wholes]

    def counts(factor: float) -> list[int]:
        steps = (math.ceil(round(each / factor, 6)) for each in doublings)
        return [max(n + (whole.low == 1 < whole.high), 1) for n, whole in zip(steps, wholes, strict=True)]

    factors = sorted({each / steps for each in doublings if each for steps in range(1, most + 1)})
    few = (found for found in map(counts, factors) if math.prod(found) <= most)
    return next(few, counts(max(factors, default=1.0)))


def parse_sizes(text: str) -> Sizes:
    """Read `1..32`, `1..32:8,32` or `64,128,256`. Raises UsageError HC512."""
    if re.fullmatch(r"\d{1,10}(,\d{1,10})*", text, re.ASCII):
        return listed(int(size) for size in text.split(","))
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError("HC512", f"invalid sizes of a dimension {text!r}", remedy=REMEDY)
    low, high = int(match["low"]), int(match["high"])
    if match["bounds"] is None:
        return Sizes((Interval(low, high),), is_divided=False)
    bounds = [int(bound) for bound in match["bounds"].split(",") if bound]
    if not bounds or bounds[-1] != high:
        what = f"the last bucket of {text!r} does not end with {high}"
        raise UsageError("HC512", what, remedy=f"give {high} as its last bound")
    lows = [low, *(bound + 1 for bound in bounds)]
    return Sizes(tuple(Interval(first, last) for first, last in zip(lows, bounds, strict=False)))


def listed(sizes: Iterable[int]) -> Sizes:
    """These sizes alone, a bucket for each. Raises UsageError HC512."""
    return Sizes(tuple(Interval(size, size) for size in sizes))


def sizes_of(given: object) -> Sizes | Sum | None:
    """What users of Python write: `"1..32"`, `range(1, 33)`, a list of sizes, or the sum of other dimensions;
    None for anything else."""
    if isinstance(given, Sizes | Sum):
        return given
    if isinstance(given, str):
        return Sum.of(given) or parse_sizes(given)
    if isinstance(given, range) and given.step == 1 and len(given):
        return Sizes((Interval(given.start, given.stop - 1),), is_divided=False)
    if isinstance(given, list | tuple) and all(type(size) is int for size in given):
        return listed(given)
    return None
