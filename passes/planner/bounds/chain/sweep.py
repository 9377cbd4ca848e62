"""The dynamic programme of chain.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

import numpy as np
from numpy.typing import NDArray

from hybridc.passes.planner.bounds.chain.frontier import Grid, Vector, most_link_us
from hybridc.passes.planner.bounds.chain.stages import ChainStage, Counted

WHOLE = 4
"""Kernels of a stage that are on one device, those with most weights; others take their faster time."""

State = tuple[int | None, frozenset[int]]
"""Whether the last kernel ran on the GPU, if it was one only; gaps whose tensors stay."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Plans whose resident weights, of those that count, have a number of bytes, and some of them given."""

    least_bytes: float
    most_bytes: float
    resident: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    price: float = 0.0
    """us per byte that gave the best bound."""
    bound_us: float = 0.0


class Sweep:
    """The dynamic programme for several cells at once: one row of each array for each cell."""

    def __init__(self, counted: Counted, cells: Sequence[Cell], points: int) -> None:
        self.counted, self.problem, self.cells = counted, counted.problem, cells
        self.least = np.array([cell.least_bytes for cell in cells])
        copies = counted.all_copies
        budget = self.problem.budget_bytes
        self.ahead_us = [
            most_link_us(c, budget - self.least) for c in (copies, *(s.to_come for s in counted.stages))
        ]
        """How far the link can be ahead before each stage, and in the end."""
        self.grid = Grid(points, self.ahead_us[0])
        self.limits: dict[tuple[int, frozenset[int], int], Vector] = {}
        self.free_bytes = np.array([cell.most_bytes - self._size(cell.resident) for cell in cells])
        """For resident weights that are not given."""
        self.pins = [list(self._pins(k)) for k in range(self.problem.kernel_count)]

    def run(self, price: Vector) -> Vector:
        """A bound for each cell, from a price in us per byte for each."""
        self.price = price[:, None]
        states: dict[State, Vector] = {
            (None, frozenset()): self.grid.within(self.grid.waiting(), self.ahead_us[0])
        }
        for i, stage in enumerate(self.counted.stages):
            after: dict[State, Vector] = {}
            for state, frontier in states.items():
                step = (
                    self._single(i, stage, state, frontier)
                    if len(stage.kernels) == 1
                    else (self._several(i, stage, state, frontier))
                )
                for key, value in step:
                    value = self.grid.within(value, self.ahead_us[i + 1])
                    after[key] = np.minimum(after[key], value) if key in after else value
            states = after
        return self._end(states) - price * self.free_bytes

    def _end(self, states: dict[State, Vector]) -> Vector:
        last, problem = self.counted.stages[-1].kernels[-1], self.problem
        out_us = math.fsum(problem.d2h_us[t] for t in problem.outputs[last] if problem.wanted_on_host[t])
        ends = [value[:, 0] + (out_us if on_gpu else 0.0) for (on_gpu, _), value in states.items()]
        return np.asarray(np.min(ends, axis=0)) if ends else np.full(len(self.cells), math.inf)

    def _single(
        self, i: int, stage: ChainStage, state: State, frontier: Vector
    ) -> Iterator[tuple[State, Vector]]:
        """A kernel that all others come before or after."""
        (k,), problem, counted, grid = stage.kernels, self.problem, self.counted, self.grid
        on_gpu, stays = state
        behind = stays.difference(counted.ending[k])
        if problem.cpu_us[k] < math.inf:
            down_us = (
                counted.passed_us(stage.before, k, False) if stage.before is not None and on_gpu else 0.0
            )
            value = grid.after(frontier, down_us + problem.cpu_us[k])
            # a tensor that lay on the GPU may go on to do so
            makers = {e: problem.producer[problem.gaps[e].tensor] for e in counted.starting[k]}
            for more in _subsets([e for e, maker in makers.items() if maker != k]):
                yield (0, behind.union(more)), value
        if counted.fits(k):
            if stage.before is not None and on_gpu == 0:
                up_us = counted.passed_us(stage.before, k, True)
                # a copy keeps the link busy; a second run does not
                may_repeat = stage.before in counted.again
                frontier = grid.after(frontier, up_us) if may_repeat else frontier + up_us
            tensors = [problem.gaps[e].tensor for e in counted.ending[k] if e not in stays]
            back_us = math.fsum(map(counted.link_us, tensors))
            value = self._on_gpu(i, k, frontier, back_us, self._staying_bytes(behind))
            for more in _subsets(counted.starting[k]):
                yield (1, behind.union(more)), value

    def _several(
        self, i: int, stage: ChainStage, state: State, frontier: Vector
    ) -> Iterator[tuple[State, Vector]]:
        """Kernels between two such: some on given devices, the other ones free."""
        counted, (on_gpu, stays) = self.counted, state
        weight = {k: sum(map(counted.size, counted.weights[k])) for k in stage.kernels}
        whole = sorted(sorted(stage.kernels, key=lambda k: (-weight[k], k))[:WHOLE])
        can = [[self.problem.cpu_us[k] < math.inf, counted.fits(k)] for k in whole]
        for devices in product((0, 1), repeat=len(whole)):
            if all(possible[device] for possible, device in zip(can, devices, strict=True)):
                placed = dict(zip(whole, devices, strict=True))
                value = self._placed(i, stage, placed, on_gpu, frontier, self._staying_bytes(stays))
                yield (None, stays), value

    def _placed(
        self,
        i: int,
        stage: ChainStage,
        placed: dict[int, int],
        on_gpu: int | None,
        frontier: Vector,
        staying: int,
    ) -> Vector:
        problem = self.problem
        kernels = [k for k, gpu in placed.items() if gpu]
        cpu_us = math.fsum(problem.cpu_us[k] for k, gpu in placed.items() if not gpu)
        least_us = max(cpu_us, self._longest_path_us(stage, placed, on_gpu))
        if least_us <= math.fsum(problem.gpu_us[k] for k in kernels):
            for k in kernels:
                frontier = self._on_gpu(i, k, frontier, 0.0, staying)
            return frontier
        # the link works on beside: only that what is needed has come in the end
        best = np.full_like(frontier, math.inf)
        for pins in product(*(self.pins[k] for k in kernels)):
            link_us = math.fsum(pin.link_us for pin in pins)
            value = self.grid.after_all(frontier, link_us, least_us, self.ahead_us[i])
            for pin in pins:
                value = value + self.price * pin.priced
                value[~pin.allowed] = math.inf
            best = np.minimum(best, value)
        return best

    def _longest_path_us(self, stage: ChainStage, placed: dict[int, int], on_gpu: int | None) -> float:
        """From the end of the kernel before; kernels that are not placed take their faster time."""
        problem, device = self.problem, dict(placed)
        end_us: dict[int, float] = {}
        if stage.before is not None:
            end_us[stage.before] = 0.0
            device |= {} if on_gpu is None else {stage.before: on_gpu}
        for k in stage.kernels:
            start_us = 0.0
            for maker in {problem.producer[t] for t in problem.inputs[k]} & end_us.keys():
                is_passed = maker in device and k in device and device[maker] != device[k]
                passed_us = self.counted.passed_us(maker, k, bool(device[k])) if is_passed else 0.0
                start_us = max(start_us, end_us[maker] + passed_us)
            times_us = problem.cpu_us[k], problem.gpu_us[k]
            end_us[k] = start_us + (times_us[device[k]] if k in device else min(times_us))
        return max(end_us.values())

    def _staying_bytes(self, gaps: frozenset[int]) -> int:
        return sum(self.counted.size(self.problem.gaps[e].tensor) for e in gaps)

    def _on_gpu(self, i: int, k: int, frontier: Vector, back_us: float, staying: int) -> Vector:
        """Run a kernel on the GPU, with the best choice of its weights that are resident."""
        best = np.full_like(frontier, math.inf)
        for pin in self.pins[k]:
            limit_us = self._limit_us(i, k, pin, staying)
            value = self.grid.after_kernel(frontier, back_us + pin.link_us, self.problem.gpu_us[k], limit_us)
            value = value + self.price * pin.priced
            value[~pin.allowed] = math.inf
            best = np.minimum(best, value)
        return best

    def _limit_us(self, i: int, k: int, pin: _Pin, staying: int) -> Vector:
        """How far the link can be ahead while a kernel runs; negative if it has no room at all."""
        key = (k, pin.weights, staying)
        if key not in self.limits:
            room = self.problem.budget_bytes - self.counted.least_bytes[k] - pin.beside - staying
            copies = self.counted.stages[i].to_come
            self.limits[key] = np.where(room < 0, -1.0, most_link_us(copies, room))
        return self.limits[key]

    def _pins(self, k: int) -> Iterator[_Pin]:
        counted, problem = self.counted, self.problem
        weights = frozenset(counted.weights[k])
        # these may be resident, too, and are part of the working set
        other = sum(counted.size(t) for t in problem.inputs[k] if problem.is_weight[t] and t not in weights)
        for resident in map(frozenset, _subsets(counted.weights[k])):
            streamed, size = weights - resident, self._size(resident)
            allowed, priced, beside = [], [], []
            for cell in self.cells:
                allowed.append(
                    size <= cell.most_bytes and not (resident & cell.streamed or streamed & cell.resident)
                )
                priced.append(self._size(resident - cell.resident))
                least = max(cell.least_bytes, self._size(resident | cell.resident))
                beside.append(max(least - size - other, 0.0))
            link_us = counted.inputs_us[k] + math.fsum(map(counted.link_us, streamed))
            yield _Pin(resident, link_us, np.array(allowed), np.array(priced)[:, None], np.array(beside))

    def _size(self, tensors: frozenset[int]) -> int:
        return sum(map(self.counted.size, tensors))


@dataclass(frozen=True, slots=True)
class _Pin:
    """A choice of a kernel's weights that are resident; arrays are by cell."""

    weights: frozenset[int]
    link_us: float
    """Of the other ones."""
    allowed: NDArray[np.bool_]
    priced: Vector
    """Bytes of those that are not resident anyway."""
    beside: Vector
    """Bytes at least of resident weights of other kernels."""


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))
