"""Bounds: no plan of a problem is faster, and none needs fewer bytes on the GPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from hybridc.passes.planner.bounds.linear import minimise
from hybridc.passes.planner.bounds.relaxation import relax
from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.structure import smallest_working_set_bytes

MOST_RELAXED_KERNELS = 4000
"""Kernels up to which the linear programme is solved: of more it takes minutes."""
# The simplex method takes about four times as long for twice the kernels. Below this it is faster, and ends
# at a vertex, whose whole numbers are what a search begins with.
_MOST_SIMPLEX_KERNELS = 1000
"""Kernels up to which the simplex method solves it; above, interior points do."""


# Sums of the same times in another order differ by some 1e-13.
ROUNDING = 1e-9
"""A share of a time by which it may seem to exceed its bound."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A bound on time, and the fractional plan that reaches it: what to try first in a search."""

    bound_us: float
    """No plan is faster. Infinite if there is no plan."""
    on_gpu: tuple[float, ...]
    """Per kernel, 0 to 1."""
    keep: tuple[float, ...]
    """Per gap, 0 to 1. See `Decisions.keep`."""


def time_bound(
    problem: Problem,
    *,
    recompute: bool = False,
    again: Collection[int] = (),
    shared: bool = False,
    method: str | None = None,
    iterations: int | None = None,
    nodes: int = 0,
) -> Relaxation:
    """Bound the makespan of all plans in which each device runs its kernels in the problem's order.

    With `recompute` also of plans in which kernels run again, after their first run has ended; with `again`
    of those in which these kernels run again on the GPU. With `shared` of plans that are replayed, in which
    lanes slow each other down; the simulation, which guesses what they lose, may say less than that. `nodes`
    > 0 spends a branch and bound over that many nodes on tightening it. Of more than `MOST_RELAXED_KERNELS`
    kernels the simple bound alone is given, without a plan. `method` is one of `minimise`'s, by default the
    one that is faster for so many kernels.
    Deterministic; the effort is limited by `iterations` of the solver and by `nodes`.
    """
    return _time_bound(problem, recompute, frozenset(again), shared, method, iterations, nodes)


# searches of rising effort ask about the same budgets
@lru_cache(maxsize=64)
def _time_bound(
    problem: Problem,
    recompute: bool,
    again: frozenset[int],
    shared: bool,
    method: str | None,
    iterations: int | None,
    nodes: int,
) -> Relaxation:
    if not can_be_planned(problem):
        return Relaxation(math.inf, (), ())
    # also the unit of time below: the programme's numbers are near one then
    simple_us = simple_time_bound_us(problem)
    if problem.kernel_count > MOST_RELAXED_KERNELS:
        return Relaxation(simple_us, (), ())
    if simple_us == 0:
        return Relaxation(0.0, (1.0,) * problem.kernel_count, (1.0,) * len(problem.gaps))
    every = range(problem.kernel_count)
    model = relax(
        problem,
        unit_us=simple_us,
        # on the CPU a kernel runs again only with `recompute`: repeats of a problem are on the GPU
        gpu_again=every if recompute else again,
        cpu_again=every if recompute else (),
        shared=shared,
    )
    usual = "simplex" if problem.kernel_count <= _MOST_SIMPLEX_KERNELS else "ipm"
    found = minimise(
        model.programme,
        method=method or usual,
        iterations=iterations,
        integers=(*model.on_gpu, *model.keep) if nodes else (),
        nodes=nodes,
    )
    # no solver is trusted: without multipliers its bound may be worse than the simple one
    bound_us = max(simple_us, found.bound * simple_us)
    if not found.values.size:
        return Relaxation(bound_us, (), ())
    on_gpu, keep = found.values[model.on_gpu], found.values[model.keep]
    return Relaxation(bound_us, tuple(on_gpu.tolist()), tuple(keep.tolist()))


def meets(us: float, bound_us: float) -> bool:
    """Whether nothing can be faster than a time in us for which there is a bound, but for rounding."""
    return us <= bound_us * (1 + ROUNDING)


def can_be_planned(problem: Problem) -> bool:
    """Whether there is a plan: each kernel runs on the CPU, or on the GPU with no more than the budget."""
    return all(
        problem.cpu_us[k] < math.inf
        or (problem.gpu_us[k] < math.inf and smallest_working_set_bytes(problem, k) <= problem.budget_bytes)
        for k in range(problem.kernel_count)
    )


def simple_time_bound_us(problem: Problem) -> float:
    """What needs no solver: the critical path, each kernel on its faster device, and the work of each lane.

    The lanes' work is that of kernels that only one device may run, and the copies they make necessary; and
    that of all kernels, divided between the devices as well as can be. Holds for every order of the kernels.
    """
    best_us = [min(times) for times in zip(problem.gpu_us, problem.cpu_us, strict=True)]
    end_us: list[float] = []
    for kernel, inputs in enumerate(problem.inputs):
        makers = (problem.producer[t] for t in inputs if problem.producer[t] != BEFORE_ALL)
        end_us.append(best_us[kernel] + max((end_us[maker] for maker in makers), default=0.0))
    # what has no code for a device, or is pinned to the other one
    only_gpu = [us == math.inf for us in problem.cpu_us]
    only_cpu = [us == math.inf for us in problem.gpu_us]
    # fsum: rounded once, however many kernels there are
    gpu_us = math.fsum(us for us, only in zip(problem.gpu_us, only_gpu, strict=True) if only)
    cpu_us = math.fsum(us for us, only in zip(problem.cpu_us, only_cpu, strict=True) if only)
    h2d_us = math.fsum(
        problem.h2d_us[tensor]
        for tensor, uses in enumerate(problem.uses)
        if not problem.is_weight[tensor]
        and any(only_gpu[use] for use in uses)
        and (problem.producer[tensor] == BEFORE_ALL or only_cpu[problem.producer[tensor]])
    )
    d2h_us = math.fsum(
        problem.d2h_us[tensor]
        for tensor, producer in enumerate(problem.producer)
        if producer != BEFORE_ALL
        and only_gpu[producer]
        and (problem.wanted_on_host[tensor] or any(only_cpu[use] for use in problem.uses[tensor]))
    )
    divided_us = _divided_work_us(problem.gpu_us, problem.cpu_us)
    return max([*end_us, gpu_us, cpu_us, h2d_us, d2h_us, divided_us], default=0.0)


def _divided_work_us(gpu_us: Sequence[float], cpu_us: Sequence[float]) -> float:
    """What two devices need for all kernels, each of which runs on one of them, or in part on both.

    No plan takes less than its devices do on average, for any weights of the two; and a kernel adds at least
    the smaller of its weighted times to that. The best weights are those at which the kernel that is divided
    in the best division adds the same on either. Of a network that is cut up finely it is most of what the
    linear programme proves, which takes a minute for some thousand kernels.
    """
    both = [(g, c) for g, c in zip(gpu_us, cpu_us, strict=True) if 0 < g < math.inf and 0 < c < math.inf]
    on_gpu = math.fsum(us for us, other in zip(gpu_us, cpu_us, strict=True) if other == math.inf)
    on_cpu = math.fsum(cpu for cpu in cpu_us if cpu < math.inf)
    for gpu, cpu in sorted(both, key=lambda each: each[0] / each[1]):
        on_gpu, on_cpu = on_gpu + gpu, on_cpu - cpu
        if on_gpu >= on_cpu:
            weights = cpu / (gpu + cpu), gpu / (gpu + cpu)
            return math.fsum(
                min(weight * us for weight, us in zip(weights, times, strict=True) if us < math.inf)
                for times in zip(gpu_us, cpu_us, strict=True)
            )
    return 0.0


def bytes_bound(problem: Problem) -> int:
    """GPU bytes that every plan needs: the largest working set of the kernels that only the GPU may run."""
    return max(
        (smallest_working_set_bytes(problem, k) for k, us in enumerate(problem.cpu_us) if us == math.inf),
        default=0,
    )


def resident_bytes_bound(problem: Problem) -> int:
    """GPU bytes that every plan needs which runs on the GPU what it can and copies no tensor there twice.

    Weights are resident then, and another tensor stays from its first use there, or its making, to its last.
    """
    on_gpu = [us < math.inf for us in problem.gpu_us]
    weight_bytes = 0
    change = [0] * (problem.kernel_count + 1)
    for tensor, uses in enumerate(problem.uses):
        size_bytes = problem.size_bytes[tensor]
        events = [k for k in (problem.producer[tensor], *uses) if k != BEFORE_ALL and on_gpu[k]]
        if problem.is_weight[tensor]:
            weight_bytes += size_bytes if events else 0
            continue
        for start, end in pairwise(events):  # at its uses it is part of the working set
            change[start + 1] += size_bytes
            change[end] -= size_bytes
    largest = weight_bytes
    for kernel, beside in enumerate(accumulate(change[:-1])):
        if on_gpu[kernel]:
            # these are in the working set and among the resident weights
            own = sum(problem.size_bytes[t] for t in problem.inputs[kernel] if problem.is_weight[t])
            largest = max(largest, weight_bytes + beside + smallest_working_set_bytes(problem, kernel) - own)
    return largest
