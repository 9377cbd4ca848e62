"""What all of planning refers to: one graph on one machine, the user's wishes, and how long to search."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.options import DEFAULT_PLAN_SECONDS
from hybridc.passes.planner.model.order import best_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.model.problem import Problem, problem_of

# Neighbours are a factor of 1.41 apart, and each costs a search of its own; between the two that a budget
# lies in there is a search every three per cent, six on average.
POINTS_PER_OCTAVE = 2
"""Budgets that plans are searched for, for each factor of two in memory."""
OCTAVES = 6
"""From all memory down; few networks can do with less."""
_SEARCHES = 18
"""Of a budget, about: those of the grid points below, and of half of the finer ones."""

# Its exact value matters little, but it is part of every plan: another one gives other plans for the same
# seconds. A faster computer ends sooner instead of searching longer.
_SIMULATED_KERNELS_PER_SECOND = 6e6
"""Nominal speed of the search: turns seconds into a number of simulations, the same on every machine."""
_EVALUATIONS_PER_KERNEL = 8000
"""More than this many simulations for each kernel rarely improve a plan."""
_PROOF_SECONDS = 2.0
"""From this effort on the best plan of a small graph is proven: to begin takes a second of its own."""
# After as many seconds bounds/exact.py gives a unit of the solver's effort up.
_SECONDS_PER_PROOF_UNIT = 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, in seconds of a nominal machine: effort is counted, never timed."""

    seconds: float = DEFAULT_PLAN_SECONDS

    def evaluations(self, kernel_count: int) -> int:
        """Simulations for one budget, of the several that are searched."""
        kernels = max(kernel_count, 1)
        share = self.seconds * _SIMULATED_KERNELS_PER_SECOND / _SEARCHES
        return int(min(share / kernels, _EVALUATIONS_PER_KERNEL * kernels))

    @property
    def of_proof(self) -> float:
        """For the exact solver, in its own unit of several seconds; 0: do without."""
        return self.seconds / _SECONDS_PER_PROOF_UNIT if self.seconds >= _PROOF_SECONDS else 0.0


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

    @cached_property
    def problem(self) -> Problem:
        """The graph as numbers, kernels in order, with a budget of 0 bytes: to be replaced."""
        order = best_order(self.graph) if self.order is None else self.order
        return problem_of(self.graph, self.machine, 0, order=order, pins=self.pins)
