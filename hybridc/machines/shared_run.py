"""A plan's steps on a machine whose lanes share memories and the link, and what each step loses.

Written apart from the planner, so that it can check it: times come from the profile's speeds anew, and the
run is a list of moments between which all rates are constant. At each moment every lane's next step runs if
what it waits for has ended. A step uses one or several resources, each at a demand; a resource whose demands
exceed what it reaches gives all of them the same share, and a step goes at the least of its shares. Such
fluid models are what simulators of networks use (Casanova et al., SimGrid, JPDC 74(10), 2014).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hybridc.ir import Copy, Device, Graph, Kernel, Lane, Step
from hybridc.machine import Machine


class Resource(StrEnum):
    """What several lanes use at once."""

    HOST = "the host's memory"
    GPU = "the GPU's memory"
    LINK = "the link"


@dataclass(frozen=True, slots=True)
class Work:
    """A step by itself."""

    lane: Lane
    waits: tuple[int, ...]
    us: float
    demands: tuple[tuple[Resource, float], ...]
    """Of each resource, as a share of what that reaches for all."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """When steps end, and what each loses, in microseconds."""

    makespan_us: float
    lost_us: tuple[Mapping[Resource, float], ...]
    """Of each step by the resource that held it up; together what it takes longer than by itself."""


def alone_us(graph: Graph, step: Step, machine: Machine) -> float:
    """Microseconds of a step by itself: of a copy latency and bytes over bandwidth, of a kernel what was
    measured or estimated, or the roofline of what its family reaches and a launch."""
    if isinstance(step, Copy):
        size_bytes = graph.tensor[step.tensor].size_bytes
        return machine.link.latency_us + _us(size_bytes, _link_gb_s(step, machine)) if size_bytes else 0.0
    kernel, processor = graph.kernel[step.kernel], machine.processor(step.device)
    for known in (machine.measured_us, machine.estimated_us):
        if (kernel.function, step.device) in known:
            return known[kernel.function, step.device]
    share = processor.efficiency(kernel.family)
    arithmetic_us = _us(kernel.flops, processor.peak_gflops * share.compute)
    bytes_us = _us(kernel.bytes_moved, processor.bandwidth_gb_s * share.memory)
    return processor.launch_us + max(arithmetic_us, bytes_us)


def work_of(graph: Graph, steps: Sequence[Step], machine: Machine) -> tuple[Work, ...]:
    """The steps with their times by themselves and what they demand."""
    return tuple(
        Work(step.lane, step.waits, us, _demands(graph, step, us, machine))
        for step in steps
        for us in (alone_us(graph, step, machine),)
    )


def run_shared(work: Sequence[Work], both_directions: float = 1.0) -> SharedRun:
    """The run of some steps, each lane's in order; `both_directions` as in the profile's link.

    Requires: a step waits for earlier ones.
    """
    waiting = {lane: [i for i, one in enumerate(work) if one.lane is lane][::-1] for lane in Lane}
    left_us = [one.us for one in work]
    lost: list[defaultdict[Resource, float]] = [defaultdict(float) for _ in work]
    ended: set[int] = set()
    now_us = 0.0
    while any(waiting.values()):
        heads = [queue[-1] for queue in waiting.values() if queue]
        running = [i for i in heads if ended.issuperset(work[i].waits)]
        slowed = _slowed([work[i] for i in running], both_directions)
        passed_us = min(left_us[i] / rate for i, (rate, _) in zip(running, slowed, strict=True))
        now_us += passed_us
        for i, (rate, by) in zip(running, slowed, strict=True):
            if by is not None:
                lost[i][by] += passed_us * (1 - rate)
            left_us[i] -= passed_us * rate
            # what is left of a step that ends now is rounding
            if left_us[i] <= 1e-12 * work[i].us:
                ended.add(waiting[work[i].lane].pop())
    return SharedRun(now_us, tuple(lost))


def _slowed(running: Sequence[Work], both_directions: float) -> list[tuple[float, Resource | None]]:
    """Of each the share of its speed that it keeps, and what takes the rest."""
    total: defaultdict[Resource, float] = defaultdict(float)
    most: dict[Resource, float] = {}
    for one in running:
        for resource, demand in one.demands:
            total[resource] += demand
            most[resource] = max(most.get(resource, 0.0), demand)
    # one by itself has all that it demands: it was timed with that
    kept = {r: min(1.0, max(1.0, most[r]) / demand) for r, demand in total.items() if demand}
    if {Lane.H2D, Lane.D2H} <= {one.lane for one in running}:
        kept[Resource.LINK] = both_directions
    found = []
    for one in running:
        uses = [resource for resource, demand in one.demands if demand]
        uses += [Resource.LINK] if one.lane in (Lane.H2D, Lane.D2H) else []
        by = min(uses, key=lambda r: kept.get(r, 1.0), default=None)
        rate = 1.0 if by is None else kept.get(by, 1.0)
        found.append((rate, by if rate < 1 else None))
    return found


def _demands(graph: Graph, step: Step, us: float, machine: Machine) -> tuple[tuple[Resource, float], ...]:
    reached = {Resource.HOST: machine.cpu.together_gb_s, Resource.GPU: machine.gpu.together_gb_s}
    if isinstance(step, Copy):
        gb_s = graph.tensor[step.tensor].size_bytes / (us * 1e3) if us else 0.0
        return tuple((resource, gb_s / most) for resource, most in reached.items())
    kernel: Kernel = graph.kernel[step.kernel]
    resource = Resource.GPU if step.device is Device.GPU else Resource.HOST
    gb_s = kernel.bytes_moved / (us * 1e3) if us else 0.0
    # what caches deliver is not demanded of the memory
    return ((resource, min(1.0, gb_s / reached[resource])),)


def _link_gb_s(copy: Copy, machine: Machine) -> float:
    return machine.link.h2d_gb_s if copy.target is Device.GPU else machine.link.d2h_gb_s


def _us(amount: float, per_ns: float) -> float:
    """Of operations at 1e9 a second, or bytes at as many."""
    return amount / (per_ns * 1e3)
