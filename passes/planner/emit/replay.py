"""A plan's run on a machine whose lanes slow each other down where they share a memory or the link.

What runs at one time shares what it uses: the host's memory (kernels of the CPU, and copies both ways), the
GPU's (its kernels, and copies both ways), and the link, of whose bandwidth each direction keeps a share while
both are busy. A step demands of a memory the bytes that it moves in the time that it takes by itself. Where
demands exceed what the memory reaches, all get the same share of theirs: a memory controller serves requests
as they come. Rates change when a step begins or ends; in between they are constant, as in the fluid models of
simulators of networks (Casanova et al., SimGrid, JPDC 74(10), 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.ir import Copy, Device, Graph, Lane, Step
from hybridc.machine import Machine
from hybridc.passes.planner.model.cost import step_times_us

_NOTHING = 1 + 1e-9
"""So little longer is rounding."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step takes by itself."""

    us: float
    host_gb_s: float = 0.0
    gpu_gb_s: float = 0.0
    """Of each memory, 1e9 bytes a second."""


def demands_of(graph: Graph, steps: Sequence[Step], machine: Machine) -> tuple[Demand, ...]:
    """Of each step; of a memory at most what that reaches: what caches deliver is not demanded of it."""

    def demand(step: Step, us: float) -> Demand:
        if isinstance(step, Copy):
            gb_s = _rate(graph.tensor[step.tensor].size_bytes, us)
            return Demand(us, host_gb_s=gb_s, gpu_gb_s=gb_s)
        gb_s = min(
            _rate(graph.kernel[step.kernel].bytes_moved, us), machine.processor(step.device).together_gb_s
        )
        return Demand(us, gpu_gb_s=gb_s) if step.device is Device.GPU else Demand(us, host_gb_s=gb_s)

    times_us = step_times_us(graph, steps, machine)
    return tuple(demand(step, us) for step, us in zip(steps, times_us, strict=True))


def replay(
    steps: Sequence[Step], demands: Sequence[Demand], machine: Machine
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """When each step starts and ends on the machine: `(makespan_us, ((start_us, end_us), ...))`.

    Each lane issues its steps in order, a step as soon as those that it waits for have ended. Requires: a
    step waits for steps listed before it. Ensures: no step takes less than it does by itself.
    """
    queues = {lane: [i for i, step in enumerate(steps) if step.lane is lane] for lane in Lane}
    next_of = dict.fromkeys(Lane, 0)
    starts_us, ends_us = [0.0] * len(steps), [math.inf] * len(steps)
    running: dict[int, float] = {}  # what is left of its own time
    now_us = 0.0
    while True:
        for lane, queue in queues.items():
            at = next_of[lane]
            if at < len(queue) and all(ends_us[i] <= now_us for i in _before(steps, queue, at)):
                starts_us[queue[at]] = now_us
                running[queue[at]] = demands[queue[at]].us
                next_of[lane] += 1
        if not running:
            return max((end for end in ends_us), default=0.0), tuple(zip(starts_us, ends_us, strict=True))
        if len(running) == 1:  # one by itself loses nothing
            rates = dict.fromkeys(running, 1.0)
        else:
            rates = _rates({i: demands[i] for i in running}, {steps[i].lane for i in running}, steps, machine)
        passed_us = min(left_us / rates[i] for i, left_us in running.items())
        now_us += passed_us
        for i, left_us in list(running.items()):
            # what ends together with the first, but for rounding, ends with it
            if left_us / rates[i] <= passed_us * (1 + 1e-12):
                ends_us[i] = now_us
                del running[i]
            else:
                running[i] = left_us - passed_us * rates[i]


def replayed_us(graph: Graph, steps: Sequence[Step], machine: Machine) -> float:
    """What the steps of a plan take on a machine, whatever machine it was made for."""
    return replay(steps, demands_of(graph, steps, machine), machine)[0]


def shared_times_us(graph: Graph, steps: Sequence[Step], machine: Machine) -> tuple[float, ...]:
    """What each step takes in the replay, with what it loses: a timeline of these times is that run.

    What loses nothing takes what it does by itself, to the last bit.
    """
    demands = demands_of(graph, steps, machine)
    _, spans = replay(steps, demands, machine)
    return tuple(
        demand.us if end_us - start_us <= demand.us * _NOTHING else end_us - start_us
        for demand, (start_us, end_us) in zip(demands, spans, strict=True)
    )


def _before(steps: Sequence[Step], queue: Sequence[int], at: int) -> tuple[int, ...]:
    return (*steps[queue[at]].waits, *queue[at - 1 : at])


def _rates(
    demands: dict[int, Demand], lanes: set[Lane], steps: Sequence[Step], machine: Machine
) -> dict[int, float]:
    """Of what runs at one time the share of its speed that each step keeps."""
    host = _share([d.host_gb_s for d in demands.values()], machine.cpu.together_gb_s)
    gpu = _share([d.gpu_gb_s for d in demands.values()], machine.gpu.together_gb_s)
    link = machine.link.both_directions if {Lane.H2D, Lane.D2H} <= lanes else 1.0
    return {
        i: min(
            host if demand.host_gb_s else 1.0,
            gpu if demand.gpu_gb_s else 1.0,
            link if isinstance(steps[i], Copy) else 1.0,
        )
        for i, demand in demands.items()
    }


def _share(demands_gb_s: Sequence[float], reached_gb_s: float) -> float:
    """One by itself gets all that it demands: that is what it was timed with."""
    total_gb_s = sum(demands_gb_s)
    return min(1.0, max(reached_gb_s, *demands_gb_s) / total_gb_s) if total_gb_s else 1.0


def _rate(size_bytes: int, us: float) -> float:
    return size_bytes / (us * 1e3) if us > 0 else 0.0
