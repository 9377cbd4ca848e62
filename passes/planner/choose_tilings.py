"""Which ways of cutting the network up are worth planning, and from which budget on.

How finely kernels are cut up decides how fast a plan can be: large bands need memory that small budgets do
not have, small ones cost launches. Which way is best is told by short searches at fixed budgets, the points,
which depend on the network but not on the budget that is asked for. A way that is best at a point, or nearly,
is planned for that budget and every larger one; so a larger budget has more ways to choose from, never fewer,
and its plan is not slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hybridc.ir import Graph
from hybridc.machine import Machine
from hybridc.passes.planner.model.caches import with_caches_on_host
from hybridc.passes.planner.model.context import UNWATCHED, Effort, PlanningContext, Watcher, fixed_budgets
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES
from hybridc.passes.planner.search.partition import choose_order, rough_time_us, smallest_budget_bytes

_OCTAVES = 6
"""Tilings are compared at `fixed_budgets` up to what a graph needs entirely on the GPU: for these plans are
searched in any case."""
# An order is chosen once for all budgets: the middle of what people ask for stands for the rest.
USUAL = (0.1, 0.25, 0.5)
"""Shares that decide in which order the kernels of the whole network run."""
# Tilings have limits a factor of two apart: with 8, three of them are compared at a point, and the whole.
FINEST = 8
"""At a point ways are compared whose kernels are cut up to its bytes, or to more than an eighth of them."""
# googlenet at 20 %: 4.3 % behind in the short search, 10 % ahead in the long one. At eight drawn budgets 10 %
# finds nothing that 5 % does not, in up to twice the time.
NEARLY = 1.05
"""Ways that a short search finds up to so much slower than the best one are planned, too."""


@dataclass(frozen=True, slots=True)
class ColumnCut:
    """Of large products, whose second parts are meant for the CPU."""

    weights: frozenset[str]
    """By which they are known, one of each product."""
    share: float
    """Of the columns, that second parts have."""
    heads: float = 0.0
    """Of the heads of caches; none: these are left whole."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The graph of the network, whole or cut up, in some layouts, and for which budgets it is planned."""

    graph: Graph
    pins: Pins = field(default_factory=dict)
    """The user's."""
    limit_bytes: int = UNLIMITED_BYTES
    """What kernels are cut up to."""
    first_bytes: int = 0
    """Smaller budgets have better ways."""
    last_bytes: int = UNLIMITED_BYTES
    """Larger budgets have too: for them a plan of this budget is good enough."""
    order: tuple[int, ...] | None = None
    """In which each device runs the kernels; None: one that needs few bytes."""
    second: frozenset[str] = frozenset()
    """Kernels that are meant for the CPU beside their counterparts on the GPU; with some the network is
    planned for every budget."""
    cut: ColumnCut | None = None
    """Of the large products, where there are such kernels."""
    is_required: bool = False
    """Whether other ways are planned only where this one does not fit: all sizes of a network read the same
    parts of its weights."""

    @property
    def is_cut_up(self) -> bool:
        return self.limit_bytes < UNLIMITED_BYTES

    def context(
        self, machine: Machine, effort: Effort, host_bytes: int | None, watch: Watcher = UNWATCHED
    ) -> PlanningContext:
        """What planning this graph refers to; `host_bytes` limits the host's memory, None does not.

        Caches lie on the host; which of them the GPU has instead is chosen after the search.
        """
        pins = with_caches_on_host(self.graph, self.pins)
        return PlanningContext(
            self.graph, machine, pins, self.order, effort, host_bytes, watch=watch, second=self.second
        )


def choose_tilings(
    tilings: Sequence[Tiling],
    machine: Machine,
    all_bytes: int,
    largest_bytes: int,
    effort: Effort,
    host_bytes: int | None = None,
    *,
    watch: Watcher = UNWATCHED,
) -> tuple[Tiling, ...]:
    """The tilings that are worth planning for budgets up to `largest_bytes`, with their ranges.

    Requires: the first is the whole network, which needs `all_bytes` entirely on the GPU, the others are
    ever finer; the last has to be the same for all budgets, of the others those beyond `largest_bytes` may
    be missing. Plans are meant to hold at most `host_bytes` of the host's memory. Ensures: those for a
    smaller budget are among them, with the same first budgets; there is one for the smallest budget that the
    whole network or the finest way can do with, and the whole network is always among them.
    """
    whole, *cut_up = tilings
    contexts = [tiling.context(machine, effort, host_bytes, watch) for tiling in tilings]
    usual = [int(all_bytes * share) for share in USUAL]
    if not cut_up:
        return (replace(whole, order=choose_order(contexts[0], usual)),)
    least_bytes = [smallest_budget_bytes(t.graph, machine, t.pins) for t in tilings]
    smallest_bytes = min(least_bytes[0], least_bytes[-1])
    points = sorted(
        {smallest_bytes}
        | {b for b in fixed_budgets(all_bytes, _OCTAVES) if smallest_bytes < b <= largest_bytes}
    )
    ranges: dict[int, tuple[int, int]] = {}
    for point, following in pairwise((*points, UNLIMITED_BYTES)):
        contestants = [n for n in _contestants(tilings, point) if least_bytes[n] <= point]
        for n in _fastest(contexts, contestants or [len(cut_up)], point):
            ranges[n] = ranges.get(n, (point, 0))[0], following
    ranges[0] = least_bytes[0], UNLIMITED_BYTES
    return tuple(
        replace(
            tilings[n],
            order=choose_order(contexts[n], [first] if n else usual),
            first_bytes=first,
            last_bytes=last,
        )
        for n, (first, last) in sorted(ranges.items())
    )


def _contestants(tilings: Sequence[Tiling], point: int) -> list[int]:
    """The whole network and the ways that suit a budget."""
    finest = len(tilings) - 1
    return [
        n
        for n, tiling in enumerate(tilings)
        if n == 0
        or tiling.limit_bytes <= point < FINEST * tiling.limit_bytes
        or (n == finest and point < tiling.limit_bytes)
    ]


def _fastest(
    contexts: Sequence[PlanningContext], contestants: Sequence[int], budget_bytes: int
) -> Sequence[int]:
    """Those that may be the fastest of a thorough search."""
    if len(contestants) == 1:
        return contestants
    times_us = {n: rough_time_us(contexts[n], budget_bytes) for n in contestants}
    enough_us = NEARLY * min(times_us.values())
    return [n for n in contestants if times_us[n] <= enough_us]
