"""What is wrong with a predicted run, found out from its events and their times alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.simulate import Event, EventKind, SimulatedRun

RUN_GPU, RUN_CPU, FETCH, OFFLOAD = EventKind


def violations(problem: Problem, outcome: SimulatedRun) -> list[str]:
    """Empty if every kernel runs once, no lane does two things at once, everything finds what it reads, and
    at no time the GPU holds more than the budget."""
    events = outcome.events
    found = [*_lanes(problem, events), *_reads(problem, events)]
    ran = sorted(e.index for e in events if e.kind in (RUN_GPU, RUN_CPU))
    if ran != list(range(problem.kernel_count)):
        found.append(f"kernels {ran} ran")
    on_host = {e.index for e in events if e.kind is OFFLOAD}
    on_host |= {t for e in events if e.kind is RUN_CPU for t in problem.outputs[e.index]}
    for tensor, wanted in enumerate(problem.wanted_on_host):
        if wanted and problem.producer[tensor] != BEFORE_ALL and tensor not in on_host:
            found.append(f"tensor {tensor} does not come to the host")
    for event in events:
        if (held := held_bytes(problem, events, event.start_us)) > problem.budget_bytes:
            found.append(f"{held} bytes at {event}")
    return found


def _lanes(problem: Problem, events: tuple[Event, ...]) -> Iterator[str]:
    duration_us = {
        RUN_GPU: problem.gpu_us,
        RUN_CPU: problem.cpu_us,
        FETCH: problem.h2d_us,
        OFFLOAD: problem.d2h_us,
    }
    free_us = dict.fromkeys(EventKind, 0.0)
    for event in events:
        if event.start_us < free_us[event.kind]:
            yield f"lane is not free for {event}"
        if event.end_us != event.start_us + duration_us[event.kind][event.index]:
            yield f"duration of {event}"
        free_us[event.kind] = event.end_us


def _reads(problem: Problem, events: tuple[Event, ...]) -> Iterator[str]:
    host_us = {t: 0.0 for t, producer in enumerate(problem.producer) if producer == BEFORE_ALL}
    gpu_us = {t: 0.0 for t in _resident(problem, events)}
    for event in events:
        is_run = event.kind in (RUN_GPU, RUN_CPU)
        there_us = gpu_us if event.kind in (RUN_GPU, OFFLOAD) else host_us
        for tensor in problem.inputs[event.index] if is_run else (event.index,):
            if there_us.get(tensor, math.inf) > event.start_us:
                yield f"{event} lacks tensor {tensor}"
        written_us = gpu_us if event.kind in (RUN_GPU, FETCH) else host_us
        for tensor in problem.outputs[event.index] if is_run else (event.index,):
            written_us[tensor] = event.end_us


def _resident(problem: Problem, events: tuple[Event, ...]) -> set[int]:
    """Weights that the GPU uses and that are never copied to it."""
    used = {t for e in events if e.kind is RUN_GPU for t in problem.inputs[e.index]}
    fetched = {e.index for e in events if e.kind is FETCH}
    return {t for t in used - fetched if problem.is_weight[t]}


@dataclass(slots=True)
class _Stay:
    tensor: int
    start_us: float
    end_us: float
    last: Event
    is_copied: bool = False


def held_bytes(problem: Problem, events: tuple[Event, ...], at_us: float) -> int:
    """Bytes on the GPU just after a time. A tensor is there from the start of what writes it to the end of
    the last that reads it before it is written again; an output may have taken an input's bytes."""
    stays: dict[int, _Stay] = {}
    over: list[_Stay] = []
    for event in events:
        if event.kind is FETCH or event.kind is RUN_GPU:
            for tensor in problem.inputs[event.index] if event.kind is RUN_GPU else ():
                if tensor in stays:
                    stay = stays[tensor]
                    if event.end_us >= stay.end_us:
                        stay.end_us, stay.last = event.end_us, event
            for tensor in problem.outputs[event.index] if event.kind is RUN_GPU else (event.index,):
                if tensor in stays:
                    over.append(stays[tensor])
                stays[tensor] = _Stay(tensor, event.start_us, event.end_us, event)
        elif event.kind is OFFLOAD:
            stay = stays[event.index]
            stay.is_copied = True
            stay.end_us = max(stay.end_us, event.end_us)
    over += stays.values()
    total = sum(problem.size_bytes[t] for t in _resident(problem, events))
    total += sum(problem.size_bytes[s.tensor] for s in over if s.start_us <= at_us < s.end_us)
    for event in events:
        if event.kind is RUN_GPU and event.start_us <= at_us < event.end_us:
            total += problem.workspace_bytes[event.index] - _overwritten_bytes(problem, event, over)
    return total


def _overwritten_bytes(problem: Problem, event: Event, stays: list[_Stay]) -> int:
    """Of inputs that are used last by this kernel and are not copied to the host from here."""
    free = {s.tensor for s in stays if s.last == event and not s.is_copied and s.start_us < event.start_us}
    taken: set[int] = set()
    total = 0
    for output, source in problem.may_overwrite[event.index]:
        if source in free and not taken & {output, source}:
            taken |= {output, source}
            total += problem.size_bytes[output]
    return total
