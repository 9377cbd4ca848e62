"""From a budget to the best plan for it, such that more memory never makes a plan slower.

Plans are searched at fixed budgets only, the rungs, which depend on graph and machine but not on the budget
asked for. From the lowest rung up, each search begins with what the rung below found and with the simple
ways that other systems use, and its result is taken only if it is no slower. A budget gets the plan of the
highest rung that it reaches, or the fastest split in two that it has room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from hybridc.ir import Copy, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.bounds.bound import resident_bytes_bound, time_bound
from hybridc.passes.planner.emit.materialize import SHORT, PlacedPlan, materialize, repacked
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.model.rematerialize import with_recompute_slots, with_repeats
from hybridc.passes.planner.model.structure import runs_again
from hybridc.passes.planner.search.policies import layer_splits
from hybridc.passes.planner.search.search import SearchResult, improve, search

THOROUGH_SHARES = (0.015, 0.03, 0.06, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of what the graph needs entirely on the GPU where most of the effort goes: what people ask for."""
RUNGS_PER_OCTAVE = 3
OCTAVES = 6
_LIGHT = 0.05
"""Effort of the rungs between, which only improve on the rung below: a share of a thorough search."""
_ROOM = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7)
"""Shares of the memory to search with where what is found for all of it cannot be packed into it, or only by
steps that wait for bytes: packing leaves holes."""
_WAITS = 1.005
"""So much slower than simulated a packed plan may be."""
_PACKING = 0.02
"""Share of the usual effort for packing a plan that was searched for thoroughly."""
_TIGHTENING = 0.05
"""The same for the arenas of a plan that may be replaced at the next rung."""
_TIED = 0.005
"""Share of its time that a plan may gain by being packed: what is closer to the best may overtake it."""
_NARROWED = 0.2
"""Effort of these searches, which begin with what was found: a share of a thorough one."""
_HARDLY_SLOWER = 1.001
"""So much time may be given up for fewer copies."""
_MARGIN = 1.02
"""The top rung has a little more than all bytes that are ever live, so that packing does not fail there."""


def plan_all_budgets(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    budgets: Sequence[int],
    smallest: PlacedPlan,
    evaluations: int,
    report: Callable[[int, int], None] = lambda done, total: None,
    *,
    all_bytes: int | None = None,
) -> tuple[PlacedPlan, ...]:
    """The best plan for each budget, in bytes; the problem's own does not matter.

    Requires: `smallest` is a plan for the smallest budget that can be met, and fits all of them; it is given
    back, too, if the host has too little memory for whatever is found.
    Ensures: arenas as tight as can be; never slower with a larger budget, all else equal; the same for a
    budget whatever others are asked for. `evaluations` are the simulations that a thorough search may use,
    `all_bytes` what budgets are shares of, unless the problem itself tells.
    """
    wide = with_repeats(problem)
    again = runs_again(wide)
    lifted = replace(
        smallest, problem=wide, decisions=with_recompute_slots(wide, problem, smallest.decisions)
    )
    best = repacked(graph, machine, lifted, _TIGHTENING)
    bound_us = {b: time_bound(replace(problem, budget_bytes=b), again=again).bound_us for b in budgets}
    history = [(0, best)]
    rungs = [r for r in grid_points(problem, smallest.gpu_bytes, all_bytes) if r[0] <= max(budgets)]
    for number, (rung_bytes, is_thorough) in enumerate(rungs):
        report(number, len(rungs))
        if best.makespan_us <= bound_us[max(budgets)] and _fits_host(best, wide):
            break  # no rung above can be faster
        at_rung = replace(wide, budget_bytes=rung_bytes)
        if is_thorough:
            found = _improved(graph, machine, at_rung, best, evaluations)
        else:
            found = _refined(graph, machine, at_rung, best, int(evaluations * _LIGHT))
        if found is not best:
            # before it is compared: it may become faster, too
            best = repacked(graph, machine, found, _TIGHTENING)
            history.append((rung_bytes, best))
    tight = _all_packed(graph, machine, wide, history, budgets)
    splits = _timed_splits(problem, [rung_bytes for rung_bytes, _ in rungs])
    return tuple(
        replace(_or_split(graph, machine, tight[b], splits, b), bound_us=bound_us[b]) for b in budgets
    )


def _all_packed(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    history: Sequence[tuple[int, PlacedPlan]],
    budgets: Sequence[int],
) -> dict[int, PlacedPlan]:
    """For each budget the fastest of the drafts that were best up to it, in arenas as tight as can be.

    A draft may become faster when it is packed, so that the one before may overtake the best. More memory
    gives no slower plan all the same: packing gains `_TIED` at most, and all that are as close are packed.
    """
    packed: dict[int, PlacedPlan] = {}
    found: dict[int, PlacedPlan] = {}
    for b in budgets:
        known = [draft for first_bytes, draft in history if first_bytes <= b]
        best = known[-1]
        close = [
            d
            for d in known
            if d.makespan_us * (1 - _TIED) < best.makespan_us
            and (_fits_host(d, problem) or not _fits_host(best, problem))
        ]
        for draft in (*close, best):
            if id(draft) not in packed:
                packed[id(draft)] = _packed(graph, machine, draft)
        found[b] = min((packed[id(d)] for d in reversed((*close, best))), key=lambda d: d.makespan_us)
    return found


def _packed(graph: Graph, machine: Machine, draft: PlacedPlan) -> PlacedPlan:
    tight = repacked(graph, machine, draft)
    return tight if tight.makespan_us >= draft.makespan_us * (1 - _TIED) else draft


def _timed_splits(problem: Problem, rungs: Iterable[int]) -> list[tuple[float, Problem, Decisions]]:
    """Splits in two, each once with room for all fetches ahead and once with the least memory that it needs.

    The fastest first: each with its time, if memory were ample, and the problem of making it. Which kernels
    are too large for the GPU depends on the memory: splits are made for that of each rung.
    """
    ample, none = Core(replace(problem, budget_bytes=2**62)), Core(replace(problem, budget_bytes=-1))
    splits = dict.fromkeys(split for r in rungs for split in layer_splits(replace(problem, budget_bytes=r)))
    found = []
    for split in splits:
        us, peak_bytes = ample.measure(split)
        budgets = {peak_bytes, none.measure(split)[1]} if us < math.inf else set()
        found += [(us, replace(problem, budget_bytes=b), split) for b in sorted(budgets, reverse=True)]
    return sorted(found, key=itemgetter(0))


def _or_split(
    graph: Graph,
    machine: Machine,
    best: PlacedPlan,
    splits: Sequence[tuple[float, Problem, Decisions]],
    budget_bytes: int,
) -> PlacedPlan:
    """A split in two where it fits and is faster: between two rungs one more kernel may find room.

    A split has two plans, whatever the budget, so that time falls with the budget here, too.
    """
    for us, problem, split in splits:
        best_us = best.makespan_us if _fits_host(best, problem) else math.inf
        if us >= best_us:
            break
        if problem.budget_bytes <= budget_bytes and Core(problem).makespan_us(split) < best_us:
            draft = repacked(graph, machine, materialize(graph, machine, problem, split))
            if _fits(draft, replace(problem, budget_bytes=budget_bytes)) and draft.makespan_us < best_us:
                best = draft
    return best


def grid_points(
    problem: Problem, smallest_bytes: int, all_bytes: int | None = None
) -> list[tuple[int, bool]]:
    """The budgets that plans are searched for, and whether thoroughly: from the least possible to all."""
    largest_bytes = resident_bytes_bound(problem)
    shares = {int((all_bytes or largest_bytes) * share) for share in THOROUGH_SHARES}
    thorough = shares | {int(largest_bytes * _MARGIN)}
    steps = range(1, OCTAVES * RUNGS_PER_OCTAVE)
    light = {int(largest_bytes * 2 ** (-i / RUNGS_PER_OCTAVE)) for i in steps}
    between = {b for b in light if all(abs(b - t) > 0.05 * t for t in thorough)}
    rungs = {smallest_bytes: True} | dict.fromkeys(between, False) | dict.fromkeys(thorough, True)
    return sorted((b, is_thorough) for b, is_thorough in rungs.items() if b >= smallest_bytes)


def _improved(
    graph: Graph, machine: Machine, problem: Problem, below: PlacedPlan, evaluations: int
) -> PlacedPlan:
    """A faster plan than that of the rung below, from a search of its own; or that."""
    found = search(problem, evaluations, starts=[below.decisions])
    return _best_packed(graph, machine, problem, below, found, evaluations, _PACKING)


def _refined(
    graph: Graph, machine: Machine, problem: Problem, below: PlacedPlan, evaluations: int
) -> PlacedPlan:
    """A faster plan than that of the rung below, from a short search that begins with it; or that."""
    found = improve(problem, [below.decisions], evaluations)
    return _best_packed(graph, machine, problem, below, found, evaluations, SHORT)


def _best_packed(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    below: PlacedPlan,
    found: SearchResult | None,
    evaluations: int,
    packing: float,
) -> PlacedPlan:
    """The fastest plan of what was found, searched again with less memory where that helps packing."""
    if found is None or _is_no_better(found, below, problem):
        return below
    known_us, narrowed, best = found.fastest_start_us, problem, below
    for share in (*_ROOM, None):
        draft = _realised(graph, machine, narrowed, found, below, problem.budget_bytes, packing)
        if _fits(draft, problem):
            best = _better(best, draft, known_us, problem)
            if draft.makespan_us <= _WAITS * found.makespan_us:
                break
        if share is None:
            break
        narrowed = _with_less(narrowed, problem, share, draft)
        found = _narrowed(narrowed, found, evaluations)
        if found is None or (best is not below and found.makespan_us >= best.makespan_us):
            break
    return best


def _narrowed(problem: Problem, found: SearchResult, evaluations: int) -> SearchResult | None:
    """What a short search makes of what was found for more memory; None if it cannot be repaired."""
    start = Core(problem).repaired(found.decisions)
    return None if start is None else improve(problem, [start], int(evaluations * _NARROWED))


def _is_no_better(found: SearchResult, below: PlacedPlan, problem: Problem) -> bool:
    """Whether a plan, once packed, could not replace that of the rung below, since it is hardly faster."""
    if not _fits_host(below, problem):
        return False
    return below.makespan_us <= min(found.makespan_us * _HARDLY_SLOWER, found.fastest_start_us)


def _fits(draft: PlacedPlan, problem: Problem) -> bool:
    return draft.gpu_bytes <= problem.budget_bytes and _fits_host(draft, problem)


def _fits_host(draft: PlacedPlan, problem: Problem) -> bool:
    return problem.host_bytes is None or draft.host_bytes <= problem.host_bytes


def _with_less(narrowed: Problem, problem: Problem, share: float, draft: PlacedPlan) -> Problem:
    """With a share of the GPU's memory, and on the host with less by what the draft exceeds it by."""
    gpu_bytes = int(problem.budget_bytes * share)
    if narrowed.host_bytes is None or problem.host_bytes is None:
        return replace(narrowed, budget_bytes=gpu_bytes)
    host_bytes = narrowed.host_bytes - max(0, draft.host_bytes - problem.host_bytes)
    return replace(narrowed, budget_bytes=gpu_bytes, host_bytes=host_bytes)


def _realised(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    found: SearchResult,
    below: PlacedPlan,
    most_bytes: int,
    packing: float,
) -> PlacedPlan:
    """What was found, with fewer copies if that takes hardly more time, packed, too."""
    limit_us = max(
        found.makespan_us,
        min(found.makespan_us * _HARDLY_SLOWER, found.fastest_start_us, below.makespan_us),
    )
    tidy = Core(problem).tidied(found.decisions, limit_us)[0]
    draft = materialize(graph, machine, problem, tidy, packing=packing, capacity_bytes=most_bytes)
    if tidy == found.decisions or (draft.gpu_bytes <= most_bytes and draft.makespan_us <= limit_us):
        return draft
    untidied = materialize(
        graph, machine, problem, found.decisions, packing=packing, capacity_bytes=most_bytes
    )
    return min(untidied, draft, key=lambda d: (d.gpu_bytes > most_bytes, d.makespan_us))


def _better(one: PlacedPlan, other: PlacedPlan, known_us: float, problem: Problem) -> PlacedPlan:
    """The other one if it is faster, or as fast and copies less; a little faster is not worth copies.

    Both are meant to be no slower than `known_us`, the time of simple ways. The other one fits the host.
    """
    if not _fits_host(one, problem):
        return other
    if other.makespan_us > one.makespan_us:
        return one
    is_faster = other.makespan_us * _HARDLY_SLOWER < one.makespan_us or one.makespan_us > known_us
    return other if is_faster or _copied_bytes(other) <= _copied_bytes(one) else one


def _copied_bytes(draft: PlacedPlan) -> int:
    size_bytes = dict(zip(draft.problem.tensor_names, draft.problem.size_bytes, strict=True))
    return sum(size_bytes[step.tensor] for step in draft.listed if isinstance(step, Copy))
