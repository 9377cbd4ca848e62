"""The predicted run of a plan as time on its lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridc.ir import Copy, Graph, Lane, Plan, Run
from hybridc.passes.planner.emit.timeline import timeline

Span = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One queue of steps and how long it is busy."""

    lane: Lane
    steps: int
    busy_us: float
    share: float
    """Of the predicted run."""
    copied_bytes: int
    lost_us: float = 0.0
    """What of the time is lost as others use a memory or the link at once; 0 where that is not known."""
    lost_to: str = ""
    """At what most of it is lost."""


def spans_of(plan: Plan) -> tuple[Span, ...]:
    """When each step is predicted to start and end."""
    return timeline(plan.steps, plan.step_us)[1]


def lane_rows(graph: Graph, plan: Plan) -> tuple[LaneRow, ...]:
    """Every lane that has steps."""
    on_lane = {lane: [i for i, step in enumerate(plan.steps) if step.lane is lane] for lane in Lane}
    return tuple(lane_row(graph, plan, lane, positions) for lane, positions in on_lane.items() if positions)


def lane_row(graph: Graph, plan: Plan, lane: Lane, positions: Sequence[int]) -> LaneRow:
    """Some steps of a lane, given by their positions."""
    busy_us = sum(plan.step_us[i] for i in positions)
    copies = (step for i in positions if isinstance(step := plan.steps[i], Copy))
    copied_bytes = sum(graph.tensor[copy.tensor].size_bytes for copy in copies)
    share = busy_us / plan.makespan_us if plan.makespan_us else 0.0
    return LaneRow(lane, len(positions), busy_us, share, copied_bytes)


def hidden_copy_us(plan: Plan) -> tuple[float, float]:
    """Time of all copies, and how much of it passes while a kernel runs on either device."""
    spans = spans_of(plan)
    busy = _union(span for span, step in zip(spans, plan.steps, strict=True) if isinstance(step, Run))
    copies = sorted(span for span, step in zip(spans, plan.steps, strict=True) if isinstance(step, Copy))
    hidden_us, first = 0.0, 0
    for start_us, end_us in copies:
        while first < len(busy) and busy[first][1] <= start_us:
            first += 1
        for from_us, to_us in busy[first:]:
            if from_us >= end_us:
                break
            hidden_us += min(to_us, end_us) - max(from_us, start_us)
    return sum(end_us - start_us for start_us, end_us in copies), hidden_us


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    found: list[Span] = []
    for start_us, end_us in sorted(spans):
        if found and start_us <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_us)
        else:
            found.append((start_us, end_us))
    return found
