"""What decisions mean for every tensor: when it is in the GPU's memory, and what has to be copied.

Independent of time: slots, the positions of the kernels that run on the GPU, stand for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem


@dataclass(frozen=True, slots=True)
class Fetch:
    """A tensor is copied to the GPU for the kernel at the end of a gap."""

    slot: int
    """Position of the kernel that needs it."""
    gap: int
    tensor: int
    last_slot: int
    """The slot at which it was on the GPU last, or BEFORE_ALL: the copy starts after that kernel's end."""


@dataclass(frozen=True, slots=True)
class Residency:
    """When each tensor is in the GPU's memory, and what has to be copied."""

    on_cpu: tuple[bool, ...]
    """Per kernel: as decided, but for those that can run on one device only. Of a repeat: it does not run."""
    held: tuple[bool, ...]
    """Per gap: the tensor stays on the GPU throughout. Keeping one that is not there has no effect, and
    neither has keeping one for no later use on the GPU."""
    offloaded: tuple[bool, ...]
    """Per tensor: made on the GPU, and copied to the host right after."""
    fetches: tuple[Fetch, ...]
    """In order of slot, then gap."""
    leaving: tuple[tuple[int, ...], ...]
    """Per kernel: tensors that the GPU no longer needs once it has run."""
    held_bytes: tuple[int, ...]
    """Per kernel on the GPU its working set and all that is held meanwhile; 0 on the CPU.
    Fetches for later kernels come on top."""


def devices_of(problem: Problem, decisions: Decisions) -> tuple[bool, ...]:
    """For each kernel whether it runs on the CPU: where only one device has code for it, it runs there."""
    times_us = zip(decisions.on_cpu, problem.gpu_us, problem.cpu_us, strict=True)
    # infinite time: no code for the device, or pinned to the other one
    return tuple((cpu or gpu_us == math.inf) and cpu_us < math.inf for cpu, gpu_us, cpu_us in times_us)


def residency_of(problem: Problem, decisions: Decisions) -> Residency:
    """Follow every tensor through its uses.

    A kernel's output takes the bytes of an input where that is allowed, the GPU does not need the input
    any more, and it is not the source of a copy to the host, which may still be under way.
    """
    builder = _ResidencyBuilder(problem, decisions)
    for tensor, gaps in enumerate(problem.gaps_of):
        if problem.is_weight[tensor] and gaps and decisions.keep[gaps[0]]:
            builder.pin(tensor)
        else:
            builder.follow(tensor)
    return builder.residency()


def host_bytes_of(problem: Problem, residency: Residency) -> tuple[int, ...]:
    """Per kernel, of both devices, what the host holds meanwhile, weights aside.

    Inputs of the model are there from the beginning, what is made on the CPU or copied from the GPU from its
    making on; each until the host or a copy reads it last, outputs until the end. Lanes that run ahead of
    each other may hold a little more.
    """
    fetched = {fetch.gap for fetch in residency.fetches}
    # differences from kernel to kernel, added up below
    change_bytes = [0] * (problem.kernel_count + 1)
    for tensor, gaps in enumerate(problem.gaps_of):
        made = problem.producer[tensor]
        comes_to_host = made == BEFORE_ALL or residency.on_cpu[made] or residency.offloaded[tensor]
        if problem.is_weight[tensor] or not comes_to_host:
            continue
        reads = [problem.gaps[g].end for g in gaps if g in fetched or _reads_on_host(problem, residency, g)]
        # outputs of the model are there until the end
        last = problem.kernel_count - 1 if problem.wanted_on_host[tensor] else max((made, *reads))
        change_bytes[max(made, 0)] += problem.size_bytes[tensor]
        change_bytes[last + 1] -= problem.size_bytes[tensor]
    used_bytes = [
        size if on_cpu and kernel not in problem.repeats else 0
        for kernel, (on_cpu, size) in enumerate(
            zip(residency.on_cpu, problem.cpu_workspace_bytes, strict=True)
        )
    ]
    return tuple(map(add, accumulate(change_bytes[:-1]), used_bytes))


def _reads_on_host(problem: Problem, residency: Residency, gap: int) -> bool:
    kernel = problem.gaps[gap].end
    return residency.on_cpu[kernel] and kernel not in problem.repeats


class _ResidencyBuilder:
    """The residency, under construction."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self.problem = problem
        self.keep = decisions.keep
        self.on_cpu = devices_of(problem, decisions)
        self.held = [False] * len(problem.gaps)
        self.offloaded = [False] * len(problem.tensor_names)
        self.fetches: list[Fetch] = []
        self.leaving: list[list[int]] = [[] for _ in problem.kernel_names]
        # what changes in held bytes from one kernel to the next
        self.change_bytes = [0] * (problem.kernel_count + 1)

    def pin(self, tensor: int) -> None:
        """Hold a weight during the whole run, if any kernel on the GPU uses it."""
        slots = [k for k in self.problem.uses[tensor] if not self.on_cpu[k]]
        if not slots:
            return
        for gap in self.problem.gaps_of[tensor]:
            self.held[gap] = True
        # between its uses: at them it is part of the working set
        for start, end in zip((BEFORE_ALL, *slots), (*slots, self.problem.kernel_count), strict=True):
            self._hold(tensor, start, end)

    def follow(self, tensor: int) -> None:
        """Walk along the gaps of a tensor that is no pinned weight."""
        gaps, problem = self.problem.gaps_of[tensor], self.problem
        producer = problem.producer[tensor]
        made_on_gpu = producer != BEFORE_ALL and not self.on_cpu[producer]
        # where the walk stands: on the GPU since which slot, and whether the host needs a copy
        on_gpu, last_slot = made_on_gpu, producer if made_on_gpu else BEFORE_ALL
        needed_on_host = problem.wanted_on_host[tensor]
        gap = gaps.start
        while gap < gaps.stop:
            # a kept gap may pass uses on the CPU: the tensor then is in both memories
            reach = self._held_until(gap, gaps.stop) if on_gpu else None
            if reach is not None:
                self.held[gap : reach + 1] = [True] * (reach + 1 - gap)
                end = problem.gaps[reach].end
                self._hold(tensor, last_slot, end)
                needed_on_host |= any(not self._is_off(problem.gaps[g].end) for g in range(gap, reach))
                last_slot, gap = end, reach + 1
                continue
            if on_gpu:
                self.leaving[last_slot].append(tensor)
            end = problem.gaps[gap].end
            is_made_again = tensor in problem.outputs[end]
            needed_on_host |= not is_made_again and not self._is_off(end)
            on_gpu = not self.on_cpu[end]
            # a repeat that runs makes the tensor again: nothing is fetched
            if on_gpu and not is_made_again:
                self.fetches.append(Fetch(end, gap, tensor, last_slot))
            if on_gpu:
                last_slot = end
            gap += 1
        if on_gpu:
            self.leaving[last_slot].append(tensor)
        # one copy at most: what is on the host stays there until it is not needed any more
        self.offloaded[tensor] = made_on_gpu and needed_on_host

    def _held_until(self, gap: int, stop: int) -> int | None:
        """The first gap from `gap` on that ends at a use on the GPU, if all up to there are kept."""
        while gap < stop:
            tensor, end = self.problem.gaps[gap].tensor, self.problem.gaps[gap].end
            if not self.on_cpu[end]:
                # a repeat that runs ends the residency: its result has bytes of its own
                return gap if self.keep[gap] and tensor not in self.problem.outputs[end] else None
            if not self.keep[gap] and not self._is_off(end):
                return None
            gap += 1
        return None

    def _is_off(self, kernel: int) -> bool:
        """It is a repeat that does not run: a gap that ends there is kept if the next one is."""
        return kernel in self.problem.repeats and self.on_cpu[kernel]

    def _hold(self, tensor: int, start: int, end: int) -> None:
        """Hold a tensor in the slots between two at which it is part of the working set."""
        self.change_bytes[start + 1] += self.problem.size_bytes[tensor]
        self.change_bytes[end] -= self.problem.size_bytes[tensor]

    def residency(self) -> Residency:
        held_bytes, beside = [], 0
        for kernel, on_cpu in enumerate(self.on_cpu):
            beside += self.change_bytes[kernel]
            held_bytes.append(0 if on_cpu else beside + self._working_set_bytes(kernel))
        return Residency(
            on_cpu=self.on_cpu,
            held=tuple(self.held),
            offloaded=tuple(self.offloaded),
            fetches=tuple(sorted(self.fetches, key=lambda f: (f.slot, f.gap))),
            leaving=tuple(map(tuple, self.leaving)),
            held_bytes=tuple(held_bytes),
        )

    def _working_set_bytes(self, kernel: int) -> int:
        """Bytes a kernel touches, less those of outputs that take an input's place."""
        size_bytes = self.problem.working_set_bytes[kernel]
        # an offloaded input may still be read by its copy
        free = [t for t in self.leaving[kernel] if not self.offloaded[t]]
        placed: set[int] = set()
        for output, source in self.problem.may_overwrite[kernel]:
            if source in free and output not in placed:
                size_bytes -= self.problem.size_bytes[output]
                free.remove(source)
                placed.add(output)
        return size_bytes
