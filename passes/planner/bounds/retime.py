"""Give a schedule in whole ticks the real durations: every job as early as what it must follow allows.

A job follows the job before it on its lane, those whose results it reads, and, if it takes bytes, all that
had given theirs back when it took them in the schedule. Then two holders of bytes that are alive at one
real time were alive together in the schedule; intervals that meet pairwise have a common point (Helly), so
at no real time more bytes are held than at some tick of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.simulate import Event, EventKind, Outcome


@dataclass(frozen=True, slots=True)
class Stay:
    """A tensor on the GPU, since it was made there or fetched."""

    tensor: int
    fetched: int | None
    """Tick at which the copy starts."""
    uses: tuple[int, ...]
    """Kernels on the GPU, in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens when, in ticks; every job takes at least one. Kernels in order of their starts."""

    problem: Problem
    on_gpu: tuple[bool, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    offload_start: Mapping[int, int]
    """Tensor -> tick, of those that are copied to the host."""
    offload_ticks: tuple[int, ...]
    """Per tensor."""
    stays: tuple[Stay, ...]
    pinned: frozenset[int]
    """Weights that are resident."""
    taken: Mapping[tuple[int, int], int]
    """(kernel, input) -> the output that takes its bytes."""


def decisions_of(plan: Schedule) -> Decisions:
    """The schedule without its times."""
    keep = [gap.tensor in plan.pinned for gap in plan.problem.gaps]
    for stay in plan.stays:
        events = (*_making(plan, stay), *stay.uses)
        for index in plan.problem.gaps_of[stay.tensor]:
            gap = plan.problem.gaps[index]
            keep[index] |= bool(events) and events[0] <= gap.start and gap.end <= events[-1]
    return Decisions(tuple(not gpu for gpu in plan.on_gpu), tuple(keep))


def outcome_of(plan: Schedule) -> Outcome:
    """The schedule in real time."""
    jobs = sorted(_jobs(plan), key=lambda job: job.start)
    holders = list(_holders(plan))
    times: dict[_Key, tuple[float, float]] = {}
    lane_free_us = dict.fromkeys(EventKind, 0.0)
    events: list[Event] = []
    for job in jobs:
        given_back = {
            other
            for holder in holders
            if holder.taker == job.key
            for earlier in holders
            if earlier.until <= holder.since
            for other in earlier.last
        }
        after = (times[other][1] for other in (*job.follows, *given_back))
        start_us = max([lane_free_us[job.key.kind], *after])
        end_us = start_us + job.us
        times[job.key] = start_us, end_us
        lane_free_us[job.key.kind] = end_us
        gap = plan.problem.gap_at[job.key.use, job.key.index] if job.key.use is not None else None
        events.append(Event(job.key.kind, job.key.index, start_us, end_us, gap))
    makespan_us = max((event.end_us for event in events), default=0.0)
    events.sort(key=lambda event: event.start_us)
    return Outcome(True, makespan_us, _peak_bytes(plan, holders, times), tuple(events))


@dataclass(frozen=True, slots=True)
class _Key:
    """Which job: a kernel's run, a tensor's copy to the host, or its fetch for a use."""

    kind: EventKind
    index: int
    use: int | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    key: _Key
    start: int
    us: float
    follows: tuple[_Key, ...]


@dataclass(frozen=True, slots=True)
class _Holder:
    """Bytes on the GPU: a workspace, or the stays that hand them on by overwriting."""

    size_bytes: int
    taker: _Key
    since: int
    until: int
    last: tuple[_Key, ...]
    """When these have ended the bytes are free."""


def _run(plan: Schedule, kernel: int) -> _Key:
    return _Key(EventKind.RUN_GPU if plan.on_gpu[kernel] else EventKind.RUN_CPU, kernel)


def _making(plan: Schedule, stay: Stay) -> tuple[int, ...]:
    return (plan.problem.producer[stay.tensor],) if stay.fetched is None else ()


def _begin(plan: Schedule, stay: Stay) -> _Key:
    if stay.fetched is None:
        return _run(plan, plan.problem.producer[stay.tensor])
    return _Key(EventKind.FETCH, stay.tensor, stay.uses[0])


def _on_host(plan: Schedule, tensor: int) -> tuple[_Key, ...]:
    """The job that brings a tensor to the host's memory."""
    producer = plan.problem.producer[tensor]
    if producer == BEFORE_ALL:
        return ()
    return (_Key(EventKind.OFFLOAD, tensor) if plan.on_gpu[producer] else _run(plan, producer),)


def _jobs(plan: Schedule) -> Iterator[_Job]:
    problem = plan.problem
    arrivals: dict[int, list[_Key]] = {}
    for stay in plan.stays:
        begin = _begin(plan, stay)
        for use in stay.uses:
            arrivals.setdefault(use, []).append(begin)
        if stay.fetched is not None:
            yield _Job(begin, stay.fetched, problem.h2d_us[stay.tensor], _on_host(plan, stay.tensor))
    for tensor, start in plan.offload_start.items():
        made = (_run(plan, problem.producer[tensor]),)
        yield _Job(_Key(EventKind.OFFLOAD, tensor), start, problem.d2h_us[tensor], made)
    for kernel, on_gpu in enumerate(plan.on_gpu):
        if on_gpu:
            us, follows = problem.gpu_us[kernel], tuple(arrivals.get(kernel, ()))
        else:
            us = problem.cpu_us[kernel]
            follows = tuple(key for tensor in problem.inputs[kernel] for key in _on_host(plan, tensor))
        yield _Job(_run(plan, kernel), plan.start[kernel], us, follows)


def _holders(plan: Schedule) -> Iterator[_Holder]:
    for kernel, on_gpu in enumerate(plan.on_gpu):
        if on_gpu:
            key, size_bytes = _run(plan, kernel), plan.problem.workspace_bytes[kernel]
            yield _Holder(size_bytes, key, plan.start[kernel], plan.end[kernel], (key,))
    made = {stay.tensor: stay for stay in plan.stays if stay.fetched is None}
    heirs = {(kernel, source): made[output] for (kernel, source), output in plan.taken.items()}
    handed_on = {output for output in plan.taken.values()}
    for stay in plan.stays:
        if stay.fetched is None and stay.tensor in handed_on:
            continue
        since = plan.start[plan.problem.producer[stay.tensor]] if stay.fetched is None else stay.fetched
        last = stay
        while last.uses and (last.uses[-1], last.tensor) in heirs:
            last = heirs[last.uses[-1], last.tensor]
        until, keys = _end(plan, last)
        yield _Holder(plan.problem.size_bytes[stay.tensor], _begin(plan, stay), since, until, keys)


def _end(plan: Schedule, stay: Stay) -> tuple[int, tuple[_Key, ...]]:
    """When a stay is over, and the jobs that it lasts for."""
    kernels = (*_making(plan, stay), *stay.uses)
    until, keys = max(plan.end[k] for k in kernels), tuple(_run(plan, k) for k in kernels)
    if stay.fetched is None and stay.tensor in plan.offload_start:
        until = max(until, plan.offload_start[stay.tensor] + plan.offload_ticks[stay.tensor])
        keys = (*keys, _Key(EventKind.OFFLOAD, stay.tensor))
    return until, keys


def _peak_bytes(plan: Schedule, holders: list[_Holder], times: Mapping[_Key, tuple[float, float]]) -> int:
    resident = sum(
        plan.problem.size_bytes[t]
        for t in plan.pinned
        if any(plan.on_gpu[use] for use in plan.problem.uses[t])
    )
    spans = [(times[h.taker][0], max(times[key][1] for key in h.last), h.size_bytes) for h in holders]
    held = (sum(size for start, end, size in spans if start <= at < end) for at, _, _ in spans)
    return resident + max(held, default=0)
