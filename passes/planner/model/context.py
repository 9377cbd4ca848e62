"""What all of planning refers to: one graph on one machine, the user's wishes, and how long to search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.options import DEFAULT_PLAN_SECONDS
from hybridc.passes.planner.model.order import best_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.model.problem import Problem, problem_of

_SEARCHES = 8
"""Of a budget, about: two anchors and six budgets between them, each of one or two graphs."""

# Its exact value matters little, but it is part of every plan: another one gives other plans for the same
# seconds. A faster computer ends sooner instead of searching longer.
_SIMULATED_KERNELS_PER_SECOND = 6e6
"""Nominal speed of the search: turns seconds into a number of simulations, the same on every machine."""
_PLACED_STEPS_PER_SECOND = 1700
"""Nominal speed of placing a plan, an estimate: the 419 steps of ResNet-152 take three to four times as long,
but many plans are dropped before they are packed."""
_ROUNDS_OF_MOVES = 12
"""Of a budget and each effort, about: nine between two anchors, and three at those."""
_EVALUATIONS_PER_KERNEL = 8000
"""More than this many simulations for each kernel rarely improve a plan."""
_STEP_SECONDS, _SMALLEST_STEP, _LARGEST_STEP = 0.03, 0.01, 0.06
"""Between budgets that are searched: the first over the effort, within the others."""
_PACKING_PER_SECOND = 0.1
"""With ten seconds packing takes as long as it usually does: up to one second for an arena."""
_TIGHTENING, _FITTING = 0.05, 0.02
"""Shares of that, so that packing takes less time than the searches."""
_PROOF_SECONDS = 1.0
"""From this effort on the best plan of a small graph is proven: to begin takes a second of its own."""
# After as many seconds bounds/exact.py gives a unit of the solver's effort up.
_SECONDS_PER_PROOF_UNIT = 20


# A search takes seconds whatever its effort, of large graphs some tens. So there are few: of the usual effort
# all but a small one is left to the last, of more about half.
_RUNGS = (2.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Efforts of the searches that are made one after the other, in seconds."""


def fixed_budgets(most_bytes: int, octaves: int) -> list[int]:
    """Budgets in bytes, 2 to the power of n / 2, rising over so many factors of two up to the most."""
    halves = range(2 * max(most_bytes, 1).bit_length())
    budgets = {math.isqrt(1 << n) for n in halves}
    return sorted(b for b in budgets if most_bytes >> octaves < b <= most_bytes)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, in seconds of a nominal machine: effort is counted, never timed."""

    seconds: float = DEFAULT_PLAN_SECONDS

    @property
    def rungs(self) -> tuple[Effort, ...]:
        """Efforts of the searches that this one is spent on, of which the best plan is taken.

        Ensures: all of less effort from two seconds on are among them: more never gives a slower plan.
        """
        spent = accumulate(_RUNGS)
        fitting = (rung for rung, seconds in zip(_RUNGS, spent, strict=True) if seconds <= self.seconds)
        return tuple(map(Effort, fitting)) or (self,)

    @property
    def comparing(self) -> Effort:
        """For choosing among graphs: the same from the usual effort on, as is what plans are made of."""
        return Effort(min(self.seconds, DEFAULT_PLAN_SECONDS))

    def evaluations(self, kernel_count: int) -> int:
        """Simulations for one budget, of the several that are searched."""
        kernels = max(kernel_count, 1)
        share = self.seconds * _SIMULATED_KERNELS_PER_SECOND / _SEARCHES / kernels
        return int(min(share, _EVALUATIONS_PER_KERNEL * kernels))

    @property
    def moved_kernels(self) -> float:
        """Simulated kernels that a round of single moves may take."""
        return self.seconds * _SIMULATED_KERNELS_PER_SECOND / _SEARCHES

    @property
    def placed_steps(self) -> float:
        """Steps of all plans together that a round of single moves may place."""
        return self.seconds * _PLACED_STEPS_PER_SECOND / _ROUNDS_OF_MOVES

    @property
    def budget_step(self) -> float:
        """Ratio of the budgets that plans are searched for, at most: less of a budget is left unused."""
        return 1 + min(max(_STEP_SECONDS / self.seconds, _SMALLEST_STEP), _LARGEST_STEP)

    @property
    def packing(self) -> float:
        """For the places of the buffers of the plan that is taken: a share of the usual effort."""
        return min(1.0, self.seconds * _PACKING_PER_SECOND)

    @property
    def tightening(self) -> float:
        """The same for a plan that may be replaced by the next one."""
        return _TIGHTENING * self.packing

    @property
    def fitting(self) -> float:
        """The same for what a search has found, which may not fit once it is packed."""
        return _FITTING * self.packing

    @property
    def of_proof(self) -> float:
        """For the exact solver, in its own unit of several seconds; 0: do without."""
        return self.seconds / _SECONDS_PER_PROOF_UNIT if self.seconds >= _PROOF_SECONDS else 0.0


class Watcher(Protocol):
    """Hears of plans while they are searched for, and may end the search by raising an exception."""

    def found(self, context: PlanningContext, placed: Any) -> None:
        """A `PlacedPlan`."""

    def check(self) -> None:
        """Called where the search may end."""


class Unwatched:
    """Nobody: the search goes on to its end."""

    def found(self, context: PlanningContext, placed: Any) -> None:
        pass

    def check(self) -> None:
        pass


UNWATCHED = Unwatched()


@dataclass(frozen=True, slots=True)
class Unheard:
    """Hears of no plan, where those of another graph are searched for; the search may end all the same."""

    watcher: Watcher

    def found(self, context: PlanningContext, placed: Any) -> None:
        pass

    def check(self) -> None:
        self.watcher.check()


@dataclass(frozen=True)
class PlanningContext:
    """One graph on one machine, with everything that stays the same while budgets and decisions vary."""

    graph: Graph
    machine: Machine
    pins: Pins = field(default_factory=lambda: NO_PINS, hash=False)
    """Devices of kernels by name."""
    order: tuple[int, ...] | None = None
    """Positions of the graph's kernels as each device runs them; None: in an order that needs few bytes."""
    effort: Effort = Effort()
    host_bytes: int | None = None
    """What a plan may hold of the host's memory, if one is found that does with so little; None: any."""
    devices: tuple[Device, ...] = (Device.GPU, Device.CPU)
    """Those of the target, the GPU first."""
    watch: Watcher = field(default=UNWATCHED, compare=False)
    second: frozenset[str] = frozenset()
    """Kernels that are meant for the CPU beside their counterparts on the GPU."""

    @cached_property
    def problem(self) -> Problem:
        """The graph as numbers, kernels in order, with a budget of 0 bytes: to be replaced."""
        order = best_order(self.graph) if self.order is None else self.order
        pins, second = self.pins, self.second
        return problem_of(self.graph, self.machine, 0, order=order, pins=pins, second=second)
