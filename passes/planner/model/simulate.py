"""When every kernel and copy of a run takes place, and the bytes that are held: the model of a run.

Four lanes work side by side: the GPU, the CPU, and copies to and from the GPU. Each takes its jobs in
order. CPU and GPU run their kernels in the problem's order; a result that the host needs is copied as
soon as it is made; what the GPU has to fetch is copied ahead of time as far as memory allows.

The unit of memory is the slot of a GPU kernel. What it holds, its working set and all that stays beside
it, is known before (`Residency`). A fetch for slot j that starts in the window of slot s, which is from
the end of the GPU kernel before s to the end of s, holds bytes in slots s to j. A tensor that the GPU no
longer needs holds its bytes until its copy to the host has ended; kernels and fetches wait for that.

What runs at once shares memories and the link (`contention.py`): kernels and copies take longer than by
themselves while others run that are settled before them. That is near to what a plan takes, whose steps lose
to each other as `emit/replay.py` says; plans are compared by that.

`native/planner.cpp` does the same, operation by operation, so that times agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from hybridc.ir import Lane
from hybridc.passes.planner.model.contention import SharedLanes
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.residency import Fetch, Residency, host_bytes_of, residency_of

# The larger, the more copies overlap with kernels, and the longer every simulation takes.
LOOKAHEAD = 16
"""So many fetches that cannot start yet may be overtaken by later ones."""


class EventKind(StrEnum):
    """What happens."""

    RUN_GPU = "run_gpu"
    RUN_CPU = "run_cpu"
    FETCH = "fetch"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel runs or a tensor is copied."""

    kind: EventKind
    index: int
    """The kernel that runs, or the tensor that is copied."""
    start_us: float
    end_us: float
    gap: int | None = None
    """Of a fetch: the gap that it ends."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What decisions lead to."""

    feasible: bool
    """Whether the bytes fit the budget, and the host's; if not, there are no events."""
    makespan_us: float
    """End of the last event; infinite if infeasible."""
    peak_gpu_bytes: int
    """The most that any slot holds, fetches for later slots included."""
    events: tuple[Event, ...]
    """By start; of those that start together, first the one that the others may depend on."""


def simulate(problem: Problem, decisions: Decisions) -> SimulatedRun:
    """Predict a run with these decisions about `problem`: when every kernel and copy starts, in microseconds.

    A simulation of discrete events on four lanes; kernels keep the problem's order on each device.
    """
    residency = residency_of(problem, decisions)
    peak_bytes = max(residency.held_bytes, default=0)
    host_is_full = problem.host_bytes is not None and (
        max(host_bytes_of(problem, residency), default=0) > problem.host_bytes
    )
    # fetches ahead of time only use what is left, so that this alone decides
    if peak_bytes > problem.budget_bytes or host_is_full:
        return SimulatedRun(False, math.inf, peak_bytes, ())
    run = _Simulation(problem, residency)
    run.run()
    # stable: what starts together keeps the order of its making, dependencies first
    events = tuple(sorted(run.events, key=lambda event: event.start_us))
    makespan_us = max((event.end_us for event in events), default=0.0)
    return SimulatedRun(True, makespan_us, int(run.load_bytes.max(initial=0)), events)


class _Simulation:
    """The run so far."""

    def __init__(self, problem: Problem, residency: Residency) -> None:
        self.problem = problem
        self.residency = residency
        self.events: list[Event] = []
        self.lanes = SharedLanes(problem.contention)
        self.gpu_free_us = self.cpu_free_us = self.h2d_free_us = self.d2h_free_us = 0.0
        # when each tensor is in the host's memory; not known yet: never
        self.on_host_us = [0.0 if producer < 0 else math.inf for producer in problem.producer]
        self.arrival_us = [0.0] * len(problem.gaps)
        # grows by fetches that are on their way, up to the slots they are for
        self.load_bytes = np.array(residency.held_bytes, np.int64)
        self.is_slot = np.array([not on_cpu for on_cpu in residency.on_cpu], np.int64)
        self.fetches = list(residency.fetches)  # those not issued yet
        # two views of one list: all in order, and those that a slot cannot do without
        self.fetches_for: dict[int, list[Fetch]] = {}  # by the kernel that needs them
        for fetch in self.fetches:
            self.fetches_for.setdefault(fetch.slot, []).append(fetch)
        self.cpu_kernels = [
            k for k, on_cpu in enumerate(residency.on_cpu) if on_cpu and k not in problem.repeats
        ]
        self.next_cpu = 0
        # ends of copies to the host, and bytes, of tensors that nothing else holds any more: a heap
        self.pending: list[tuple[float, int]] = []
        self.pending_bytes = 0
        self.pending_from_now: list[tuple[float, int]] = []

    def run(self) -> None:
        slot, since_us = None, 0.0  # the last kernel on the GPU, and when its window began
        self._run_cpu_kernels()
        for kernel, on_cpu in enumerate(self.residency.on_cpu):
            if on_cpu:
                continue
            if slot is not None:
                self._prefetch(slot, since_us)
                since_us = self.gpu_free_us
            self._end_window()
            self._fetch_for(kernel)
            self._run_gpu_kernel(kernel)
            self._run_cpu_kernels()
            slot = kernel

    def _run_cpu_kernels(self) -> None:
        """Run kernels on the CPU up to the first one whose inputs are not known to come to the host."""
        while self.next_cpu < len(self.cpu_kernels):
            kernel = self.cpu_kernels[self.next_cpu]
            start_us = self.cpu_free_us
            for tensor in self.problem.inputs[kernel]:
                start_us = max(start_us, self.on_host_us[tensor])
            # its inputs come from GPU kernels that are not simulated yet
            if start_us == math.inf:
                return
            us = self.problem.cpu_us[kernel]
            end_us = self.cpu_free_us = self.lanes.settle(Lane.CPU, kernel, start_us, us)
            self.events.append(Event(EventKind.RUN_CPU, kernel, start_us, end_us))
            for tensor in self.problem.outputs[kernel]:
                self.on_host_us[tensor] = end_us
            self.next_cpu += 1

    def _run_gpu_kernel(self, kernel: int) -> None:
        """Run it once its inputs have arrived and pending offloads leave room; offload what it makes."""
        start_us = self.gpu_free_us
        for tensor in self.problem.inputs[kernel]:
            start_us = max(start_us, self.arrival_us[self.problem.gap_at[kernel, tensor]])
        offloaded = [t for t in self.problem.outputs[kernel] if self.residency.offloaded[t]]
        is_repeat = kernel in self.problem.repeats
        for tensor in offloaded if is_repeat else ():
            start_us = max(start_us, self.on_host_us[tensor])  # no copy reads it any more
        start_us = self._when_room(start_us, self.problem.budget_bytes - int(self.load_bytes[kernel]))
        us = self.problem.gpu_us[kernel]
        end_us = self.gpu_free_us = self.lanes.settle(Lane.GPU, kernel, start_us, us)
        self.events.append(Event(EventKind.RUN_GPU, kernel, start_us, end_us))
        if not is_repeat:
            for tensor in offloaded:
                copy_us, us = max(self.d2h_free_us, end_us), self.problem.d2h_us[tensor]
                self.d2h_free_us = self.lanes.settle(Lane.D2H, tensor, copy_us, us)
                self.on_host_us[tensor] = self.d2h_free_us
                self.events.append(Event(EventKind.OFFLOAD, tensor, copy_us, self.d2h_free_us))
        for tensor in self.residency.leaving[kernel]:
            # the GPU is done with it, but its copy is not
            if self.residency.offloaded[tensor] and self.on_host_us[tensor] > end_us:
                self.pending_from_now.append((self.on_host_us[tensor], self.problem.size_bytes[tensor]))

    def _end_window(self) -> None:
        """Let the last GPU kernel be over: what it alone still held back waits for its copy only."""
        for end_us, size in self.pending_from_now:
            heappush(self.pending, (end_us, size))
            self.pending_bytes += size
        self.pending_from_now = []
        # copies that have ended hold nothing any more
        while self.pending and self.pending[0][0] <= self.gpu_free_us:
            self.pending_bytes -= heappop(self.pending)[1]

    def _when_room(self, time_us: float, room_bytes: int) -> float:
        """The first time from `time_us` on at which pending offloads take at most `room_bytes`."""
        left_bytes, at_us = self.pending_bytes, time_us
        if left_bytes <= room_bytes:
            return time_us
        # the earliest ends first, until enough bytes are free
        for end_us, size in sorted(self.pending):
            left_bytes, at_us = left_bytes - size, max(at_us, end_us)
            if left_bytes <= room_bytes:
                return at_us
        raise AssertionError("a slot holds more than the budget")

    def _prefetch(self, slot: int, since_us: float) -> None:
        """Start fetches for later kernels in a slot's window: those that can start first."""
        until_us = self.gpu_free_us
        while (fetch := self._first_ready(slot, max(self.h2d_free_us, since_us))) is not None:
            start_us = max(self.h2d_free_us, since_us, self.on_host_us[fetch.tensor])
            # later than this window, or too large for a slot in between
            if start_us >= until_us or not self._fits(fetch, slot):
                return
            start_us = self._when_room(start_us, self._room_bytes(fetch, slot))
            if start_us >= until_us:
                return
            self._issue(fetch, slot, start_us)

    def _first_ready(self, slot: int, time_us: float) -> Fetch | None:
        """Of the next fetches the first that can start at `time_us`, else the one that can start first."""
        best, best_us = None, math.inf
        for fetch in self._candidates(slot):
            if self.on_host_us[fetch.tensor] <= time_us:
                return fetch
            if self.on_host_us[fetch.tensor] < best_us:
                best, best_us = fetch, self.on_host_us[fetch.tensor]
        return best

    def _candidates(self, slot: int) -> Iterator[Fetch]:
        """Fetches whose tensors have left the GPU before `slot`, out of the next ones."""
        return (fetch for fetch in self.fetches[:LOOKAHEAD] if fetch.last_slot < slot)

    def _fetch_for(self, kernel: int) -> None:
        """Fetch what a kernel needs and has not got, in the order in which it comes to the host."""
        since_us = self.gpu_free_us
        for fetch in sorted(
            self.fetches_for.get(kernel, ()), key=lambda fetch: self.on_host_us[fetch.tensor]
        ):
            ready_us = self.on_host_us[fetch.tensor]
            while max(self.h2d_free_us, since_us) < ready_us and self._fill_idle(kernel, since_us, ready_us):
                pass
            start_us = max(self.h2d_free_us, since_us, ready_us)
            room_bytes = self.problem.budget_bytes - int(self.load_bytes[kernel])
            self._issue(fetch, kernel, self._when_room(start_us, room_bytes))

    def _fill_idle(self, slot: int, since_us: float, until_us: float) -> bool:
        """Start a fetch for a later kernel while the copies' lane waits; at least half of it must pass."""
        for fetch in self._candidates(slot):
            if fetch.slot == slot:
                continue
            start_us = max(self.h2d_free_us, since_us, self.on_host_us[fetch.tensor])
            # so that the fetch that is waited for loses at most half of this copy's time
            latest_us = until_us - 0.5 * self.problem.h2d_us[fetch.tensor]
            if start_us > latest_us:
                continue
            if not self._fits(fetch, slot):
                return False
            start_us = self._when_room(start_us, self._room_bytes(fetch, slot))
            if start_us > latest_us:
                return False
            self._issue(fetch, slot, start_us)
            return True
        return False

    def _fits(self, fetch: Fetch, slot: int) -> bool:
        """Whether every slot on the way has room."""
        # the copy holds its bytes from now to the slot that it is for
        load_bytes = int(self.load_bytes[slot : fetch.slot].max())
        return load_bytes + self.problem.size_bytes[fetch.tensor] <= self.problem.budget_bytes

    def _room_bytes(self, fetch: Fetch, slot: int) -> int:
        return self.problem.budget_bytes - int(self.load_bytes[slot]) - self.problem.size_bytes[fetch.tensor]

    def _issue(self, fetch: Fetch, slot: int, start_us: float) -> None:
        us = self.problem.h2d_us[fetch.tensor]
        end_us = self.h2d_free_us = self.lanes.settle(Lane.H2D, fetch.tensor, start_us, us)
        self.arrival_us[fetch.gap] = end_us
        span = slice(slot, fetch.slot)
        self.load_bytes[span] += self.problem.size_bytes[fetch.tensor] * self.is_slot[span]
        self.fetches.remove(fetch)
        self.fetches_for[fetch.slot].remove(fetch)
        self.events.append(Event(EventKind.FETCH, fetch.tensor, start_us, end_us, fetch.gap))
