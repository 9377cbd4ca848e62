"""What a bound on time is made of: how much of it each lane's work accounts for.

The optimum of the relaxation grows in proportion with all times, so it is the sum over the lanes of its
derivatives by their times, each in units of itself (Euler's theorem for homogeneous functions). The
derivative of an optimum is that of the Lagrange function at the solution and its multipliers (Milgrom and
Segal, Econometrica 70, 2002): the programme is written down again with a lane's times a little longer, and
not solved. A lane that nothing waits for has multipliers of zero, however long it is busy.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from hybridc.ir import Lane
from hybridc.passes.planner.bounds.bound import can_be_planned, simple_time_bound_us
from hybridc.passes.planner.bounds.linear import LinearProgramme, Vector, minimise, row_values
from hybridc.passes.planner.bounds.relaxation import relax
from hybridc.passes.planner.model.problem import Problem

_LONGER = 1e-4
"""By this share a lane's times are changed: rates of copies are not linear in them, but nearly."""
_LEAST = 0.005
"""Parts of a bound that are smaller are left out: what solvers leave of nothing."""


@dataclass(frozen=True, slots=True)
class BoundPart:
    """The share of a bound that a lane accounts for."""

    lane: Lane
    us: float
    """So much the bound would fall if the lane's steps took no time, as far as it falls in proportion."""
    copied_bytes: int
    """By a lane of copies in this time, at the rate of its largest copy; 0 of one of kernels."""


def bound_parts(problem: Problem, *, again: Collection[int] = ()) -> tuple[BoundPart, ...]:
    """The lanes that bound the makespan of all plans, the largest part first; `again` as in `time_bound`.

    Their parts sum up to the bound of the relaxation, but for what is left out. Empty if there is no plan, or
    nothing takes time.
    """
    unit_us = simple_time_bound_us(problem)
    if not can_be_planned(problem) or unit_us == 0:
        return ()
    programme = relax(problem, unit_us=unit_us, gpu_again=again, shared=True).programme
    found = minimise(programme)
    if not found.values.size:
        return ()
    before = _lagrange(programme, found.values, found.multipliers)
    parts = []
    for lane in Lane:
        longer = relax(_with_longer(problem, lane), unit_us=unit_us, gpu_again=again, shared=True).programme
        change = _lagrange(longer, found.values, found.multipliers) - before
        us = change / _LONGER * unit_us
        if us > _LEAST * found.bound * unit_us:
            parts.append(BoundPart(lane, us, _copied_bytes(problem, lane, us)))
    return tuple(sorted(parts, key=lambda part: -part.us))


def _lagrange(programme: LinearProgramme, values: Vector, multipliers: Vector) -> float:
    """The sum of multiplied violations of rows, each at the side that its multiplier is for."""
    row_lower, row_upper = np.array(programme.row_lower), np.array(programme.row_upper)
    sides = np.where(multipliers > 0, row_lower, np.where(multipliers < 0, row_upper, 0.0))
    usable = np.isfinite(sides)
    return math.fsum(((sides - row_values(programme, values)) * multipliers)[usable].tolist())


def _with_longer(problem: Problem, lane: Lane) -> Problem:
    """The problem with one lane's steps a little longer."""

    def times_us(of: tuple[float, ...], own: Lane) -> tuple[float, ...]:
        return tuple(us * (1 + _LONGER) for us in of) if own is lane else of

    return replace(
        problem,
        gpu_us=times_us(problem.gpu_us, Lane.GPU),
        cpu_us=times_us(problem.cpu_us, Lane.CPU),
        h2d_us=times_us(problem.h2d_us, Lane.H2D),
        d2h_us=times_us(problem.d2h_us, Lane.D2H),
    )


def _copied_bytes(problem: Problem, lane: Lane, us: float) -> int:
    if lane in (Lane.GPU, Lane.CPU):
        return 0
    times_us = problem.h2d_us if lane is Lane.H2D else problem.d2h_us
    size_bytes, copy_us = max(zip(problem.size_bytes, times_us, strict=True))
    return round(us * size_bytes / copy_us) if copy_us > 0 else 0
