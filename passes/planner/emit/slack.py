"""Use the slack of a predicted run to hold fewer bytes at once, and list its steps so that the peak shows.

A copy that starts as early as it can may hold bytes side by side with those that a running kernel is about
to give back, though it could as well wait for them. Where the bytes held at once in the run exceed those of
the list's order, in which each step is over before the next one begins, steps are delayed as long as that
lowers the peak and the run takes no longer: a descent, one delay at a time, since the problem (resource
levelling of a project) is NP-hard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridc.ir import Device, Graph, Lane, Step
from hybridc.passes.planner.emit.offsets import MemoryBlock, live_bound
from hybridc.passes.planner.emit.reuse_buffers import Allocation, Spans, holdings_of
from hybridc.passes.planner.emit.waits import reduce_waits

# A descent that is cut short keeps what it has: the limit trades bytes for time of planning.
_TRIAL_STEPS = 100_000
"""Steps that are given new times in all trials: half a second."""
# Later ones free bytes, too, but delay the step further than it needs.
_RELEASES = 3
"""A delay ends when bytes are given back: one of so many next times."""
_AT_PEAK = {Device.GPU: (Lane.H2D, Lane.GPU, Lane.D2H), Device.CPU: (Lane.D2H, Lane.CPU, Lane.H2D)}
"""Lanes whose steps touch bytes of a device: those that only take some, that do both, that only give back."""


def reduce_peak(
    graph: Graph,
    steps: Sequence[Step],
    step_us: Sequence[float],
    waiting: Sequence[Step],
    devices: Sequence[Device],
) -> tuple[tuple[Step, ...], Spans]:
    """The steps in another order, and when each runs: `(steps, spans)` for `reuse_buffers`.

    `steps` wait for data alone; `waiting` are the same steps with all waits of a plan, whose run is the
    one to begin with. Ensures: no later end than that run's, where the live ranges of a tensor follow one
    another; at no time more bytes on a device; `live_bytes_bound` by the order of the list equals the one
    by spans, but where the peaks of both devices contradict each other.
    """
    run = _timed_steps_of(graph, steps, step_us, devices)
    follows = [(*f, *s.waits) for f, s in zip(run.follows, waiting, strict=True)]
    begun = replace(run, follows=tuple(follows)).starts([0.0] * len(steps))
    starts = _with_lower_peaks(run, begun)
    return _relisted(run, starts)


def schedule_fetches_late(
    graph: Graph, steps: Sequence[Step], step_us: Sequence[float], spans: Spans, devices: Sequence[Device]
) -> tuple[tuple[Step, ...], Spans]:
    """As `reduce_peak`, but for a run that is given by `spans`: each copy to the GPU starts as late as all
    that follows it allows, and everything else when it did. Fewer bytes are live together then, which packs
    better.
    """
    run = _timed_steps_of(graph, steps, step_us, devices)
    starts = [start_us for start_us, _ in spans]
    least_us = [run.makespan_us(starts)] * len(steps)
    for position in reversed(range(len(steps))):
        if steps[position].lane is Lane.H2D:
            late_us = least_us[position] - step_us[position]
            # the sum is rounded: step back by one float until it ends in time
            while late_us + step_us[position] > least_us[position]:
                late_us = math.nextafter(late_us, -math.inf)
            starts[position] = max(starts[position], late_us)
        for other in run.follows[position]:
            least_us[other] = min(least_us[other], starts[position])
    return _relisted(run, starts)


@dataclass(frozen=True)
class _Held:
    """What a device holds, as arrays: levels are asked for thousands of times."""

    allocations: Sequence[Allocation]
    steps: int

    @cached_property
    def size_bytes(self) -> np.ndarray:
        return np.array([a.size_bytes for a in self.allocations], np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """The step that takes each allocation's bytes; negative: they are held from before the first one."""
        return np.array([a.first for a in self.allocations], np.int64)

    @cached_property
    def _uses(self) -> tuple[np.ndarray, np.ndarray]:
        """The uses of all, one after the other, and where those of each begin. All have one at time 0."""
        uses = [(*a.uses, self.steps) for a in self.allocations]
        return np.array([u for of in uses for u in of], np.int64), np.cumsum([0, *map(len, uses)])[:-1]

    @cached_property
    def _stays(self) -> np.ndarray:
        return np.array([a.last >= self.steps for a in self.allocations], bool)

    def ends_us(self, step_ends_us: np.ndarray) -> np.ndarray:
        """When the bytes of each allocation are free again, given the ends of all steps."""
        if not self.allocations:
            return np.zeros(0)
        uses, begins = self._uses
        found = np.maximum.reduceat(np.append(step_ends_us, 0.0)[uses], begins)
        return np.where(self._stays, np.inf, found)


@dataclass(frozen=True, slots=True)
class _TimedSteps:
    """Steps whose times may still change; each lane keeps its order."""

    steps: Sequence[Step]
    step_us: Sequence[float]
    follows: tuple[tuple[int, ...], ...]
    """For each step those, listed before it, that must have ended."""
    held: Mapping[Device, _Held]

    def starts(self, least_us: Sequence[float]) -> list[float]:
        """The earliest start of each step, given times before which it must not."""
        ends: list[float] = []
        starts: list[float] = []
        for follows, start_us, us in zip(self.follows, least_us, self.step_us, strict=True):
            for other in follows:
                start_us = max(start_us, ends[other])
            starts.append(start_us)
            ends.append(start_us + us)
        return starts

    def latest(self, makespan_us: float) -> list[float]:
        """The latest start of each step for which the run ends in time."""
        ends = [makespan_us] * len(self.steps)
        for position in reversed(range(len(self.steps))):
            start_us = ends[position] - self.step_us[position]
            for other in self.follows[position]:
                ends[other] = min(ends[other], start_us)
        return [end_us - us for end_us, us in zip(ends, self.step_us, strict=True)]

    def makespan_us(self, starts: Sequence[float]) -> float:
        """When the last step ends, given all starts."""
        return max((s + us for s, us in zip(starts, self.step_us, strict=True)), default=0.0)

    def ends_us(self, device: Device, starts: Sequence[float]) -> np.ndarray:
        """When the bytes of each allocation of a device are free again."""
        return self.held[device].ends_us(np.asarray(starts) + np.asarray(self.step_us))


def _timed_steps_of(
    graph: Graph, steps: Sequence[Step], step_us: Sequence[float], devices: Sequence[Device]
) -> _TimedSteps:
    """Steps follow what they wait for, the one before on their lane, and what used the tensor they write."""
    follows = [set(step.waits) for step in steps]
    before: dict[Lane, int] = {}
    for position, step in enumerate(steps):
        if step.lane in before:
            follows[position].add(before[step.lane])
        before[step.lane] = position
    holdings = {device: holdings_of(graph, steps, device) for device in devices}
    for of_device in holdings.values():
        uses: dict[str, tuple[int, ...]] = {}
        for live_range in sorted(of_device.ranges, key=lambda r: r.first):
            if live_range.first >= 0:
                follows[live_range.first].update(
                    p for p in uses.get(live_range.name, ()) if p < live_range.first
                )
            uses[live_range.name] = live_range.uses
    held = {device: _Held(of_device.allocations, len(steps)) for device, of_device in holdings.items()}
    return _TimedSteps(steps, step_us, tuple(tuple(sorted(f)) for f in follows), held)


# --------------------------------------------------------------------------------------------- delays


@dataclass(frozen=True, slots=True)
class _Occupancy:
    """How many bytes a device holds, at most."""

    peak_bytes: int
    peak_us: float
    """The first time at which it holds them."""
    excess_bytes: int
    """By how much it holds more than the limit, summed over the times at which it takes bytes."""


def _with_lower_peaks(run: _TimedSteps, starts: list[float]) -> list[float]:
    """Starts with lower peaks, as far as delays that cost no time lead; else the given ones."""
    # less than in the order of the list cannot show there
    limits = {device: _listed_bytes(run, device, starts) for device in run.held}
    makespan_us = run.makespan_us(starts)
    begun = _levels(run, limits, starts)
    levels: Mapping[Device, _Occupancy] = begun
    found = starts
    # counted in steps, so that the effort does not depend on the computer
    trials = _TRIAL_STEPS // max(len(starts), 1)
    while trials > 0:
        best: tuple[list[float], Mapping[Device, _Occupancy]] | None = None
        release_us = -1.0
        for position, delay_us in _delays(run, limits, levels, found, makespan_us):
            # the shortest delay that helps: a longer one would take slack from other steps
            if trials <= 0 or (best and delay_us > release_us):
                break
            trials -= 1
            trial = run.starts([*found[:position], delay_us, *found[position + 1 :]])
            if run.makespan_us(trial) > makespan_us:
                continue
            reached = _levels(run, limits, trial)
            if _is_lower(reached, best[1] if best else levels, limits):
                best, release_us = (trial, reached), delay_us
        if best is None:
            break
        found, levels = best
    improved = any(levels[device].peak_bytes < begun[device].peak_bytes for device in levels)
    return found if improved else starts


def _delays(
    run: _TimedSteps,
    limits: Mapping[Device, int],
    levels: Mapping[Device, _Occupancy],
    starts: Sequence[float],
    makespan_us: float,
) -> Iterator[tuple[int, float]]:
    """Steps that take bytes held at a peak, and when they could start instead: `(position, start_us)`."""
    latest = run.latest(makespan_us)
    for device, level in levels.items():
        if level.peak_bytes <= limits[device]:
            continue
        ends = zip(run.held[device].first.tolist(), run.ends_us(device, starts).tolist(), strict=True)
        held = [
            (first, end_us)
            for first, end_us in ends
            if (starts[first] if first >= 0 else 0.0) <= level.peak_us < end_us
        ]
        for release_us in sorted({end_us for _, end_us in held})[:_RELEASES]:
            for first in sorted({first for first, _ in held if first >= 0}):
                # later than now, and not so late that the run takes longer
                if starts[first] < release_us <= latest[first]:
                    yield first, release_us


def _levels(
    run: _TimedSteps, limits: Mapping[Device, int], starts: Sequence[float]
) -> dict[Device, _Occupancy]:
    return {device: _level(run, device, limit, starts) for device, limit in limits.items()}


def _level(run: _TimedSteps, device: Device, limit: int, starts: Sequence[float]) -> _Occupancy:
    """The level of one device; bytes that are given back at one time may be taken at the same."""
    held = run.held[device]
    takes = held.first >= 0
    begun_bytes = int(held.size_bytes[~takes].sum())
    at_us = np.concatenate([np.asarray(starts)[held.first[takes]], run.ends_us(device, starts)])
    changes = np.concatenate([held.size_bytes[takes], -held.size_bytes])
    # at one time bytes are given back before others are taken: negative changes come first
    order = np.lexsort((changes, at_us))
    live = begun_bytes + np.cumsum(changes[order])
    # counted where bytes are taken, so that long plateaus count no more than short ones
    excess = int(np.maximum(live[changes[order] > 0] - limit, 0).sum())
    highest = int(live.argmax()) if live.size else -1
    if not live.size or live[highest] <= begun_bytes:
        return _Occupancy(begun_bytes, 0.0, excess)
    return _Occupancy(int(live[highest]), float(at_us[order[highest]]), excess)


def _is_lower(
    reached: Mapping[Device, _Occupancy], before: Mapping[Device, _Occupancy], limits: Mapping[Device, int]
) -> bool:
    """Whether less is held beyond the limits, and the peak of no device is higher."""
    # one device must not gain at the cost of the other
    if any(r.peak_bytes > max(before[d].peak_bytes, limits[d]) for d, r in reached.items()):
        return False
    return sum(r.excess_bytes for r in reached.values()) < sum(b.excess_bytes for b in before.values())


def _listed_bytes(run: _TimedSteps, device: Device, starts: Sequence[float]) -> int:
    """What the device would hold if each step were over before the next one starts."""
    order = sorted(range(len(starts)), key=lambda p: starts[p])
    # -1 and the number of steps stand for before the first step and after the last
    rank = {p: number for number, p in enumerate(order)} | {-1: -1, len(starts): len(starts)}
    return live_bound(
        [
            MemoryBlock(h.size_bytes, rank[h.first], max(rank[p] for p in (h.last, *h.uses)))
            for h in run.held[device].allocations
        ]
    )


# ---------------------------------------------------------------------------------------------- order


def _relisted(run: _TimedSteps, starts: Sequence[float]) -> tuple[tuple[Step, ...], Spans]:
    """Steps by their starts; but those that run at a device's peak, and give back bytes when they end, come
    after those that have taken bytes by then: at one of them all bytes are held that the peak consists of.
    """
    keys = [(start_us, 0) for start_us in starts]
    for device in sorted(run.held, key=list(Device).index, reverse=True):  # the GPU has the last word
        peak_us = _level(run, device, 0, starts).peak_us
        for position, (step, start_us) in enumerate(zip(run.steps, starts, strict=True)):
            if start_us <= peak_us < start_us + run.step_us[position] and step.lane in _AT_PEAK[device]:
                rank = _AT_PEAK[device].index(step.lane)
                # steps that only take bytes keep their start, the others move behind the peak
                keys[position] = (peak_us if rank else start_us, rank)
    order = sorted(range(len(starts)), key=lambda position: keys[position])
    number = {position: i for i, position in enumerate(order)}
    listed = [run.steps[position] for position in order]
    needs = [[number[wait] for wait in step.waits] for step in listed]
    spans = [(starts[position], starts[position] + run.step_us[position]) for position in order]
    return reduce_waits(listed, needs), spans
