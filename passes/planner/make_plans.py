"""From graphs of a network, a machine and budgets to plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hybridc.errors import PlanError
from hybridc.ir import Arena, Buffer, Device, Graph, Plan, Step
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.planner.choose_tilings import UNLIMITED_BYTES, Tiling
from hybridc.passes.planner.emit.materialize import PlacedPlan
from hybridc.passes.planner.emit.resident_states import gpu_users, with_gpu_resident_states, without_bytes
from hybridc.passes.planner.emit.timeline import timeline
from hybridc.passes.planner.model.cost import step_times_us
from hybridc.passes.planner.model.order import renewing_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.search.partition import MOST_CLIMBED, Effort, on_cpu, partition, time_bound_us

Report = Callable[[int, int], None]


def make_plan(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    devices: Sequence[Device],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
) -> Plan:
    """`make_plans` of one graph for one budget; None means no limit."""
    budgets = () if budget_bytes is None else (budget_bytes,)
    [(_, plan)] = make_plans((Tiling(graph, pins),), machine, budgets, devices, effort=effort)
    return plan


def make_plans(
    tilings: Sequence[Tiling],
    machine: Machine,
    budgets: Sequence[int],
    devices: Sequence[Device],
    *,
    effort: Effort | None = None,
    host_bytes: int | None = None,
    report: Report = lambda done, total: None,
) -> tuple[tuple[Tiling, Plan], ...]:
    """The fastest plan for each of several budgets, and the way the network is cut up for it.

    `devices` are those of a target: `(CPU,)` or `(GPU, CPU)`. A budget limits the GPU's arena, its weights
    included, in bytes; without budgets there is one plan, which has no limit, of the first tiling. Plans
    for a GPU whose host arena exceeds `host_bytes` are made only if no other is found.
    Ensures: the same for a budget whatever others are asked for, and never slower for a larger one, if the
    tilings are from `choose_tilings`. Raises PlanError HC201 if a kernel has code for none of the devices,
    HC203 if nothing fits a budget, with the smallest that can be met.
    """
    whole = tilings[0]
    if Device.GPU not in devices:
        draft = on_cpu(whole.graph, machine)
        return tuple((whole, _plan_of(whole.graph, machine, None, draft)) for _ in budgets or (None,))
    if not budgets:
        limits = (UNLIMITED_BYTES,)
        (draft,) = partition(
            whole.graph,
            machine,
            limits,
            pins=whole.pins,
            effort=effort,
            order=whole.order,
            host_bytes=host_bytes,
            report=report,
        )
        draft = _with_states(whole, machine, draft, UNLIMITED_BYTES, effort, host_bytes)
        return ((whole, _plan_of(whole.graph, machine, None, draft)),)
    found = _fastest(tilings, machine, budgets, effort, host_bytes, report)
    found = _all_with_states(found, machine, effort, host_bytes)
    return tuple((t, _plan_of(t.graph, machine, b, draft)) for b, (t, draft) in found.items())


def _fastest(
    tilings: Sequence[Tiling],
    machine: Machine,
    budgets: Sequence[int],
    effort: Effort | None,
    host_bytes: int | None,
    report: Report,
) -> dict[int, tuple[Tiling, PlacedPlan]]:
    """The best for each budget. What cannot be better, by its bound, is not searched for."""
    least = min(tilings, key=lambda t: t.first_bytes)  # where no tiling is for a budget it says so
    best: dict[int, tuple[Tiling, PlacedPlan]] = {}
    for tiling in sorted(tilings, key=lambda t: (-t.last_bytes, t.limit_bytes)):
        bound_us = partial(time_bound_us, tiling.graph, machine, pins=tiling.pins, order=tiling.order)
        wanted = [
            b
            for b in budgets
            if (tiling.first_bytes <= b or tiling is least)
            and (b not in best or _rank(*best[b], host_bytes) >= (False, bound_us(b)))
        ]
        if not wanted:
            continue
        searched = [min(b, tiling.last_bytes) for b in wanted]
        drafts = partition(
            tiling.graph,
            machine,
            searched,
            pins=tiling.pins,
            effort=effort,
            order=tiling.order,
            first_bytes=tiling.first_bytes,
            all_bytes=tiling.all_bytes,
            host_bytes=host_bytes,
            report=report,
        )
        for b, searched_bytes, draft in zip(wanted, searched, drafts, strict=True):
            if b not in best or _rank(tiling, draft, host_bytes) < _rank(*best[b], host_bytes):
                least_us = draft.bound_us if searched_bytes == b else min(bound_us(b), draft.makespan_us)
                best[b] = tiling, replace(draft, bound_us=least_us)
    return {b: best[b] for b in budgets}


def _all_with_states(
    found: dict[int, tuple[Tiling, PlacedPlan]],
    machine: Machine,
    effort: Effort | None,
    host_bytes: int | None,
) -> dict[int, tuple[Tiling, PlacedPlan]]:
    """With states on the GPU between runs where that is faster.

    As they are chosen after the search, a smaller budget's plan may come out faster; it is taken then.
    """
    best: dict[int, tuple[Tiling, PlacedPlan]] = {}
    last: tuple[Tiling, PlacedPlan] | None = None
    for b in sorted(found):
        tiling, searched = found[b]
        draft = _with_states(tiling, machine, searched, b, effort, host_bytes)
        if last is not None and _rank(*last, host_bytes) < _rank(tiling, draft, host_bytes):
            tiling, draft = last[0], replace(last[1], bound_us=min(draft.bound_us, last[1].makespan_us))
        best[b] = last = tiling, draft
    return {b: best[b] for b in found}


def _with_states(
    tiling: Tiling,
    machine: Machine,
    draft: PlacedPlan,
    budget_bytes: int,
    effort: Effort | None,
    host_bytes: int | None,
) -> PlacedPlan:
    """The faster one of two: what was found, with states kept on the GPU where there is room; or what is
    found with all of them there, and whatever touches them, in the memory that is left beside them.
    """
    graph = tiling.graph
    if not graph.carried or len(graph.kernels) > MOST_CLIMBED:
        return draft  # of so many kernels placing the buffers again takes minutes
    candidates = [draft, with_gpu_resident_states(graph, machine, draft, budget_bytes)]
    names = {name for pair in graph.carried for name in pair}
    resident_bytes = sum(align(graph.tensor[old].size_bytes) for old, _ in graph.carried)
    without = without_bytes(graph, names)
    if resident_bytes < budget_bytes:
        with suppress(PlanError):  # no room beside the states
            [beside] = partition(
                without,
                machine,
                (budget_bytes - resident_bytes,),
                pins=dict.fromkeys(gpu_users(graph, names), Device.GPU) | dict(tiling.pins),
                effort=effort,
                order=renewing_order(graph) or tiling.order,
                host_bytes=host_bytes,
            )
            kept = with_gpu_resident_states(graph, machine, beside, budget_bytes)
            if kept is not beside:
                candidates.append(kept)
    found = min(candidates, key=lambda d: _rank(tiling, d, host_bytes))
    bound_us = time_bound_us(without, machine, budget_bytes, pins=tiling.pins, order=tiling.order)
    return replace(found, bound_us=min(bound_us, draft.bound_us))


def _rank(tiling: Tiling, draft: PlacedPlan, host_bytes: int | None) -> tuple[bool, float, int]:
    """Smaller is better: within the host's memory, then fast, then with kernels that are cut up less."""
    is_too_large = host_bytes is not None and draft.host_bytes > host_bytes
    return is_too_large, draft.makespan_us, -tiling.limit_bytes


def _plan_of(graph: Graph, machine: Machine, budget_bytes: int | None, draft: PlacedPlan) -> Plan:
    plan = assemble(graph, machine, budget_bytes, draft.steps, draft.buffers, draft.arenas)
    return replace(plan, time_bound_us=draft.bound_us)


def assemble(
    graph: Graph,
    machine: Machine,
    budget_bytes: int | None,
    steps: tuple[Step, ...],
    buffers: tuple[Buffer, ...],
    arenas: tuple[Arena, ...],
) -> Plan:
    """A plan out of what the stages decided, with its predicted times."""
    step_us = step_times_us(graph, steps, machine)
    return Plan(steps, buffers, arenas, budget_bytes, step_us, timeline(steps, step_us)[0])
