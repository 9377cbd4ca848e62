"""Decisions -> steps, and places for their buffers within the budget."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from hybridc.ir import Arena, Buffer, Copy, Device, Graph, Step
from hybridc.machine import Machine
from hybridc.passes.planner.emit.insert_copies import insert_copies, with_data_waits
from hybridc.passes.planner.emit.reuse_buffers import Spans, live_bytes_bound, reuse_buffers
from hybridc.passes.planner.emit.slack import reduce_peak, schedule_fetches_late
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.model.cost import step_times_us
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.simulate import SimulatedRun, simulate

SHORT = 0.005
"""Share of the usual effort for packing a plan that may be thrown away."""
_HOLES = 1.005
"""How much larger than the bytes that it holds at once an arena may be for nobody to try again."""
_HURRIES = 4
"""How often a plan whose steps wait for bytes is packed again."""


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A simulated run, with its steps in order and the places of its buffers."""

    problem: Problem
    decisions: Decisions
    listed: tuple[Step, ...]
    """The steps, waiting for data alone."""
    spans: Spans | None
    """When each runs, if bytes are reused only where nothing has to wait for them."""
    steps: tuple[Step, ...] = ()
    """The steps with all their waits."""
    buffers: tuple[Buffer, ...] = ()
    arenas: tuple[Arena, ...] = ()
    makespan_us: float = 0.0
    """Of `steps`: where bytes have to be waited for, it may be longer than simulated."""
    bound_us: float = 0.0
    """No plan for the budget asked for is faster."""

    @property
    def gpu_bytes(self) -> int:
        return self._bytes_of(Device.GPU)

    @property
    def host_bytes(self) -> int:
        return self._bytes_of(Device.CPU)

    def _bytes_of(self, device: Device) -> int:
        return next((arena.size_bytes for arena in self.arenas if arena.device is device), 0)


def materialize(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    decisions: Decisions,
    *,
    devices: Sequence[Device] = (Device.GPU, Device.CPU),
    outcome: SimulatedRun | None = None,
    packing: float = SHORT,
    capacity_bytes: int | None = None,
) -> PlacedPlan:
    """Place the buffers of a run with the given decisions, which must be feasible, in an arena a device.

    `outcome` is given where the run is not the simulator's own. Bytes are reused only where nothing has to
    wait for them, if that fits the GPU's capacity, by default the problem's budget; else as soon as the
    steps' order allows, less the waits that it turns out not to need. The GPU's arena may still exceed the
    capacity, where packing leaves holes; `packing` is the effort for it, a share of the usual one.
    """
    capacity_bytes = problem.budget_bytes if capacity_bytes is None else capacity_bytes
    run = outcome or simulate(problem, decisions)
    assert run.feasible, f"{run.peak_gpu_bytes} bytes exceed the budget of {problem.budget_bytes}"
    listed = insert_copies(graph, problem, run)
    spans = [(event.start_us, event.end_us) for event in run.events]
    if live_bytes_bound(graph, listed, Device.GPU, spans) <= capacity_bytes:
        timed = PlacedPlan(problem, decisions, listed, spans)
        draft = _placed(graph, machine, timed, devices, capacity_bytes, packing)
        if draft.gpu_bytes <= capacity_bytes:
            return draft
    untimed = PlacedPlan(problem, decisions, listed, None)
    waiting = _placed(graph, machine, untimed, devices, capacity_bytes, packing)
    return _hurried(graph, machine, waiting, max(capacity_bytes, waiting.gpu_bytes))


def repacked(graph: Graph, machine: Machine, draft: PlacedPlan, effort: float = 1.0) -> PlacedPlan:
    """The draft with its arenas packed as tightly as `effort` finds without making it slower.

    Bytes are reused where nothing has to wait for them in the run that the draft has come to, or that has
    come out of it by delays that cost no time. Where holes are left, it is tried again with later copies.
    """
    devices = [arena.device for arena in draft.arenas]
    best = draft
    for is_late in (False, True, True):
        settled = _settled(graph, machine, best)
        if is_late and settled.spans is not None:
            step_us = step_times_us(graph, settled.listed, machine)
            listed, spans = schedule_fetches_late(graph, settled.listed, step_us, settled.spans, devices)
            settled = replace(settled, listed=listed, spans=spans)
        steps, buffers, arenas = reuse_buffers(graph, settled.listed, devices, settled.spans, effort=effort)
        tight = _timed(graph, machine, replace(settled, steps=steps, buffers=buffers, arenas=arenas))
        fits = tight.gpu_bytes <= best.gpu_bytes and tight.host_bytes <= best.host_bytes
        if fits and tight.makespan_us <= best.makespan_us:
            best = tight
        if all(a.size_bytes <= _HOLES * a.lower_bound_bytes for a in best.arenas):
            break
    return best


def without_copies(
    graph: Graph, machine: Machine, draft: PlacedPlan, names: Set[str], capacity_bytes: int
) -> PlacedPlan:
    """The draft less all copies of these tensors, which nothing needs then, with its buffers placed anew.

    The GPU's arena may exceed the capacity, where they hold more bytes now.
    """
    kept = [i for i, s in enumerate(draft.listed) if not (isinstance(s, Copy) and s.tensor in names)]
    number = {old: new for new, old in enumerate(kept)}
    waiting = tuple(
        replace(draft.steps[i], waits=tuple(number[w] for w in draft.steps[i].waits if w in number))
        for i in kept
    )
    listed = with_data_waits(graph, [draft.listed[i] for i in kept])
    shorter = _settled(graph, machine, replace(draft, listed=listed, steps=waiting))
    devices = [arena.device for arena in draft.arenas]
    placed = _placed(graph, machine, shorter, devices, capacity_bytes, SHORT)
    if placed.gpu_bytes > capacity_bytes:
        placed = _placed(graph, machine, replace(shorter, spans=None), devices, capacity_bytes, SHORT)
    return _hurried(graph, machine, placed, max(capacity_bytes, placed.gpu_bytes))


def _hurried(graph: Graph, machine: Machine, draft: PlacedPlan, most_bytes: int) -> PlacedPlan:
    """Without waits that bytes do not need: packed by the times that the draft came to, while that helps."""
    devices = [arena.device for arena in draft.arenas]
    for _ in range(_HURRIES):
        again = _placed(graph, machine, _settled(graph, machine, draft), devices, most_bytes, SHORT)
        if again.gpu_bytes > most_bytes or again.makespan_us >= draft.makespan_us:
            break
        draft = again
    return draft


def _settled(graph: Graph, machine: Machine, draft: PlacedPlan) -> PlacedPlan:
    """With the times that its waits lead to, or later ones that hold fewer bytes; not yet packed by them."""
    devices = [arena.device for arena in draft.arenas]
    step_us = step_times_us(graph, draft.listed, machine)
    listed, spans = reduce_peak(graph, draft.listed, step_us, draft.steps, devices)
    return replace(draft, listed=listed, spans=spans)


def _placed(
    graph: Graph,
    machine: Machine,
    draft: PlacedPlan,
    devices: Sequence[Device],
    capacity_bytes: int,
    effort: float,
) -> PlacedPlan:
    """With buffers, packed until the GPU's fit."""
    steps, buffers, arenas = reuse_buffers(
        graph,
        draft.listed,
        devices,
        draft.spans,
        gpu_capacity_bytes=capacity_bytes,
        effort=effort,
    )
    return _timed(graph, machine, replace(draft, steps=steps, buffers=buffers, arenas=arenas))


def _timed(graph: Graph, machine: Machine, draft: PlacedPlan) -> PlacedPlan:
    step_us = step_times_us(graph, draft.steps, machine)
    return replace(draft, makespan_us=timeline(draft.steps, step_us)[0])
