"""Which waits order steps of different lanes, and which are implied by others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridc.ir import Lane, Step

_LANE_INDEX = {lane: index for index, lane in enumerate(Lane)}


def reduce_waits(steps: Sequence[Step], needs: Sequence[Iterable[int]]) -> tuple[Step, ...]:
    """The steps, each waiting for the earlier steps it needs, less what is implied: a transitive reduction.

    The clock of a step holds, per lane, the last position that has ended once the step has: a vector
    clock (Mattern 1989). A need is implied if the clock gathered so far covers it; the latest needs
    come first, since only a later step can imply an earlier one.
    """
    lanes = [_LANE_INDEX[step.lane] for step in steps]
    clocks: list[list[int]] = []
    # -1: no step of the lane has ended
    lane_clock = [[-1] * len(_LANE_INDEX) for _ in _LANE_INDEX]
    ordered: list[Step] = []
    for position, (step, lane, needed) in enumerate(zip(steps, lanes, needs, strict=True)):
        clock = list(lane_clock[lane])
        waits: list[int] = []
        # a later step may imply an earlier one, never the other way round
        for need in sorted(needed, reverse=True):
            if clock[lanes[need]] < need:
                waits.append(need)
                # what the step waited for knew of more steps that had ended
                clock = [max(pair) for pair in zip(clock, clocks[need], strict=True)]
        clock[lane] = position
        clocks.append(clock)
        lane_clock[lane] = clock
        ordered.append(replace(step, waits=tuple(reversed(waits))))
    return tuple(ordered)
