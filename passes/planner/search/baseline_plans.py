"""The ways that others use to place a network, as plans that any budget with room for them can have.

What a search finds is no slower than they are in the simulation. Beside each other's copies steps may lose
more or less than that says, so they are compared once more as plans, by what `replay` makes of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize, repacked
from hybridc.passes.planner.model.contention import UNSHARED
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES, Problem
from hybridc.passes.planner.search.policies import all_cpu, layer_splits, offload_everything


@dataclass(frozen=True, slots=True)
class _Way:
    """Decisions of a baseline."""

    us: float
    """If memory were ample and nothing shared: no plan of them takes less."""
    first_bytes: int
    """The smallest budget for which the baseline may decide so."""
    decisions: Decisions


@dataclass(slots=True)
class BaselinePlans:
    """Plans of the baselines for some budgets, each made when it is first needed.

    A budget takes the best that it has room for, of those for no larger ones. So a larger one has all that a
    smaller one has, whatever else is asked for.
    """

    context: PlanningContext
    problem: Problem
    """Its own budget does not matter."""
    budgets: Sequence[int]
    """In bytes, rising; for each of them a baseline is what it would be if only that were asked for."""
    _ways: Sequence[_Way] = field(init=False)
    """The fastest first."""
    _placed: dict[tuple[Decisions, int], PlacedPlan] = field(default_factory=dict)
    """By decisions, and what they are planned with in bytes."""

    def __post_init__(self) -> None:
        first_bytes: dict[Decisions, int] = {}
        for b in self.budgets:
            # which kernels are too large for the GPU depends on the memory
            for decisions in _decisions_for(replace(self.problem, budget_bytes=b)):
                first_bytes.setdefault(decisions, b)
        ample = Core(replace(self.problem, budget_bytes=UNLIMITED_BYTES, contention=UNSHARED))
        ways = (_Way(ample.makespan_us(d), b, d) for d, b in first_bytes.items())
        self._ways = sorted(ways, key=attrgetter("us"))

    def faster(self, known: PlacedPlan, budget_bytes: int) -> PlacedPlan:
        """The fastest one that fits a budget in bytes, or `known` if none is faster than that."""
        best = known
        for way in self._ways:
            if way.us >= self._time_us(best):
                break
            if way.first_bytes > budget_bytes:
                continue
            for with_bytes in self._memories(way, budget_bytes):
                placed = self._plan(way, with_bytes)
                if placed.fits(budget_bytes, self.context.host_bytes) and placed.makespan_us < self._time_us(
                    best
                ):
                    best = placed
        return best

    def _time_us(self, placed: PlacedPlan) -> float:
        return placed.makespan_us if placed.fits_host(self.context.host_bytes) else inf

    def _memories(self, way: _Way, budget_bytes: int) -> list[int]:
        """What it is planned with: the least that it needs, what its fetches hold at most, and the budgets.

        Also those beyond both: offloads that have not ended leave more room there.
        """
        _, least_bytes = Core(replace(self.problem, budget_bytes=-1)).measure(way.decisions)
        _, ample_bytes = Core(replace(self.problem, budget_bytes=UNLIMITED_BYTES)).measure(way.decisions)
        found = {least_bytes, ample_bytes, *(b for b in self.budgets if b > least_bytes)}
        return sorted(b for b in found if b <= budget_bytes)

    def _plan(self, way: _Way, with_bytes: int) -> PlacedPlan:
        key = way.decisions, with_bytes
        if key not in self._placed:
            self.context.watch.check()
            problem = replace(self.problem, budget_bytes=with_bytes)
            placed = materialize(self.context, problem, way.decisions)
            self._placed[key] = repacked(self.context, placed, self.context.effort.tightening)
        return self._placed[key]


def _decisions_for(problem: Problem) -> Iterator[Decisions]:
    """What the baselines decide; of a split in two all that it chooses among."""
    yield all_cpu(problem, _untimed)
    yield offload_everything(problem, _untimed)
    yield from layer_splits(problem)


def _untimed(_: object) -> float:
    return 0.0
