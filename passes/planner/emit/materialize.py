"""Decisions -> steps, and places for their buffers within the budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import starmap

from hybridc.ir import Arena, Buffer, Copy, Device, Lane, Step
from hybridc.passes.planner.emit.insert_copies import insert_copies, with_data_waits
from hybridc.passes.planner.emit.replay import shared_times_us
from hybridc.passes.planner.emit.reuse_buffers import Spans, live_bytes_bound, reuse_buffers
from hybridc.passes.planner.emit.slack import reduce_peak, schedule_fetches_late
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.model.contention import SharedLanes
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.cost import step_times_us
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import SimulatedRun, simulate

# With more, half of the planning time went into packing plans that a later search replaces.
SHORT = 0.005
"""Share of the usual effort for packing a plan that may be thrown away."""
# Arenas of the suite had holes of 1.0 % (U-Net) and 2.3 % (SqueezeNet), which another round closes.
FRAGMENTATION = 1.005
"""An arena is tight enough if it exceeds the bytes that are live at once by no more than this factor."""
# Each round packs by the times of the one before; it ends by itself where a round gains nothing.
REPACK_ROUNDS = 4
"""How often at most a plan whose steps wait for bytes is packed again."""
# A round takes as long as packing did, and what it gains is at most what the waits cost.
_HARDLY_WAITING = 1.0002
"""So little slower than without waits for bytes a plan is worth no such round."""


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A simulated run as steps in order, with the places of its buffers."""

    problem: Problem
    decisions: Decisions
    listed: tuple[Step, ...]
    """The steps, waiting for data alone."""
    spans: Spans | None
    """When each runs, if bytes are reused only where nothing has to wait for them."""
    step_us: tuple[float, ...]
    """What each takes at most, with what it loses to others that run at once."""
    steps: tuple[Step, ...] = ()
    """The steps with all their waits."""
    buffers: tuple[Buffer, ...] = ()
    arenas: tuple[Arena, ...] = ()
    makespan_us: float = 0.0
    """Of `steps` as `replay` has them: rates change as steps begin and end, and bytes may be waited for. The
    simulation that decisions are searched with may say a little more or less."""
    bound_us: float = 0.0
    """No plan for the budget asked for is faster."""

    @property
    def gpu_bytes(self) -> int:
        """Size of the GPU's arena in bytes; 0 on a target without a GPU."""
        return self._bytes_of(Device.GPU)

    @property
    def host_bytes(self) -> int:
        """Size of the host's arena in bytes."""
        return self._bytes_of(Device.CPU)

    def fits_host(self, host_bytes: int | None) -> bool:
        """Whether the host's arena has at most these bytes; None: no limit."""
        return host_bytes is None or self.host_bytes <= host_bytes

    def fits(self, gpu_bytes: int, host_bytes: int | None) -> bool:
        """Whether both arenas are within their limits in bytes."""
        return self.gpu_bytes <= gpu_bytes and self.fits_host(host_bytes)

    def _bytes_of(self, device: Device) -> int:
        return next((arena.size_bytes for arena in self.arenas if arena.device is device), 0)


def materialize(
    context: PlanningContext,
    problem: Problem,
    decisions: Decisions,
    *,
    run: SimulatedRun | None = None,
    packing: float = SHORT,
    capacity_bytes: int | None = None,
    must_fit: bool = False,
) -> PlacedPlan:
    """Place the buffers of a run with the given decisions in an arena for each device of the context.

    Requires: the decisions are feasible for `problem`, which is one of the context's graph. `run` is given
    where it is not the simulator's own. Bytes are reused only where nothing has to wait for them, if that
    fits the GPU's capacity in bytes, by default the problem's budget; else as soon as the steps' order
    allows, less the waits that turn out to be needless. The GPU's arena may still exceed the capacity, where
    packing leaves holes; `packing` is the effort for it, a share of the usual one. Where it `must_fit`, a
    plan whose arena exceeds it is of no use, and its waits are left as they are.
    """
    unplaced = listed_plan(context, problem, decisions, run=run)
    capacity_bytes = problem.budget_bytes if capacity_bytes is None else capacity_bytes
    return with_places(context, unplaced, capacity_bytes, packing, must_fit=must_fit)


def listed_plan(
    context: PlanningContext, problem: Problem, decisions: Decisions, *, run: SimulatedRun | None = None
) -> PlacedPlan:
    """The steps of a run with the given decisions, and when each runs, without places. As `materialize`."""
    is_given, run = run is not None, run or simulate(problem, decisions)
    assert run.feasible, f"{run.peak_gpu_bytes} bytes exceed the budget of {problem.budget_bytes}"
    listed = insert_copies(context.graph, problem, run)
    spans = [(event.start_us, event.end_us) for event in run.events]
    if is_given:
        listed, spans = _by_start(listed, shared_timeline(problem, listed, run))
    alone_us = step_times_us(context.graph, listed, context.machine)
    step_us = tuple(starmap(_duration_us, zip(spans, alone_us, strict=True)))
    return PlacedPlan(problem, decisions, listed, spans, step_us)


def with_places(
    context: PlanningContext,
    unplaced: PlacedPlan,
    capacity_bytes: int,
    packing: float = SHORT,
    *,
    must_fit: bool = False,
) -> PlacedPlan:
    """A plan of `listed_plan` with its buffers in arenas, as `materialize` says."""
    # no packing by times can fit where the live bytes alone do not
    live_bytes = live_bytes_bound(context.graph, unplaced.listed, Device.GPU, unplaced.spans)
    if live_bytes <= capacity_bytes:
        timed = _packed(context, unplaced, capacity_bytes, packing)
        if timed.gpu_bytes <= capacity_bytes:
            return timed
    waiting = _packed(context, replace(unplaced, spans=None), capacity_bytes, packing)
    if must_fit and waiting.gpu_bytes > capacity_bytes:
        return waiting
    return without_needless_waits(context, waiting, max(capacity_bytes, waiting.gpu_bytes))


def repacked(context: PlanningContext, placed: PlacedPlan, effort: float = 1.0) -> PlacedPlan:
    """The plan with its arenas packed as tightly as `effort` finds without making it slower.

    Bytes are reused where nothing has to wait for them in the run that the plan has come to, or that has
    come out of it by delays that cost no time. Where holes are left, it is tried again with later copies.
    Ensures: no arena is larger, and the makespan no longer, than before.
    """
    graph, best = context.graph, placed
    # late fetches twice: the second time they are late in a run that is better packed already
    for fetches_are_late in (False, True, True):
        again = retimed(context, best)
        if fetches_are_late and again.spans is not None:
            again = _relisted(
                again,
                *schedule_fetches_late(graph, again.listed, again.step_us, again.spans, context.devices),
            )
        steps, buffers, arenas = reuse_buffers(
            graph, again.listed, context.devices, again.spans, effort=effort
        )
        tight = _with_makespan(context, replace(again, steps=steps, buffers=buffers, arenas=arenas))
        fits = tight.gpu_bytes <= best.gpu_bytes and tight.host_bytes <= best.host_bytes
        if fits and tight.makespan_us <= best.makespan_us:
            best = tight
        if all(a.size_bytes <= FRAGMENTATION * a.lower_bound_bytes for a in best.arenas):
            break
    return best


def without_copies(
    context: PlanningContext, placed: PlacedPlan, names: Set[str], capacity_bytes: int
) -> PlacedPlan:
    """The plan less all copies of the named tensors, which nothing needs then, with its buffers packed again.

    The GPU's arena may exceed the capacity, where they hold more bytes now.
    """
    kept = [i for i, s in enumerate(placed.listed) if not (isinstance(s, Copy) and s.tensor in names)]
    number = {old: new for new, old in enumerate(kept)}
    waiting = tuple(
        replace(placed.steps[i], waits=tuple(number[w] for w in placed.steps[i].waits if w in number))
        for i in kept
    )
    listed = with_data_waits(context.graph, [placed.listed[i] for i in kept])
    step_us = tuple(placed.step_us[i] for i in kept)
    shorter = retimed(context, replace(placed, listed=listed, steps=waiting, step_us=step_us))
    packed = _packed(context, shorter, capacity_bytes, SHORT)
    if packed.gpu_bytes > capacity_bytes:
        packed = _packed(context, replace(shorter, spans=None), capacity_bytes, SHORT)
    return without_needless_waits(context, packed, max(capacity_bytes, packed.gpu_bytes))


def without_needless_waits(context: PlanningContext, placed: PlacedPlan, most_bytes: int) -> PlacedPlan:
    """The plan packed again by the times that it has come to, as long as that makes it faster.

    A step that waited for bytes may not have to if they are placed elsewhere: each round knows better when
    they are free. Ensures: the GPU's arena has at most `most_bytes`, if it had before.
    """
    for _ in range(REPACK_ROUNDS):
        again = _packed(context, retimed(context, placed), most_bytes, SHORT)
        if again.gpu_bytes > most_bytes or again.makespan_us >= placed.makespan_us:
            break
        placed = again
    return placed


def retimed(context: PlanningContext, placed: PlacedPlan) -> PlacedPlan:
    """The plan with the times that its waits lead to, or later ones that hold fewer bytes at once.

    Its buffers are those of before: to be packed again by the new times.
    """
    listed, spans = reduce_peak(context.graph, placed.listed, placed.step_us, placed.steps, context.devices)
    return _relisted(placed, listed, spans)


def _relisted(placed: PlacedPlan, listed: tuple[Step, ...], spans: Spans) -> PlacedPlan:
    """With the steps in another order, each lane's in the same."""
    times_us: dict[Step, deque[float]] = {}
    for step, us in zip(placed.listed, placed.step_us, strict=True):
        times_us.setdefault(replace(step, waits=()), deque()).append(us)
    step_us = tuple(times_us[replace(step, waits=())].popleft() for step in listed)
    return replace(placed, listed=listed, spans=spans, step_us=step_us)


def _duration_us(span: tuple[float, float], alone_us: float) -> float:
    """Of a step with these times, so that in a run in which it starts as early it ends no later."""
    start_us, end_us = span
    if start_us + alone_us == end_us:
        return alone_us  # the difference would be rounded
    us = end_us - start_us
    while start_us + us > end_us:
        us = math.nextafter(us, 0.0)
    return us


def shared_timeline(problem: Problem, listed: Sequence[Step], run: SimulatedRun) -> list[tuple[float, float]]:
    """When the steps of a run start and end that was made as if nothing were shared.

    Step i is event i. Each starts no earlier than there, for bytes that it may have waited for; they are
    settled in the order in which they are listed.
    """
    lanes = SharedLanes(problem.contention)
    free_us = dict.fromkeys(Lane, 0.0)
    spans: list[tuple[float, float]] = []
    for step, event in zip(listed, run.events, strict=True):
        start_us = max(free_us[step.lane], *(spans[wait][1] for wait in step.waits), event.start_us)
        us = event.end_us - event.start_us
        free_us[step.lane] = lanes.settle(step.lane, event.index, start_us, us)
        spans.append((start_us, free_us[step.lane]))
    return spans


def _by_start(
    steps: Sequence[Step], spans: Sequence[tuple[float, float]]
) -> tuple[tuple[Step, ...], list[tuple[float, float]]]:
    """The steps by their starts, as `Spans` are; sharing delays some behind others that were listed later.

    None starts before what it waits for has ended, nor before the one before it on its lane: both stay
    before it, also where times are equal.
    """
    order = sorted(range(len(steps)), key=lambda position: spans[position][0])
    number = {position: i for i, position in enumerate(order)}
    listed = (
        replace(steps[position], waits=tuple(sorted(number[wait] for wait in steps[position].waits)))
        for position in order
    )
    return tuple(listed), [spans[position] for position in order]


def _packed(context: PlanningContext, placed: PlacedPlan, capacity_bytes: int, effort: float) -> PlacedPlan:
    """With buffers, packed until the GPU's fit."""
    steps, buffers, arenas = reuse_buffers(
        context.graph,
        placed.listed,
        context.devices,
        placed.spans,
        gpu_capacity_bytes=capacity_bytes,
        effort=effort,
    )
    return _with_makespan(context, replace(placed, steps=steps, buffers=buffers, arenas=arenas))


def _with_makespan(context: PlanningContext, placed: PlacedPlan) -> PlacedPlan:
    step_us = placed.step_us
    if context.problem.contention.matters:
        step_us = shared_times_us(context.graph, placed.steps, context.machine)
    return replace(placed, step_us=step_us, makespan_us=timeline(placed.steps, step_us)[0])


def no_faster_than(placed: PlacedPlan, least_us: float) -> PlacedPlan:
    """The plan, said to take at least so long: all of its steps a little longer."""
    step_us, makespan_us = placed.step_us, placed.makespan_us
    factor = least_us / makespan_us if makespan_us else 1.0
    while 0 < makespan_us < least_us:
        step_us = tuple(us * factor for us in placed.step_us)
        makespan_us = timeline(placed.steps, step_us)[0]
        factor = math.nextafter(factor, math.inf)  # it was rounded
    return replace(placed, step_us=step_us, makespan_us=makespan_us)


def unpacked_us(context: PlanningContext, placed: PlacedPlan) -> float:
    """What the plan would take if no step waited for bytes."""
    step_us = shared_times_us(context.graph, placed.listed, context.machine)
    return timeline(placed.listed, step_us)[0]
