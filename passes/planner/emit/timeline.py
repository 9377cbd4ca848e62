"""The predicted run of a plan: its lanes side by side, as discrete events."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.ir import Lane, Step


def timeline(
    steps: Sequence[Step], step_us: Sequence[float]
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """When each step starts and ends, each taking its `step_us`: `(makespan_us, ((start_us, end_us), ...))`.

    A host thread for each lane issues its steps in order, so a step starts once the step before it on its
    lane and the steps it waits for have ended. Requires: a step waits for steps listed before it.
    """
    lane_free_us = dict.fromkeys(Lane, 0.0)
    spans: list[tuple[float, float]] = []
    for step, duration_us in zip(steps, step_us, strict=True):
        start_us = max(lane_free_us[step.lane], *(spans[wait][1] for wait in step.waits), 0.0)
        end_us = start_us + duration_us
        lane_free_us[step.lane] = end_us
        spans.append((start_us, end_us))
    return max(lane_free_us.values()), tuple(spans)
