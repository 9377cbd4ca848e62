"""What lies between two cuts of a problem, and the least time of every choice of devices for it.

A cut is a kernel that every other one leads to or follows from. Between two of them a few kernels may run
side by side, which a linear programme that may split kernels between devices makes far too much of: three
products of an attention layer would run on both devices at once. For few kernels all choices can be listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.structure import cuts

# Every further one doubles the choices, each of which is a variable of the programme; inception modules have
# seven.
_MOST_INSIDE = 8
"""Kernels between two cuts up to which all choices are listed."""


Passing = Mapping[tuple[int, int], tuple[float, float]]
"""By maker and user of results: how long they take at least to the GPU and to the CPU, in microseconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Devices for the kernels of a segment."""

    on_gpu: tuple[bool, ...]
    least_us: float
    """From the end of the first cut to the end of the last no run takes less."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The kernels from one cut to the next, both included; the first or the last may have only one."""

    first: int | None
    """The cut that it begins with; None: the beginning of the run."""
    last: int | None
    """The cut that it ends with; None: the end of the run."""
    kernels: tuple[int, ...]
    """In order, the cuts included."""
    choices: tuple[Choice, ...]
    """Each names devices in the order of `kernels`."""


def segments(problem: Problem, passing: Passing, fits: Sequence[bool]) -> Iterator[Segment]:
    """Those that have few kernels between their cuts, and at least one.

    `fits` says which kernels may run on the GPU.
    """
    bounds = [None, *cuts(problem), None]
    for first, last in pairwise(bounds):
        start = -1 if first is None else first
        stop = problem.kernel_count if last is None else last
        if not 1 <= stop - start - 1 <= _MOST_INSIDE:
            continue
        kernels = tuple(range(max(start, 0), min(stop + 1, problem.kernel_count)))
        devices = [_devices(problem, k, fits[k]) for k in kernels]
        choices = tuple(
            Choice(on_gpu, _least_us(problem, passing, first, dict(zip(kernels, on_gpu, strict=True))))
            for on_gpu in product(*devices)
        )
        yield Segment(first, last, kernels, choices)


def _devices(problem: Problem, kernel: int, fits: bool) -> tuple[bool, ...]:
    """Whether on the GPU: what is possible. Of a kernel that can run nowhere, nothing."""
    on_cpu = (False,) if problem.cpu_us[kernel] < math.inf else ()
    return (*on_cpu, *((True,) if fits else ()))


def _least_us(problem: Problem, passing: Passing, first: int | None, on_gpu: Mapping[int, bool]) -> float:
    """Each kernel as soon as its device has run those before it and its inputs may be there.

    Exact but for memory, and for copies that wait for each other.
    """
    free_us = {False: 0.0, True: 0.0}
    end_us = {} if first is None else {first: 0.0}
    for kernel, gpu in on_gpu.items():
        if kernel == first:
            continue
        start_us = free_us[gpu]
        for maker in {problem.producer[t] for t in problem.inputs[kernel]} & end_us.keys():
            to_gpu_us, to_cpu_us = passing[maker, kernel]
            copy_us = 0.0 if on_gpu[maker] == gpu else to_gpu_us if gpu else to_cpu_us
            start_us = max(start_us, end_us[maker] + copy_us)
        end_us[kernel] = free_us[gpu] = start_us + (problem.gpu_us if gpu else problem.cpu_us)[kernel]
    return max(end_us.values())
