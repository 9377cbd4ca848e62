"""Single decisions that could be others, and what comes of each: what `hybridc explain` lists, and the last
neighbourhood of the search.

A kernel runs on its other device, a weight is streamed instead of resident, another tensor fetched instead
of kept, or the reverse of these. What does not fit any more then is given up or moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem

ADAPTING = 4000
"""Simulations that fit the rest of a plan to a kernel on its other device."""
_TRYING = 60
"""As many tell which kernels are worth that."""
# What these few do not find, the next round may: it begins with a better plan.
_WORTH_ADAPTING, _MOST_ADAPTING = 6, 12
"""So many kernels, those that look best, are moved with all simulations: more in a small graph."""
# A device's move costs two dozen milliseconds in a graph of 600 kernels, of which each point would try all.
ROUND_KERNELS = 12e6
"""Simulated kernels that a round of moves may take at most: more than all moves of 160 kernels do."""
_SEEDS = range(1, 5)
"""Ways to give up something else that are tried before a change is said not to fit."""


class MoveKind(StrEnum):
    """What is decided otherwise."""

    DEVICE = "device"
    WEIGHT = "weight"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class Move:
    """One decision that is changed."""

    kind: MoveKind
    index: int
    """The kernel, the tensor that is a weight, or the gap."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes of a move."""

    decisions: Decisions
    makespan_us: float
    is_alone: bool
    """Nothing else had to be decided otherwise."""


def moves_of(problem: Problem, decisions: Decisions, kernel: int) -> Iterator[Move]:
    """What could be decided otherwise about a kernel and its tensors, whether it is possible or not."""
    yield Move(MoveKind.DEVICE, kernel)
    if decisions.on_cpu[kernel]:
        return
    for tensor in problem.inputs[kernel]:
        gap = problem.gap_at[kernel, tensor]
        start = problem.gaps[gap].start
        if problem.is_weight[tensor]:
            yield Move(MoveKind.WEIGHT, tensor)
        elif start != BEFORE_ALL and not decisions.on_cpu[start]:
            yield Move(MoveKind.GAP, gap)
    for tensor in problem.outputs[kernel]:
        for gap in problem.gaps_of[tensor][:1]:
            if not decisions.on_cpu[problem.gaps[gap].end]:
                yield Move(MoveKind.GAP, gap)


class Neighbourhood:
    """The moves of one plan, each by itself."""

    def __init__(self, core: Core, decisions: Decisions) -> None:
        """Requires: the decisions are feasible."""
        self.core, self.problem, self.decisions = core, core.problem, decisions

    def outcome(self, move: Move, evaluations: int = ADAPTING) -> Outcome | None:
        """The best that is found with one decision changed, or None if that does not fit.

        Of a move to another device that `evaluations` simulations find.
        """
        if move.kind is MoveKind.DEVICE:
            return self._on_other_device(move.index, evaluations)
        gaps = range(move.index, move.index + 1)
        return self._with_gaps(self.problem.gaps_of[move.index] if move.kind is MoveKind.WEIGHT else gaps)

    def is_kept(self, move: Move) -> bool:
        """Whether the weight is resident, or the tensor stays throughout the gap."""
        is_weight = move.kind is MoveKind.WEIGHT
        return self.decisions.keep[self.problem.gaps_of[move.index].start if is_weight else move.index]

    def has_code(self, kernel: int) -> bool:
        """Whether a kernel can run on its other device."""
        here_cpu = self.decisions.on_cpu[kernel]
        return (self.problem.gpu_us if here_cpu else self.problem.cpu_us)[kernel] < math.inf

    def _on_other_device(self, kernel: int, evaluations: int) -> Outcome | None:
        if not self.has_code(kernel):
            return None
        to_gpu = self.decisions.on_cpu[kernel]
        try:
            core = Core(_bound_to(self.problem, kernel, to_gpu), self.core)
            found = core.anneal(self._moved(kernel, to_gpu), evaluations, 1)
        except ValueError:
            return None
        return Outcome(*found, is_alone=False)

    def _with_gaps(self, gaps: range) -> Outcome | None:
        kept, keep = list(self.decisions.keep), not self.decisions.keep[gaps.start]
        kept[gaps.start : gaps.stop] = [keep] * len(gaps)
        changed = replace(self.decisions, keep=tuple(kept))
        us = self.core.makespan_us(changed)
        if us < math.inf:
            return Outcome(changed, us, is_alone=True)
        fitting = [self.core.repaired(changed, seed) for seed in _SEEDS]
        holding = [d for d in fitting if d is not None and all(d.keep[g] == keep for g in gaps)]
        timed = [Outcome(d, self.core.makespan_us(d), is_alone=False) for d in dict.fromkeys(holding)]
        return min(timed, key=lambda o: o.makespan_us, default=None)

    def _moved(self, kernel: int, to_gpu: bool) -> Decisions:
        """The kernel on the other device, and what it shares with kernels there kept there."""
        on_cpu = list(self.decisions.on_cpu)
        on_cpu[kernel] = not to_gpu
        keep = list(self.decisions.keep)
        for number, gap in enumerate(self.problem.gaps):
            touches = kernel in (gap.start, gap.end) and not self.problem.is_weight[gap.tensor]
            if touches and to_gpu:
                keep[number] = gap.start != BEFORE_ALL and not on_cpu[gap.start]
        return Decisions(tuple(on_cpu), tuple(keep))


def outcomes(
    core: Core, decisions: Decisions, *, thoroughly: bool = True, most_kernels: float = ROUND_KERNELS
) -> list[Outcome]:
    """What comes of each move by itself, the fastest first.

    As fast as the simulation has it. Of a graph for whose moves `most_kernels` simulated kernels are too few
    those are tried that can change most. The rest of the plan is fitted to kernels on another device by a
    few simulations, `thoroughly` with all of them to some kernels. Requires: the decisions are feasible.
    Deterministic.
    """
    # a third for each of three: kernels, copies, and to fit the plan to the best of the kernels
    simulations = int(most_kernels / max(1, core.problem.kernel_count) / 3)
    adapting = min(ADAPTING, simulations // _WORTH_ADAPTING)
    near = Neighbourhood(core, decisions)
    found: list[Outcome] = []
    tried: list[tuple[float, int]] = []

    def try_move(move: Move, evaluations: int) -> None:
        outcome = near.outcome(move, evaluations)
        if outcome is not None:
            found.append(outcome)
            if move.kind is MoveKind.DEVICE:
                tried.append((outcome.makespan_us, move.index))

    for move in _moves_within(core.problem, decisions, simulations):
        try_move(move, _TRYING)
    if not thoroughly:
        tried.clear()
    # of a kernel that leaves the CPU a few simulations tell little: much may have to make room for it
    leaving = [kernel for _, kernel in sorted(tried) if decisions.on_cpu[kernel]]
    staying = [kernel for _, kernel in sorted(tried) if not decisions.on_cpu[kernel]]
    worth = min(max(_WORTH_ADAPTING, simulations // ADAPTING), _MOST_ADAPTING)
    for kernel in (*leaving[: worth // 2], *staying, *leaving[worth // 2 :])[:worth]:
        try_move(Move(MoveKind.DEVICE, kernel), adapting)
    return sorted(found, key=lambda outcome: outcome.makespan_us)


def _moves_within(problem: Problem, decisions: Decisions, simulations: int) -> list[Move]:
    """Each move once, but no more than so many simulations try of the kernels, and of the copies: those of
    the longest kernels and copies. A repeat runs on the GPU or not at all: that is not another device."""
    once = [k for k in range(problem.kernel_count) if k not in problem.repeats]
    moves = list(dict.fromkeys(move for kernel in once for move in moves_of(problem, decisions, kernel)))

    def us(move: Move) -> float:
        if move.kind is MoveKind.DEVICE:
            return (problem.cpu_us if decisions.on_cpu[move.index] else problem.gpu_us)[move.index]
        return problem.h2d_us[move.index if move.kind is MoveKind.WEIGHT else problem.gaps[move.index].tensor]

    longest = sorted(moves, key=us, reverse=True)
    kernels = [move for move in longest if move.kind is MoveKind.DEVICE][: simulations // _TRYING]
    copies = [move for move in longest if move.kind is not MoveKind.DEVICE][:simulations]
    tried = {*kernels, *copies}
    return [move for move in moves if move in tried]


def _bound_to(problem: Problem, kernel: int, to_gpu: bool) -> Problem:
    """The problem with one kernel bound to a device."""

    def without(times_us: tuple[float, ...]) -> tuple[float, ...]:
        return (*times_us[:kernel], math.inf, *times_us[kernel + 1 :])

    if to_gpu:
        return replace(problem, cpu_us=without(problem.cpu_us))
    return replace(problem, gpu_us=without(problem.gpu_us))
