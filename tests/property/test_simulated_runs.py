"""What every predicted run must obey, found out from its events alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridc.passes.planner.model.problem import BEFORE_ALL, Problem
from hybridc.passes.planner.model.simulate import Event, EventKind, simulate
from tests.support.planner_problems import decisions, problems, shared
from tests.support.random_examples import random_examples

RUN_GPU, RUN_CPU, FETCH, OFFLOAD = EventKind


@given(st.data())
@random_examples(150)
def test_live_bytes_never_exceed_the_budget(data: st.DataObject) -> None:
    problem = data.draw(problems() | shared(problems()))
    outcome = simulate(problem, data.draw(decisions(problem)))
    for position in range(len(outcome.events)):
        assert live_bytes(problem, outcome.events, position) <= problem.budget_bytes


@given(st.data())
@random_examples(150)
def test_every_event_finds_what_it_reads_and_no_lane_does_two_things_at_once(data: st.DataObject) -> None:
    problem = data.draw(problems() | shared(problems()))
    outcome = simulate(problem, data.draw(decisions(problem)))
    lane_free_us = dict.fromkeys(EventKind, 0.0)
    on_host_us = {t: 0.0 for t, producer in enumerate(problem.producer) if producer == BEFORE_ALL}
    fetched = {e.index for e in outcome.events if e.kind is FETCH}
    on_gpu_us = {t: 0.0 for t, weight in enumerate(problem.is_weight) if weight and t not in fetched}
    for event in outcome.events:
        assert event.start_us >= lane_free_us[event.kind]
        lane_free_us[event.kind] = event.end_us
        for tensor in reads(problem, event):
            there_us = on_gpu_us if event.kind in (RUN_GPU, OFFLOAD) else on_host_us
            assert there_us[tensor] <= event.start_us
        for tensor in writes(problem, event):
            there_us = on_gpu_us if event.kind in (RUN_GPU, FETCH) else on_host_us
            there_us[tensor] = event.end_us
    if outcome.feasible:
        ran = sorted(e.index for e in outcome.events if e.kind in (RUN_GPU, RUN_CPU))
        assert ran == list(range(problem.kernel_count))
        assert all(t in on_host_us for t, wanted in enumerate(problem.wanted_on_host) if wanted)
        assert outcome.makespan_us == max((e.end_us for e in outcome.events), default=0.0)


def reads(problem: Problem, event: Event) -> tuple[int, ...]:
    return problem.inputs[event.index] if event.kind in (RUN_GPU, RUN_CPU) else (event.index,)


def writes(problem: Problem, event: Event) -> tuple[int, ...]:
    return problem.outputs[event.index] if event.kind in (RUN_GPU, RUN_CPU) else (event.index,)


def live_bytes(problem: Problem, events: tuple[Event, ...], position: int) -> int:
    """Bytes on the GPU while an event is the latest that has begun."""
    total = sum(
        problem.size_bytes[tensor]
        for tensor in range(len(problem.tensor_names))
        if any(first <= position <= last for first, last in stays(problem, events, tensor))
    )
    event = events[position]
    if event.kind is not RUN_GPU:
        return total
    taken: set[int] = set()
    for output, source in problem.may_overwrite[event.index]:
        ends_here = any(last == position for _, last in stays(problem, events, source))
        copied = any(e.kind is OFFLOAD and e.index == source for e in events)
        if ends_here and not copied and not taken & {output, source}:
            taken |= {output, source}
            total -= problem.size_bytes[output]
    return total + problem.workspace_bytes[event.index]


def stays(problem: Problem, events: tuple[Event, ...], tensor: int) -> list[tuple[int, int]]:
    """First and last event of each stay on the GPU: a write, and the last use before the next write."""
    found: list[tuple[int, int]] = []
    resident = problem.is_weight[tensor] and not any(e.kind is FETCH and e.index == tensor for e in events)
    for position, event in enumerate(events):
        if event.kind in (RUN_GPU, FETCH) and tensor in writes(problem, event):
            found.append((position, position))
        elif event.kind in (RUN_GPU, OFFLOAD) and tensor in reads(problem, event):
            if resident:
                return [(0, len(events))]
            found[-1] = (found[-1][0], position)
    return found
