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
from hybridc.passes.planner.model.simulate import Event, EventKind, SimulatedRun


@dataclass(frozen=True, slots=True)
class GpuInterval:
    """A tensor on the GPU, since it was made there or fetched."""

    tensor: int
    fetched: int | None
    """Tick at which the copy starts."""
    uses: tuple[int, ...]
    """Kernels on the GPU, in order."""


@dataclass(frozen=True, slots=True)
class TickSchedule:
    """What happens when, in ticks; every job takes at least one. Kernels in order of their starts."""

    problem: Problem
    on_gpu: tuple[bool, ...]
    start: tuple[int, ...]
    end: tuple[int, ...]
    offload_start: Mapping[int, int]
    """Tensor -> tick, of those that are copied to the host."""
    offload_ticks: tuple[int, ...]
    """Per tensor."""
    intervals: tuple[GpuInterval, ...]
    pinned: frozenset[int]
    """Weights that are resident."""
    taken: Mapping[tuple[int, int], int]
    """(kernel, input) -> the output that takes its bytes."""


def decisions_of(schedule: TickSchedule) -> Decisions:
    """The schedule without its times: devices of kernels, and for each gap whether an interval spans it."""
    keep = [gap.tensor in schedule.pinned for gap in schedule.problem.gaps]
    for interval in schedule.intervals:
        events = (*_making(schedule, interval), *interval.uses)
        for index in schedule.problem.gaps_of[interval.tensor]:
            gap = schedule.problem.gaps[index]
            keep[index] |= bool(events) and events[0] <= gap.start and gap.end <= events[-1]
    return Decisions(tuple(not gpu for gpu in schedule.on_gpu), tuple(keep))


def run_of(schedule: TickSchedule) -> SimulatedRun:
    """The schedule in real time, in microseconds: every job as early as those that it must follow allow.

    Ensures: feasible, and at no time more bytes on the GPU than at some tick of the schedule.
    """
    jobs = sorted(_jobs(schedule), key=lambda job: job.start)
    holders = list(_holders(schedule))
    times: dict[_Key, tuple[float, float]] = {}
    lane_free_us = dict.fromkeys(EventKind, 0.0)
    events: list[Event] = []
    for job in jobs:
        # whoever had given its bytes back in the schedule may have left them to this job
        given_back = {
            other
            for holder in holders
            if holder.taker == job.key
            for earlier in holders
            if earlier.until <= holder.since
            for other in earlier.last
        }
        after = (times[other][1] for other in (*job.follows, *given_back))
        # as early as lane, data and bytes allow
        start_us = max([lane_free_us[job.key.kind], *after])
        end_us = start_us + job.us
        times[job.key] = start_us, end_us
        lane_free_us[job.key.kind] = end_us
        gap = schedule.problem.gap_at[job.key.use, job.key.index] if job.key.use is not None else None
        events.append(Event(job.key.kind, job.key.index, start_us, end_us, gap))
    makespan_us = max((event.end_us for event in events), default=0.0)
    events.sort(key=lambda event: event.start_us)
    return SimulatedRun(True, makespan_us, _peak_bytes(schedule, holders, times), tuple(events))


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
    """Bytes on the GPU: a workspace, or the intervals that hand them on by overwriting."""

    size_bytes: int
    taker: _Key
    since: int
    until: int
    last: tuple[_Key, ...]
    """When these have ended the bytes are free."""


def _run(schedule: TickSchedule, kernel: int) -> _Key:
    return _Key(EventKind.RUN_GPU if schedule.on_gpu[kernel] else EventKind.RUN_CPU, kernel)


def _making(schedule: TickSchedule, interval: GpuInterval) -> tuple[int, ...]:
    return (schedule.problem.producer[interval.tensor],) if interval.fetched is None else ()


def _begin(schedule: TickSchedule, interval: GpuInterval) -> _Key:
    if interval.fetched is None:
        return _run(schedule, schedule.problem.producer[interval.tensor])
    return _Key(EventKind.FETCH, interval.tensor, interval.uses[0])


def _on_host(schedule: TickSchedule, tensor: int) -> tuple[_Key, ...]:
    """The job that brings a tensor to the host's memory."""
    producer = schedule.problem.producer[tensor]
    if producer == BEFORE_ALL:
        return ()
    return (_Key(EventKind.OFFLOAD, tensor) if schedule.on_gpu[producer] else _run(schedule, producer),)


def _jobs(schedule: TickSchedule) -> Iterator[_Job]:
    problem = schedule.problem
    arrivals: dict[int, list[_Key]] = {}
    for interval in schedule.intervals:
        begin = _begin(schedule, interval)
        for use in interval.uses:
            arrivals.setdefault(use, []).append(begin)
        if interval.fetched is not None:
            yield _Job(
                begin, interval.fetched, problem.h2d_us[interval.tensor], _on_host(schedule, interval.tensor)
            )
    for tensor, start in schedule.offload_start.items():
        made = (_run(schedule, problem.producer[tensor]),)
        yield _Job(_Key(EventKind.OFFLOAD, tensor), start, problem.d2h_us[tensor], made)
    for kernel, on_gpu in enumerate(schedule.on_gpu):
        if on_gpu:
            us, follows = problem.gpu_us[kernel], tuple(arrivals.get(kernel, ()))
        else:
            us = problem.cpu_us[kernel]
            follows = tuple(key for tensor in problem.inputs[kernel] for key in _on_host(schedule, tensor))
        yield _Job(_run(schedule, kernel), schedule.start[kernel], us, follows)


def _holders(schedule: TickSchedule) -> Iterator[_Holder]:
    for kernel, on_gpu in enumerate(schedule.on_gpu):
        if on_gpu:
            key, size_bytes = _run(schedule, kernel), schedule.problem.workspace_bytes[kernel]
            yield _Holder(size_bytes, key, schedule.start[kernel], schedule.end[kernel], (key,))
    made = {interval.tensor: interval for interval in schedule.intervals if interval.fetched is None}
    heirs = {(kernel, source): made[output] for (kernel, source), output in schedule.taken.items()}
    # these hold no bytes of their own, but those of the input they overwrite
    handed_on = {output for output in schedule.taken.values()}
    for interval in schedule.intervals:
        if interval.fetched is None and interval.tensor in handed_on:
            continue
        since = (
            schedule.start[schedule.problem.producer[interval.tensor]]
            if interval.fetched is None
            else interval.fetched
        )
        last = interval
        # along the chain of overwriting: the bytes are free when its last one is done
        while last.uses and (last.uses[-1], last.tensor) in heirs:
            last = heirs[last.uses[-1], last.tensor]
        until, keys = _end(schedule, last)
        yield _Holder(
            schedule.problem.size_bytes[interval.tensor], _begin(schedule, interval), since, until, keys
        )


def _end(schedule: TickSchedule, interval: GpuInterval) -> tuple[int, tuple[_Key, ...]]:
    """When an interval is over, and the jobs that it lasts for."""
    kernels = (*_making(schedule, interval), *interval.uses)
    until, keys = max(schedule.end[k] for k in kernels), tuple(_run(schedule, k) for k in kernels)
    if interval.fetched is None and interval.tensor in schedule.offload_start:
        until = max(until, schedule.offload_start[interval.tensor] + schedule.offload_ticks[interval.tensor])
        keys = (*keys, _Key(EventKind.OFFLOAD, interval.tensor))
    return until, keys


def _peak_bytes(
    schedule: TickSchedule, holders: list[_Holder], times: Mapping[_Key, tuple[float, float]]
) -> int:
    resident = sum(
        schedule.problem.size_bytes[t]
        for t in schedule.pinned
        if any(schedule.on_gpu[use] for use in schedule.problem.uses[t])
    )
    spans = [(times[h.taker][0], max(times[key][1] for key in h.last), h.size_bytes) for h in holders]
    # the most is held at some begin: only there bytes are taken
    held = (sum(size for start, end, size in spans if start <= at < end) for at, _, _ in spans)
    return resident + max(held, default=0)
