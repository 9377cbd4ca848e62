"""What the bound of chain.py reads off a problem: stages of kernels, and the copies that count."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.structure import cuts, smallest_working_set_bytes

LATENCY = 1.15
"""Copies count at most so many times what their bytes take: else latencies look like bytes that lie there."""
MOSTLY_LATENCY = 3.0
"""Tensors whose copies take so many times what their bytes take are left out."""
STAYING = 3
"""Results, the largest, of which it is decided whether they stay over other kernels."""
WEIGHTS = 3
"""Weights of a kernel that count, the largest."""


@dataclass(frozen=True, slots=True)
class ChainStage:
    """A kernel that all others come before or after, or those between two such."""

    kernels: tuple[int, ...]
    before: int | None
    """The kernel of the stage before, if it has one only."""
    to_come: tuple[tuple[int, float], ...]
    """Bytes and link time of each copy that may be made for later stages."""


def stages_of(problem: Problem) -> list[list[int]]:
    """Kernels that all others come before or after by themselves, and those between two such together."""
    single = set(cuts(problem))
    stages: list[list[int]] = []
    for kernel in range(problem.kernel_count):
        if kernel in single or not stages or stages[-1][-1] in single:
            stages.append([])
        stages[-1].append(kernel)
    return stages


class Counted:
    """Stages of a problem, and the copies that count."""

    def __init__(self, problem: Problem, again: Collection[int]) -> None:
        self.problem, self.again = problem, frozenset(again)
        rates = [b / us for b, us in zip(problem.size_bytes, problem.h2d_us, strict=True) if b and us > 0]
        self.us_per_byte = 1 / max(rates, default=math.inf)
        """Of the link at its best."""
        groups = stages_of(problem)
        self.stage_of = {kernel: i for i, kernels in enumerate(groups) for kernel in kernels}
        self.is_single = [len(kernels) == 1 for kernels in groups]
        first = {t: uses[0] for t, uses in enumerate(problem.uses) if uses and self._counts(t)}
        kernels = range(problem.kernel_count)
        self.weights = [
            sorted(
                (t for t in problem.inputs[k] if problem.is_weight[t] and first.get(t) == k), key=self._order
            )[:WEIGHTS]
            for k in kernels
        ]
        self.largest_weights = sorted(chain(*self.weights), key=self._order)
        self.inputs_us = [
            math.fsum(
                self.link_us(t)
                for t in problem.inputs[k]
                if problem.producer[t] == BEFORE_ALL and not problem.is_weight[t] and first.get(t) == k
            )
            for k in kernels
        ]
        self.staying = self._gaps_that_may_stay()
        self.starting = [[e for e in self.staying if problem.gaps[e].start == k] for k in kernels]
        self.ending = [[e for e in self.staying if problem.gaps[e].end == k] for k in kernels]
        self.least_bytes = [smallest_working_set_bytes(problem, k) for k in kernels]
        self.all_copies, self.stages = self._stages(groups, first)

    def size(self, tensor: int) -> int:
        """Aligned bytes of a tensor."""
        return self.problem.size_bytes[tensor]

    def link_us(self, tensor: int) -> float:
        """What a copy to the GPU counts."""
        return min(self.problem.h2d_us[tensor], LATENCY * self.size(tensor) * self.us_per_byte)

    def passed_us(self, maker: int, user: int, to_gpu: bool) -> float:
        """How long a kernel waits at least for results made on the other device."""
        copy_us = self.problem.h2d_us if to_gpu else self.problem.d2h_us
        us = math.fsum(copy_us[t] for t in self.problem.inputs[user] if self.problem.producer[t] == maker)
        return min(us, self.problem.gpu_us[maker]) if to_gpu and maker in self.again else us

    def fits(self, kernel: int) -> bool:
        """Whether a kernel can run on the GPU."""
        return (
            self.problem.gpu_us[kernel] < math.inf and self.least_bytes[kernel] <= self.problem.budget_bytes
        )

    def _order(self, tensor: int) -> tuple[int, int]:
        return -self.size(tensor), tensor

    def _counts(self, tensor: int) -> bool:
        bytes_us = self.size(tensor) * self.us_per_byte
        return bytes_us > 0 and self.problem.h2d_us[tensor] <= MOSTLY_LATENCY * bytes_us

    def _gaps_that_may_stay(self) -> list[int]:
        """Gaps of results over other stages, from one single kernel to another."""
        problem, live = self.problem, [0] * len(self.is_single)
        found: list[int] = []
        for e in sorted(range(len(problem.gaps)), key=lambda e: self._order(problem.gaps[e].tensor)):
            gap = problem.gaps[e]
            maker = problem.producer[gap.tensor]
            if (
                maker in (BEFORE_ALL, *self.again)
                or problem.is_weight[gap.tensor]
                or not self._counts(gap.tensor)
            ):
                continue
            since, until = self.stage_of[gap.start], self.stage_of[gap.end]
            if until <= since + 1 or not (self.is_single[since] and self.is_single[until]):
                continue
            if max(live[since:until]) < STAYING:
                found.append(e)
                live[since:until] = [count + 1 for count in live[since:until]]
        return found

    def _stages(
        self, groups: list[list[int]], first: dict[int, int]
    ) -> tuple[tuple[tuple[int, float], ...], list[ChainStage]]:
        problem = self.problem
        to_come: list[tuple[int, float]] = []
        stages: list[ChainStage] = []
        for i, kernels in reversed(list(enumerate(groups))):
            before = groups[i - 1][0] if i and self.is_single[i - 1] else None
            stages.append(ChainStage(tuple(kernels), before, tuple(to_come)))
            for k in kernels:
                tensors = [problem.gaps[e].tensor for e in self.ending[k]] + self.weights[k]
                tensors += [
                    t
                    for t in problem.inputs[k]
                    if problem.producer[t] == BEFORE_ALL and not problem.is_weight[t] and first.get(t) == k
                ]
                to_come += [(self.size(t), self.link_us(t)) for t in tensors]
        return tuple(to_come), stages[::-1]
