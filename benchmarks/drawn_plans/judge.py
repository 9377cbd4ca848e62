"""How good one plan is: its gap to the bound, the memory it uses, what it took, and what would better it."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import numpy as np

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel, Plan
from hybridc.machine import Machine
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.search.partition import first_plans
from hybridc.passes.planner.tighten_bound import with_tight_bound
from hybridc.report.explain import alternatives

OPEN_GAP = 0.02
"""From this gap on a plan has something to gain, so that memory left over counts against it."""
USED_SHARE = 0.97
"""So much of the budget it should use then."""
WORTH = 0.005
"""A single move that gains more, as a share of the time, should have been made by the planner."""
MEAN_WANTED, TAIL_WANTED, WORST_WANTED = 0.08, 0.20, 0.35
"""Of the gaps: the mean, the 90th percentile and the largest, at most."""
FIRST_WANTED = 2.0
"""Seconds until the first plan, at most."""
LATER_WANTED = 0.03
"""What the later effort may gain on average, as a share of the time."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One plan. Seconds are of CPU, of all threads and children: the same on a busy machine."""

    share: float
    budget_bytes: int
    arena_bytes: int
    kernels: int
    kernels_uncut: int
    time_us: float
    bound_us: float
    """That the planner gives along with the plan."""
    tight_bound_us: float
    """After `--bound-seconds` more; the same without."""
    seconds: float
    """Of `make_plans`; what chooses tilings comes on top, once for all budgets."""
    first_seconds: float
    """Until there was a plan, counted from when the times of the kernels are known."""
    first_time_us: float
    """Of the plan of a short search, which comes before tilings are chosen."""
    later_time_us: float | None
    """Of the plan that is found with more effort; None: it was not looked for."""
    best_move: str
    """Of those that `hybridc explain` lists for `moved_kernels` kernels the one that gains most."""
    best_move_us: float
    """Negative if it makes the run faster; 0 if no move is possible, or none was tried."""
    moved_kernels: int
    """So many had their moves tried."""

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is, at most."""
        return gap(self.time_us, self.tight_bound_us)

    @property
    def first_gap(self) -> float:
        """The same for the bound that comes along with the plan."""
        return gap(self.time_us, self.bound_us)

    @property
    def later_gain(self) -> float:
        """Share of the time that more effort gains."""
        return 0.0 if self.later_time_us is None else 1 - self.later_time_us / self.time_us

    @property
    def used(self) -> float:
        return self.arena_bytes / self.budget_bytes

    @property
    def move_gain(self) -> float:
        """Share of the time that the best move is predicted to gain."""
        return max(0.0, -self.best_move_us / self.time_us)

    def text(self) -> str:
        """One line."""
        return (
            f"{self.share:6.1%}  {self.time_us / 1e3:9.2f} ms  gap {self.gap:6.1%}  {self.used:6.1%} used"
            f"  {self.kernels:3} kernels  {self.seconds:5.1f} s of CPU"
            f" (first {self.first_seconds:.2f} s: {self.first_time_us / self.time_us:.2f} x)"
            f"  later {-self.later_gain:+.1%}  {self.best_move_us:+.0f} us: {self.best_move}"
        )

    def row(self) -> dict[str, object]:
        """As it is written down."""
        derived = ("gap", "first_gap", "used", "move_gain", "later_gain")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def judge(
    tilings: Sequence[Tiling],
    machine: Machine,
    all_bytes: int,
    share: float,
    seconds: float,
    bound_seconds: float,
    *,
    moved_kernels: int,
    later_seconds: float | None = None,
) -> Judgement:
    """Plan a network for a share of `all_bytes` with `seconds` of effort, and judge the plan.

    `tilings` are the ways to cut it up that are worth planning, the whole network first. The moves of at most
    `moved_kernels` kernels are tried, which are drawn. With `later_seconds` the network is planned once more,
    with so much effort.
    """
    budget_bytes, devices = int(all_bytes * share), (Device.GPU, Device.CPU)
    first_seconds, first_time_us = first_plan(tilings, machine, budget_bytes)
    start = cpu_seconds()
    [(tiling, plan)] = make_plans(tilings, machine, [budget_bytes], devices, effort=Effort(seconds))
    taken = cpu_seconds() - start
    later_time_us = None
    if later_seconds is not None:
        [(_, later)] = make_plans(tilings, machine, [budget_bytes], devices, effort=Effort(later_seconds))
        later_time_us = later.makespan_us
    tight = with_tight_bound(tiling, machine, plan, bound_seconds) if bound_seconds else plan
    moved = drawn_kernels(tiling.graph, moved_kernels)
    what, change_us = best_move(tiling.graph, plan, machine, moved)
    return Judgement(
        share=share,
        budget_bytes=budget_bytes,
        arena_bytes=plan.arena_bytes(Device.GPU),
        kernels=len(tiling.graph.kernels),
        kernels_uncut=len(tilings[0].graph.kernels),
        time_us=plan.makespan_us,
        bound_us=plan.time_bound_us,
        tight_bound_us=tight.time_bound_us,
        seconds=taken,
        first_seconds=first_seconds,
        first_time_us=first_time_us,
        later_time_us=later_time_us,
        best_move=what,
        best_move_us=change_us,
        moved_kernels=len(moved),
    )


def first_plan(tilings: Sequence[Tiling], machine: Machine, budget_bytes: int) -> tuple[float, float]:
    """Seconds of CPU until the compiler has a plan for a budget, and the time of this plan in us.

    Of the whole network, or where that does not fit of the first tiling that does.
    """
    start = cpu_seconds()
    for tiling in tilings:
        with suppress(PlanError):
            [placed] = first_plans(tiling.context(machine, Effort(), None), [budget_bytes])
            return cpu_seconds() - start, placed.makespan_us
    return math.inf, math.inf


def drawn_kernels(graph: Graph, count: int) -> list[Kernel]:
    """At most so many kernels of a graph, always the same ones."""
    return random.Random(len(graph.kernels)).sample(graph.kernels, min(count, len(graph.kernels)))


def best_move(graph: Graph, plan: Plan, machine: Machine, kernels: Sequence[Kernel]) -> tuple[str, float]:
    """Of all moves that `hybridc explain` lists for kernels the best one, and what it changes in us.

    The plan itself counts as no slower than it was predicted to be.
    """
    found = (
        (move.change_us, f"{kernel.name}: {move.what}")
        for kernel, move in alternatives(graph, plan, machine, kernels)
        if move.change_us is not None
    )
    change_us, what = min(found, default=(0.0, ""))
    return what, change_us


def cpu_seconds() -> float:
    """Of all threads so far and of children that have ended: unlike wall time the same on a busy machine."""
    return math.fsum(os.times()[:4])


def gap(time_us: float, bound_us: float) -> float:
    """How much slower than a bound, at most: 0.03 is three per cent; 0 where nothing takes time."""
    return time_us / bound_us - 1 if bound_us else 0.0


def is_idle(row: Judgement) -> bool:
    """Whether a plan that has something to gain leaves memory over."""
    return row.gap > OPEN_GAP and row.used < USED_SHARE


def is_as_wanted(rows: Sequence[Judgement]) -> bool:
    """Whether gaps, memory used, single moves, first plans and later gains are within limits."""
    gaps = np.array([row.gap for row in rows])
    later = [row.later_gain for row in rows if row.later_time_us is not None]
    return bool(
        gaps.mean() <= MEAN_WANTED
        and np.quantile(gaps, 0.9) <= TAIL_WANTED
        and gaps.max() <= WORST_WANTED
        and not any(map(is_idle, rows))
        and max(row.move_gain for row in rows) <= WORTH
        and max(row.first_seconds for row in rows) <= FIRST_WANTED
        and all(gain >= 0 for gain in later)
        and (not later or np.mean(later) <= LATER_WANTED)
    )


def spread(gaps: np.ndarray) -> str:
    return f"mean {gaps.mean():.1%}, 90th percentile {np.quantile(gaps, 0.9):.1%}, worst {gaps.max():.1%}"


def summary(rows: Sequence[Judgement]) -> list[str]:
    """What the issue of the planner's quality asks for, of all rows."""
    gaps, first = np.array([row.gap for row in rows]), np.array([row.first_gap for row in rows])
    moves = [row.move_gain for row in rows]
    seconds = [row.seconds for row in rows]
    later = np.array([row.later_gain for row in rows if row.later_time_us is not None])
    lines = [
        f"gap: {spread(gaps)}; to the bound that the planner gives along: {spread(first)}",
        f"{sum(map(is_idle, rows))} of {sum(row.gap > OPEN_GAP for row in rows)} plans with a gap above"
        f" {OPEN_GAP:.0%} use less than {USED_SHARE:.0%}",
        f"{sum(gain > WORTH for gain in moves)} of {len(rows)} have a move that gains more than {WORTH:.1%};"
        f" the best gains {max(moves):.2%}",
        f"planning: mean {np.mean(seconds):.1f} s of CPU, most {max(seconds):.1f} s;"
        f" the first plan after {np.mean([row.first_seconds for row in rows]):.2f} s,"
        f" most {max(row.first_seconds for row in rows):.2f} s",
    ]
    if later.size:
        lines.append(
            f"with the later effort {later.mean():.2%} faster on average, at most {later.max():.2%},"
            f" at least {later.min():.2%}, of {later.size} plans"
        )
    return lines
