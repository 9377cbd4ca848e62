"""How far planning has come: the best plan so far for each budget, and when to be content with it.

The search counts its effort, so what it ends with is the same everywhere. What it has found when a clock or
the user stops it is not: a faster computer has come further then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from hybridc.passes.planner.emit.materialize import PlacedPlan
from hybridc.passes.planner.model.context import PlanningContext

_WORTH_TELLING = 0.002
"""A share of the time: plans that gain less are taken without a word."""


class Stop(Exception):
    """The search ends here, with the best plans so far."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The best plan for a budget at a moment of the search."""

    seconds: float
    """Since planning began."""
    budget_bytes: int
    makespan_us: float
    bound_us: float
    """No plan that is searched for is faster; 0 while that is not known."""

    @property
    def gap(self) -> float | None:
        """How much slower than the bound, at most: 0.03 is three per cent; None while there is no bound."""
        return max(0.0, self.makespan_us / self.bound_us - 1) if self.bound_us > 0 else None


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """What planning took, in seconds on this computer."""

    seconds: float
    first_seconds: float
    """After which every budget had a plan."""
    is_stopped: bool
    """Whether it ended before its effort was spent."""
    standings: tuple[Standing, ...] = ()
    """Each plan that was the best for a budget when it was found."""


@dataclass(slots=True)
class Watch:
    """Hears of plans while they are searched for, and ends the search where that is asked for.

    It is content from `timeout_seconds` on, or once a signal has come, if every budget has a plan by then.
    """

    timeout_seconds: float | None = None
    listening: Callable[[], AbstractContextManager[Sequence[int]]] = lambda: nullcontext(())
    """Notes the signals that come during a search, instead of what they do otherwise."""
    told: Callable[[Standing], None] = lambda standing: None
    clock: Callable[[], float] = time.perf_counter
    best: dict[int, tuple[PlanningContext, PlacedPlan]] = field(default_factory=dict)
    """By budget in bytes."""
    budgets: tuple[int, ...] = ()
    is_stopped: bool = False
    host_bytes: int | None = None
    _bounds_us: dict[int, float] = field(default_factory=dict)
    _standings: list[Standing] = field(default_factory=list)
    _start: float = math.nan
    _first_seconds: float = math.nan
    _signals: Sequence[int] = ()

    def begin(self, budgets: Sequence[int], host_bytes: int | None) -> None:
        """The clock starts; from now on plans for these budgets in bytes are asked for."""
        self.budgets, self.host_bytes, self._start = tuple(budgets), host_bytes, self.clock()

    @property
    def seconds(self) -> float:
        """Since planning began."""
        return self.clock() - self._start

    @property
    def is_complete(self) -> bool:
        """Whether every budget has a plan."""
        return len(self.best) == len(self.budgets)

    def time(self) -> PlanningTime:
        """What planning has taken until now."""
        seconds = self.seconds
        first_seconds = seconds if math.isnan(self._first_seconds) else self._first_seconds
        return PlanningTime(seconds, first_seconds, self.is_stopped, tuple(self._standings))

    def found(self, context: PlanningContext, placed: PlacedPlan) -> None:
        """A plan, for every budget that has room for it."""
        for budget_bytes in self.budgets:
            if not placed.fits(budget_bytes, self.host_bytes):
                continue
            known = self.best.get(budget_bytes)
            if known is None or placed.makespan_us < known[1].makespan_us:
                self.best[budget_bytes] = context, placed
                if known is None or placed.makespan_us < known[1].makespan_us * (1 - _WORTH_TELLING):
                    self._tell(budget_bytes)
        if self.is_complete and math.isnan(self._first_seconds):
            self._first_seconds = self.seconds

    def bounded(self, budget_bytes: int, bound_us: float) -> None:
        """No plan that is still to come for a budget takes less."""
        if budget_bytes in self.budgets:
            self._bounds_us[budget_bytes] = bound_us
            if budget_bytes in self.best:
                self._tell(budget_bytes)

    def is_content(self) -> bool:
        """Whether what has been found is to do; from then on it is."""
        is_over = self.timeout_seconds is not None and self.seconds >= self.timeout_seconds
        self.is_stopped = self.is_stopped or ((is_over or len(self._signals) > 0) and self.is_complete)
        return self.is_stopped

    def check(self) -> None:
        """Raise Stop if what has been found is to do."""
        if self.is_content():
            raise Stop

    @contextmanager
    def searching(self) -> Iterator[None]:
        """A search, which a signal ends early."""
        with self.listening() as signals:
            self._signals = signals
            yield

    def _tell(self, budget_bytes: int) -> None:
        makespan_us = self.best[budget_bytes][1].makespan_us
        bound_us = min(self._bounds_us.get(budget_bytes, 0.0), makespan_us)
        standing = Standing(self.seconds, budget_bytes, makespan_us, bound_us)
        self._standings.append(standing)
        self.told(standing)
