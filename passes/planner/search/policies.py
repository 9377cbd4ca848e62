"""Ways to decide: the ones that other systems use, and the ones that the search starts from.

A policy is a function from a problem, and a way to try decisions, to decisions. To compare a new one with
ours, write it here and name it in `BASELINES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import BEFORE_ALL, Gap, Problem

Evaluate = Callable[[Decisions], float]
"""Decisions -> predicted time of a run in microseconds; infinite if the bytes exceed the budget."""
Policy = Callable[[Problem, Evaluate], Decisions]

# Tenths, and one finer step where little is moved: each share is simulated, not annealed.
MOVED_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of all weights whose kernels go to the CPU."""
# 1.0 is HEFT itself; with larger ones a kernel goes to the CPU only where that ends it much earlier.
CPU_TIME_FACTORS = (1.0, 2.0, 4.0)
"""How many times longer than it does a kernel is taken to need on the CPU."""
# Every cut costs two simulations of the whole network: trying all takes quadratic time.
_COARSE_CUTS = 128
"""Of a network with more kernels than this not every cut is tried, but every one near the best of these."""
STREAMED_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of the weights on the GPU that are fetched in each run; few are worth more than half of them."""
# A lookup in a table reads some rows of it, and is three orders below.
IDLE_SHARE = 0.1
"""Of the time that a byte of weights saves on the GPU on average: kernels with less leave it."""
# Which one is best depends on how much is fetched; each costs one simulation, so several are tried.
RESERVES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Shares of the budget that a fill leaves to prefetching, which full memory has no room for."""


def all_cpu(problem: Problem, evaluate: Evaluate) -> Decisions:
    """Every kernel that has CPU code runs there; the others on the GPU, with nothing kept."""
    return with_gpu_kernels(problem, [math.isinf(us) for us in problem.cpu_us])


def layer_split(problem: Problem, evaluate: Evaluate) -> Decisions:
    """The best cut in two: one side on the GPU with all its tensors, the other on the CPU.

    As in llama.cpp's `--n-gpu-layers`. A kernel too large for the budget runs on the CPU on either side.
    """
    stride = -(-problem.kernel_count // _COARSE_CUTS) or 1
    coarse = range(0, problem.kernel_count + 1, stride)
    # coarse first, then all cuts near the best of them: 2 * 128 simulations and few more
    _, cut = min((evaluate(split), at) for at, split in _cut(problem, coarse))
    near = range(max(0, cut - stride), min(problem.kernel_count, cut + stride) + 1)
    return min((split for _, split in _cut(problem, near)), key=evaluate)


def layer_splits(problem: Problem) -> Iterator[Decisions]:
    """Cuts in two at some hundred places at most, head or tail on the GPU; see `layer_split`."""
    stride = -(-problem.kernel_count // _COARSE_CUTS) or 1
    yield from (split for _, split in _cut(problem, range(0, problem.kernel_count + 1, stride)))


def _cut(problem: Problem, cuts: Iterable[int]) -> Iterator[tuple[int, Decisions]]:
    everything = with_gpu_kernels(problem, kernels_that_fit(problem), keep=True)
    for cut in cuts:
        head, tail = everything.on_cpu[:cut], everything.on_cpu[cut:]
        # the head on the GPU, or the tail
        yield cut, Decisions((*head, *(True,) * len(tail)), everything.keep)
        yield cut, Decisions(((True,) * cut + tail), everything.keep)


def offload_everything(problem: Problem, evaluate: Evaluate) -> Decisions:
    """Every kernel on the GPU; only what the very next kernel reads stays, all else goes and is prefetched.

    As in vDNN (Rhu et al., MICRO 2016), with the weights streamed, too.
    """
    on_gpu = kernels_that_fit(problem)
    keep = [gap.start != BEFORE_ALL and gap.end == gap.start + 1 for gap in problem.gaps]
    return decisions_of(problem, on_gpu, keep)


BASELINES: Mapping[str, Policy] = {
    "all_cpu": all_cpu,
    "layer_split": layer_split,
    "offload_everything": offload_everything,
}
"""What the planner is compared with."""


def greedy_fills(problem: Problem) -> Iterator[Decisions]:
    """Everything on the GPU that can run there; short gaps are kept first, one result for each reserve."""
    on_gpu = kernels_that_fit(problem)
    order = sorted(range(len(problem.gaps)), key=lambda e: (_length(problem, problem.gaps[e]), e))
    for reserve in RESERVES:
        yield fill(problem, on_gpu, order, int(problem.budget_bytes * reserve))


def light_fills(problem: Problem) -> Iterator[Decisions]:
    """Kernels that lose little time for the bytes of their weights go to the CPU, the others fill the GPU.

    Shares that move the same kernels make one: in a training step hardly any kernel has weights.
    """
    fits = kernels_that_fit(problem)
    weight_bytes = [
        sum(problem.size_bytes[t] for t in inputs if problem.is_weight[t]) for inputs in problem.inputs
    ]
    movable = [k for k, us in enumerate(problem.cpu_us) if fits[k] and us < math.inf and weight_bytes[k]]
    # time lost for each byte of weights that leaves the GPU
    movable.sort(key=lambda k: ((problem.cpu_us[k] - problem.gpu_us[k]) / weight_bytes[k], k))
    order = sorted(
        range(len(problem.gaps)),
        key=lambda e: (_length(problem, problem.gaps[e]), -problem.size_bytes[problem.gaps[e].tensor], e),
    )
    total_bytes = sum(weight_bytes)
    before: list[bool] | None = None
    for share in MOVED_SHARES:
        on_gpu, moved_bytes = list(fits), 0
        for kernel in movable:
            if moved_bytes >= share * total_bytes:
                break
            on_gpu[kernel] = False
            moved_bytes += weight_bytes[kernel]
        if on_gpu == before:
            continue
        before = on_gpu
        # a little and much of RESERVES: times the shares, all would be sixty starts
        for reserve in (0.05, 0.2):
            yield fill(problem, on_gpu, order, int(problem.budget_bytes * reserve))


def streaming_fills(problem: Problem) -> Iterator[Decisions]:
    """Some weights are fetched, evenly spread over the run, so that the link is busy all the time.

    In between the CPU may have kernels that are pinned there, as those of a decoder that touch its caches
    on the host. Those that lose little there for the bytes of their weights run there, too, as lookups in
    tables do.
    """
    on_gpu = _without_idle_weights(problem, kernels_that_fit(problem))
    order = sorted(range(len(problem.gaps)), key=lambda e: (_length(problem, problem.gaps[e]), e))
    first_use = {
        tensor: use
        for tensor, uses in enumerate(problem.uses)
        if problem.is_weight[tensor] and (use := next((k for k in uses if on_gpu[k]), None)) is not None
    }
    for share in STREAMED_SHARES:
        streamed, due_bytes = set[int](), 0.0
        for tensor in sorted(first_use, key=lambda t: first_use[t]):
            due_bytes += share * problem.size_bytes[tensor]
            if due_bytes >= problem.size_bytes[tensor] / 2:
                streamed.add(tensor)
                due_bytes -= problem.size_bytes[tensor]
        yield fill(problem, on_gpu, [e for e in order if problem.gaps[e].tensor not in streamed], 0)


def side_by_side_fills(problem: Problem) -> Iterator[Decisions]:
    """Second parts of products on the CPU, and all else on the GPU: with all that it reads, or as much of it
    as there is room for. Nothing where products are whole."""
    if not problem.second:
        return
    fits = _without_idle_weights(problem, kernels_that_fit(problem))
    on_gpu = [
        gpu and (kernel not in problem.second or problem.cpu_us[kernel] == math.inf)
        for kernel, gpu in enumerate(fits)
    ]
    yield with_gpu_kernels(problem, on_gpu, keep=True)
    order = sorted(range(len(problem.gaps)), key=lambda e: (_length(problem, problem.gaps[e]), e))
    yield from (fill(problem, on_gpu, order, int(problem.budget_bytes * reserve)) for reserve in RESERVES[:2])


def _without_idle_weights(problem: Problem, on_gpu: Sequence[bool]) -> list[bool]:
    """Without the kernels that gain little on the GPU, passing on of results included, for their weights."""
    lost_us, weight_bytes = [0.0] * problem.kernel_count, [0] * problem.kernel_count
    for kernel, (inputs, outputs) in enumerate(zip(problem.inputs, problem.outputs, strict=True)):
        weight_bytes[kernel] = sum(problem.size_bytes[t] for t in inputs if problem.is_weight[t])
        passed_us = sum(problem.d2h_us[t] for t in inputs if not problem.is_weight[t])
        passed_us += sum(problem.h2d_us[t] for t in outputs)
        lost_us[kernel] = problem.cpu_us[kernel] - problem.gpu_us[kernel] + passed_us
    counted = [k for k, gpu in enumerate(on_gpu) if gpu and weight_bytes[k] and lost_us[k] < math.inf]
    mean = sum(lost_us[k] for k in counted) / max(1, sum(weight_bytes[k] for k in counted))
    idle = {k for k in counted if lost_us[k] < IDLE_SHARE * mean * weight_bytes[k]}
    return [gpu and kernel not in idle for kernel, gpu in enumerate(on_gpu)]


def earliest_fills(problem: Problem) -> Iterator[Decisions]:
    """Each kernel where it ends first, so that bands and branches run side by side; short gaps kept first.

    List scheduling by earliest finish time (HEFT, Topcuoglu et al., TPDS 2002), in the problem's order.
    """
    order = sorted(range(len(problem.gaps)), key=lambda e: (_length(problem, problem.gaps[e]), e))
    for cpu_factor in CPU_TIME_FACTORS:
        on_gpu = _earliest(problem, cpu_factor)
        # none and much of RESERVES
        for reserve in (0.0, 0.2):
            yield fill(problem, on_gpu, order, int(problem.budget_bytes * reserve))


@dataclass
class _Side:
    """A device in a list schedule where memory is ample."""

    kernel_us: Sequence[float]
    copy_us: Sequence[float]
    """Of each tensor, to this device."""
    there_us: list[float]
    """When each tensor is there; infinite: not yet."""
    free_us: float = 0.0
    link_us: float = 0.0

    def end_us(self, problem: Problem, kernel: int, other: _Side) -> float:
        """When it would be done with a kernel."""
        return self._start(problem, kernel, other)[0] + self.kernel_us[kernel]

    def run(self, problem: Problem, kernel: int, other: _Side) -> None:
        start_us, self.link_us = self._start(problem, kernel, other)
        self.free_us = start_us + self.kernel_us[kernel]
        for tensor in problem.inputs[kernel]:
            if self.there_us[tensor] == math.inf:
                self.there_us[tensor] = self.link_us
        for tensor in problem.outputs[kernel]:
            self.there_us[tensor] = self.free_us

    def _start(self, problem: Problem, kernel: int, other: _Side) -> tuple[float, float]:
        """When it could start a kernel, and when the link is free behind the copies for it."""
        start_us, link_us = self.free_us, self.link_us
        for tensor in problem.inputs[kernel]:
            if self.there_us[tensor] == math.inf:
                link_us = max(link_us, other.there_us[tensor]) + self.copy_us[tensor]
                start_us = max(start_us, link_us)
            else:
                start_us = max(start_us, self.there_us[tensor])
        return start_us, link_us


def _earliest(problem: Problem, cpu_factor: float) -> list[bool]:
    """Which kernels the GPU would end first, if the CPU took longer by a factor."""
    given = [0.0 if producer == BEFORE_ALL else math.inf for producer in problem.producer]
    resident = [0.0 if weight else math.inf for weight in problem.is_weight]
    gpu = _Side(problem.gpu_us, problem.h2d_us, resident)
    cpu = _Side(problem.cpu_us, problem.d2h_us, given)
    on_gpu = kernels_that_fit(problem)
    for kernel in range(problem.kernel_count):
        weighted_cpu_us = cpu.end_us(problem, kernel, gpu) + (cpu_factor - 1) * problem.cpu_us[kernel]
        on_gpu[kernel] = on_gpu[kernel] and gpu.end_us(problem, kernel, cpu) <= weighted_cpu_us
        here, there = (gpu, cpu) if on_gpu[kernel] else (cpu, gpu)
        here.run(problem, kernel, there)
    return on_gpu


def relaxed_fills(problem: Problem, on_gpu: Sequence[float], keep: Sequence[float]) -> Iterator[Decisions]:
    """Rounds a relaxed solution: kernels by a threshold, gaps by how much of them it keeps.

    `on_gpu` and `keep` are shares between 0 and 1, for each kernel and each gap.
    """
    fits = kernels_that_fit(problem)
    gaps = problem.gaps
    order = sorted(
        # below a hundredth the relaxed plan hardly keeps it
        (e for e in range(len(gaps)) if keep[e] >= 0.01),
        key=lambda e: (-round(keep[e], 2), _length(problem, gaps[e]), e),
    )
    slot = max((s for s, w in zip(problem.size_bytes, problem.is_weight, strict=True) if w), default=0)
    reserves = sorted(
        {r for r in (0, slot, 2 * slot, problem.budget_bytes // 10) if r < problem.budget_bytes}
    )
    # three roundings of one fractional plan
    for threshold in (0.3, 0.5, 0.8):
        chosen = [fits[k] and on_gpu[k] >= threshold for k in range(problem.kernel_count)]
        for reserve in reserves:
            yield fill(problem, chosen, order, reserve)


def fill(problem: Problem, on_gpu: Sequence[bool], order: Sequence[int], reserve_bytes: int) -> Decisions:
    """Keep gaps in the given order as long as the bytes fit the budget less a reserve."""
    capacity = problem.budget_bytes - reserve_bytes
    used = np.array([w if on_gpu[k] else 0 for k, w in enumerate(problem.working_set_bytes)], dtype=np.int64)
    keep = [False] * len(problem.gaps)
    for e in order:
        gap = problem.gaps[e]
        weight = problem.is_weight[gap.tensor]
        if weight != (gap.start == BEFORE_ALL) or (weight and not on_gpu[gap.end]):
            continue  # a weight is kept from the beginning or not at all; an input never from the beginning
        first, last = _span(problem, gap)
        between = used[first:last]
        size = problem.size_bytes[gap.tensor]
        # gaps around one kernel at most are kept unasked: the search gives up again what is too much
        if between.size <= 1 or between.max() + size <= capacity:
            keep[e] = True
            between += size
    return decisions_of(problem, on_gpu, keep)


def with_gpu_kernels(problem: Problem, on_gpu: Sequence[bool], *, keep: bool = False) -> Decisions:
    """The given kernels on the GPU; nothing is kept there, or everything that they read."""
    return decisions_of(problem, on_gpu, [keep] * len(problem.gaps))


def decisions_of(problem: Problem, on_gpu: Sequence[bool], keep: Sequence[bool]) -> Decisions:
    """Decisions, made consistent: no input is kept before its first use, a weight always or never."""
    kept = list(keep)
    resident: dict[int, bool] = {}
    for e, gap in enumerate(problem.gaps):
        if gap.start == BEFORE_ALL:
            resident[gap.tensor] = kept[e] = kept[e] and problem.is_weight[gap.tensor]
        if problem.is_weight[gap.tensor]:
            kept[e] = kept[e] or resident[gap.tensor]
    return Decisions(tuple(not gpu for gpu in on_gpu), tuple(kept))


def kernels_that_fit(problem: Problem) -> list[bool]:
    """Which kernels have GPU code and a working set within the budget, or no CPU code."""
    return [
        not math.isinf(gpu) and (size <= problem.budget_bytes or math.isinf(cpu))
        for gpu, cpu, size in zip(problem.gpu_us, problem.cpu_us, problem.working_set_bytes, strict=True)
    ]


def _span(problem: Problem, gap: Gap) -> tuple[int, int]:
    """Kernels during which the gap holds bytes beside their own working sets."""
    return (0, problem.kernel_count) if problem.is_weight[gap.tensor] else (gap.start + 1, gap.end)


def _length(problem: Problem, gap: Gap) -> int:
    first, last = _span(problem, gap)
    return last - first
