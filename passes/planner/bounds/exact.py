"""The fastest plan of a small problem, by proof: CP-SAT of OR-tools, which is optional.

Everything is decided at once and in time: devices, orders on all four lanes, when each tensor comes, stays
and goes, which weights are resident, what is overwritten. The solver works with whole numbers: durations
are rounded down, so that its bound is true; the plan found is then timed again with the real durations,
every job behind those it had to follow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hybridc.passes.planner.bounds.exact_process import ExactProcess
from hybridc.passes.planner.bounds.retime import GpuInterval, TickSchedule, decisions_of, run_of
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import SimulatedRun
from hybridc.passes.planner.model.structure import smallest_working_set_bytes

# Orders, devices and copies multiply: the time of a proof grows exponentially with the kernels.
LARGEST_KERNEL_COUNT = 14
"""Up to here an optimum is proven in seconds, as a rule."""
# Finer ticks tighten the bound (a job is rounded by less than one) and widen what the solver searches.
_TICKS = 1 << 20
"""Units of time in the longest plan considered."""
# Several times what a unit takes: it ends a proof on a computer that is too busy or slow.
_PATIENCE_S = 20.0
"""Seconds for each unit of effort after which the solver, which counts its effort itself, is given up."""
_PROCESS = ExactProcess()  # OR-tools and HiGHS cannot be loaded into one


@dataclass(frozen=True, slots=True)
class ExactSolution:
    """The best plan, or the best one found within the effort."""

    problem: Problem
    """The problem with its kernels in the order of the plan; what follows refers to this order."""
    order: tuple[int, ...]
    """The kernels' positions in the problem that was given."""
    decisions: Decisions
    run: SimulatedRun
    """What happens when: not what `simulate` makes of the decisions, which may fetch in another order."""
    bound_us: float
    """No plan is faster."""
    is_optimal: bool
    """Proven: no other plan is faster by more than rounding of times, about a millionth for each job."""


def has_solver() -> bool:
    """Whether OR-tools is installed (extra `exact`)."""
    return find_spec("ortools") is not None


def solve_exactly(
    problem: Problem,
    *,
    keep_order: bool = False,
    effort: float = 2.0,
    least_us: float = 0.0,
    known_us: float = math.inf,
) -> ExactSolution | None:
    """The fastest plan; None without OR-tools, if no plan fits the budget, or if none was found in time.

    With `keep_order` each device runs its kernels in the problem's order. `effort` is in CP-SAT's unit of
    deterministic time, several seconds. It helps much to know that there is a plan that takes `known_us`,
    and a little to know that none is faster than `least_us`. Deterministic.
    """
    if not has_solver():
        return None
    # the shorter the longest plan of interest, the finer a tick
    ticks = _Ticks.of(problem, min(known_us, _one_by_one_us(problem)))
    request = _request(problem, ticks) | {
        "keep_order": keep_order,
        "effort": effort,
        "least": max(0, ticks.floor(least_us) - 1),
    }
    answer = _PROCESS.ask(request, _PATIENCE_S * max(1.0, effort))
    if answer is None or answer["schedule"] is None:
        return None
    # jobs shorter than a tick take one: so much the solver's bound may be too high
    bound_us = max(least_us, (answer["bound"] - ticks.raised) * ticks.unit_us)
    return _timed(problem, answer["schedule"] | {"down": request["down"]}, bound_us, answer["is_optimal"])


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Whole numbers for times."""

    unit_us: float
    raised: int
    """So many jobs take less than a unit and were given one: the bound is too high by as many at most."""

    @staticmethod
    def of(problem: Problem, longest_us: float) -> _Ticks:
        times = [*problem.gpu_us, *problem.cpu_us, *problem.h2d_us, *problem.d2h_us]
        # not 0 where nothing takes time
        unit_us = max(longest_us / _TICKS, sys.float_info.min)
        short = sum(1 for us in times if us < unit_us)
        fetches = sum(len(uses) for t, uses in enumerate(problem.uses) if problem.h2d_us[t] < unit_us)
        return _Ticks(unit_us, short + fetches)

    def floor(self, us: float) -> int:
        """Rounded down, at least one, and clipped where it is longer than any plan of interest."""
        # so that jobs have an order; too long a job is excluded however long it is
        return max(1, math.floor(min(us / self.unit_us, 2.0 * _TICKS)))


def _one_by_one_us(problem: Problem) -> float:
    """A plan that takes this long exists, if any: one thing after the other."""
    kernels = [
        max((us for us in times if us < math.inf), default=0.0)
        for times in zip(problem.gpu_us, problem.cpu_us, strict=True)
    ]
    fetches = [problem.h2d_us[gap.tensor] for gap in problem.gaps]
    return math.fsum([*kernels, *fetches, *problem.d2h_us])


def _request(problem: Problem, ticks: _Ticks) -> dict[str, Any]:
    """The problem in whole numbers."""

    def on_gpu(k: int) -> int | None:
        fits = smallest_working_set_bytes(problem, k) <= problem.budget_bytes
        return ticks.floor(problem.gpu_us[k]) if problem.gpu_us[k] < math.inf and fits else None

    kernels = range(problem.kernel_count)
    return {
        "gpu": [on_gpu(k) for k in kernels],
        "cpu": [ticks.floor(us) if us < math.inf else None for us in problem.cpu_us],
        "up": [ticks.floor(us) for us in problem.h2d_us],
        "down": [ticks.floor(us) for us in problem.d2h_us],
        # room for all jobs that were given a unit
        "horizon": _TICKS + ticks.raised + 1,
        "inputs": problem.inputs,
        "outputs": problem.outputs,
        "workspace": problem.workspace_bytes,
        "may_overwrite": problem.may_overwrite,
        "size": problem.size_bytes,
        "is_weight": problem.is_weight,
        "wanted": problem.wanted_on_host,
        "budget": problem.budget_bytes,
    }


def reordered(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem with its kernels in another order: first the one at position `order[0]`."""

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[k] for k in order)

    return replace(
        problem,
        kernel_names=permuted(problem.kernel_names),
        gpu_us=permuted(problem.gpu_us),
        cpu_us=permuted(problem.cpu_us),
        inputs=permuted(problem.inputs),
        outputs=permuted(problem.outputs),
        workspace_bytes=permuted(problem.workspace_bytes),
        cpu_workspace_bytes=permuted(problem.cpu_workspace_bytes),
        may_overwrite=permuted(problem.may_overwrite),
    )


def _timed(problem: Problem, schedule: dict[str, Any], bound_us: float, is_optimal: bool) -> ExactSolution:
    """Kernels in order of their start, and everything at the earliest real time."""
    starts = schedule["start"]
    order = tuple(sorted(range(problem.kernel_count), key=lambda k: (starts[k], k)))
    place = {k: position for position, k in enumerate(order)}
    plan = TickSchedule(
        problem=reordered(problem, order),
        on_gpu=tuple(schedule["on_gpu"][k] for k in order),
        start=tuple(starts[k] for k in order),
        end=tuple(schedule["end"][k] for k in order),
        offload_start=dict(schedule["offloads"]),
        offload_ticks=tuple(schedule["down"]),
        intervals=tuple(
            GpuInterval(i["tensor"], i["fetched"], tuple(sorted(place[j] for j in i["uses"])))
            for i in schedule["intervals"]
        ),
        pinned=frozenset(schedule["pinned"]),
        taken={(place[k], source): output for k, output, source in schedule["overwritten"]},
    )
    run = run_of(plan)
    bound_us = min(bound_us, run.makespan_us)
    return ExactSolution(plan.problem, order, decisions_of(plan), run, bound_us, is_optimal)
