"""Which device runs each kernel, and what stays in the GPU's memory, so that its arena fits the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.bounds.bound import ROUNDING, bytes_bound, meets, simple_time_bound_us, time_bound
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.materialize import SHORT, PlacedPlan, materialize, no_faster_than, repacked
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.model.caches import cache_groups
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.order import best_order, level_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins, describe_kernel
from hybridc.passes.planner.model.problem import UNLIMITED_BYTES, Problem, problem_of
from hybridc.passes.planner.model.rematerialize import with_repeats
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.model.structure import all_bytes, runs_again, smallest_working_set_bytes
from hybridc.passes.planner.search.budget_grid import Wish, plan_all_budgets
from hybridc.passes.planner.search.policies import (
    all_cpu,
    greedy_fills,
    layer_split,
    light_fills,
    side_by_side_fills,
    streaming_fills,
    with_gpu_kernels,
)
from hybridc.passes.planner.search.proof import proven

_ROUGH_SHARE = 0.2
"""Of the effort, for a search that only compares graphs."""
# Each trial has less memory by what the one before exceeded it by; without a plan the search starts lower.
_PACKING_TRIALS = 3
"""How often such a search is repeated with less memory because its result could not be packed."""
# Packing a graph of a thousand kernels takes seconds, most often to find that another graph's plan is faster.
_LEAST_PLACED = 0.9
"""A placed plan is said to take no less than this share of what was simulated; it seldom takes 0.97."""
_FIRST_SECONDS = 0.5
"""Effort for the first plan of a budget, which comes before any other search."""
_SEED = 1  # any one: it only has to be the same for every call
# Coarser than the shares of budget_grid.py: each costs a search of its own, on a graph where one takes long.
_SHARES_OF_LARGE_GRAPHS = (0.95, 0.85, 0.7)
"""Shares of the memory to search with where there is no time for packing: the first that can be packed."""
# Of more kernels the linear programme takes minutes, and so does placing their buffers once more.
MOST_GRID_KERNELS = 4000
"""Kernels of a graph up to which plans are searched for at many budgets. A single plan of more takes long."""
# A search with all that follows takes minutes then; a network that was not cut up has no other plan.
MOST_SEARCHED_TILES = 500
"""Kernels of a network that is cut up, up to which the search is thorough."""


def partition(
    context: PlanningContext,
    budgets: Sequence[int],
    *,
    known_us: Mapping[int, float] | None = None,
    first_bytes: int = 0,
    last_bytes: int = UNLIMITED_BYTES,
    is_cut_up: bool = False,
    has_bounds: bool = True,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PlacedPlan, ...]:
    """The fastest plan that is found for a GPU and a CPU, for each of several budgets of the GPU in bytes.

    Plans that need less than `first_bytes` are not searched for. `known_us` are times of other plans for
    some of the budgets: where none is faster any will do. The rest is as in `plan_all_budgets`.
    Ensures: the GPU's arena has at most the budget; with more of it the plan is never slower; the same
    arguments give the same plan, whatever other budgets are asked for. Raises PlanError HC201 if a kernel
    has no code, HC203 if a budget is too small. Of a graph of more than `MOST_GRID_KERNELS` kernels plans
    come from a short search for each budget, and more memory is never slower among those that are asked for.
    """
    _check_code(context.graph, (Device.GPU, Device.CPU))
    smallest = _smallest(context)
    if smallest.gpu_bytes > min(budgets):
        raise _over_budget(context, smallest.gpu_bytes, min(budgets))
    context.watch.found(context, smallest)
    if len(context.graph.kernels) > MOST_GRID_KERNELS:
        return _one_by_one(context, budgets, smallest)
    start = smallest
    if smallest.gpu_bytes < first_bytes <= min(budgets):
        start = _roughly(context, first_bytes) or smallest
    plans = plan_all_budgets(
        context,
        [Wish(b, (known_us or {}).get(b, math.inf)) for b in budgets],
        start,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        has_bounds=has_bounds,
        is_brief=is_searched_briefly(context.graph, is_cut_up=is_cut_up),
        report=report,
    )
    if not context.effort.of_proof:
        return plans
    return tuple(proven(context, placed, b) for placed, b in zip(plans, budgets, strict=True))


def is_searched_briefly(graph: Graph, *, is_cut_up: bool) -> bool:
    """Whether each search takes so long that there are few, and no single moves."""
    return is_cut_up and len(graph.kernels) > MOST_SEARCHED_TILES


def first_plans(context: PlanningContext, budgets: Sequence[int]) -> tuple[PlacedPlan, ...]:
    """A plan for each of several budgets in bytes within a second or so, by a short search.

    Raises PlanError HC201 if a kernel has no code, HC203 if a budget is too small.
    """
    _check_code(context.graph, (Device.GPU, Device.CPU))
    smallest = _smallest(context)
    if smallest.gpu_bytes > min(budgets):
        raise _over_budget(context, smallest.gpu_bytes, min(budgets))
    return _one_by_one(replace(context, effort=Effort(_FIRST_SECONDS)), budgets, smallest)


def needs_no_gpu(context: PlanningContext) -> bool:
    """Whether no plan in the context's order is faster than the CPU alone, however much memory the GPU has.

    Of graphs of more than `MOST_GRID_KERNELS` kernels nobody asks.
    """
    if len(context.graph.kernels) > MOST_GRID_KERNELS:
        return False
    smallest = _smallest(context)
    if smallest.gpu_bytes or not smallest.fits_host(context.host_bytes):
        return False
    ample = _problem(context, all_bytes(context.problem))
    core = Core(ample)
    if core.makespan_us(layer_split(ample, core.makespan_us)) * (1 + ROUNDING) < smallest.makespan_us:
        return False  # spares the linear programme, which a large graph makes long
    return meets(
        smallest.makespan_us, time_bound(ample, again=runs_again(with_repeats(ample)), shared=True).bound_us
    )


def choose_order(context: PlanningContext, budgets: Sequence[int]) -> tuple[int, ...] | None:
    """The order of kernels in which short searches find the faster plans for budgets in bytes, on average.

    None is the one that needs few bytes; the other candidate is `level_order`.
    """
    levels = level_order(context.graph)
    if not LARGEST_KERNEL_COUNT < len(levels) <= MOST_GRID_KERNELS or levels == best_order(context.graph):
        return None  # of few kernels every order is searched

    def log_time(order: tuple[int, ...] | None) -> float:
        ordered = replace(context, order=order)
        times_us = (rough_time_us(ordered, b) for b in budgets)
        # logarithms, so that a small budget, whose plans are slow, counts no more than a large one
        return sum(math.log(us) if us > 0 else -math.inf for us in times_us)

    return min((None, levels), key=log_time)


def rough_time_us(context: PlanningContext, budget_bytes: int) -> float:
    """What a short search says that `partition` can reach, before packing; infinite if it finds nothing."""
    context.watch.check()
    return _rough(_problem(context, budget_bytes), context.effort.comparing)[1]


def time_bound_us(context: PlanningContext, budget_bytes: int, *, quick: bool = False) -> float:
    """What no plan that `partition` finds for a budget in bytes, and this order, is faster than.

    A `quick` bound is looser, but takes no time, where the linear programme takes half a minute.
    """
    return problem_bound_us(context.problem, budget_bytes, quick=quick)


def problem_bound_us(problem: Problem, budget_bytes: int, *, quick: bool = False) -> float:
    """Likewise of a problem, whose own budget does not matter."""
    problem = replace(problem, budget_bytes=budget_bytes)
    if problem.kernel_count <= LARGEST_KERNEL_COUNT or quick:
        return simple_time_bound_us(problem)  # the order of the kernels may be another
    return time_bound(problem, again=runs_again(with_repeats(problem)), shared=True).bound_us


def on_cpu(graph: Graph, machine: Machine) -> PlacedPlan:
    """The plan for a target without a GPU. Raises PlanError HC201 if a kernel has no code for a CPU."""
    _check_code(graph, (Device.CPU,))
    context = PlanningContext(graph, machine, devices=(Device.CPU,))
    # pinned, since a target without a GPU may still have kernels with GPU code
    problem = problem_of(graph, machine, 0, pins={k.name: Device.CPU for k in graph.kernels})
    placed = materialize(context, problem, all_cpu(problem, _untimed))
    return replace(repacked(context, placed), bound_us=simple_time_bound_us(problem))


def all_gpu_peak_bytes(graph: Graph, machine: Machine) -> int:
    """Bytes of the GPU's arena if every kernel that has GPU code runs there, and nothing is copied twice.

    Caches are there all the time, where the GPU has code for what touches them.
    """
    groups = [group for group in cache_groups(graph) if Device.GPU in group.devices(graph, NO_PINS)]
    cache_bytes = sum(group.size_bytes(graph) for group in groups)
    graph = without_bytes(graph, {name for group in groups for name in group.names})
    problem = PlanningContext(graph, machine).problem
    everything = with_gpu_kernels(problem, [us < math.inf for us in problem.gpu_us], keep=True)
    least = _with_least_bytes(problem, everything)
    listed = insert_copies(graph, least, simulate(least, everything))
    _, _, (arena,) = reuse_buffers(
        graph, listed, (Device.GPU,), gpu_capacity_bytes=least.budget_bytes, effort=SHORT
    )
    return arena.size_bytes + cache_bytes


def smallest_budget_bytes(graph: Graph, machine: Machine, pins: Pins = NO_PINS) -> int:
    """The smallest budget in bytes that `partition` meets; any larger one is met too."""
    return least_bytes(PlanningContext(graph, machine, pins))


def least_bytes(context: PlanningContext) -> int:
    """Likewise, of a graph that is planned already."""
    return _smallest(context).gpu_bytes


def smallest_bytes_bound(graph: Graph, machine: Machine, pins: Pins = NO_PINS) -> int:
    """GPU bytes that every plan of the graph needs: proven, unlike those of `smallest_budget_bytes`."""
    return bytes_bound(PlanningContext(graph, machine, pins).problem)


def _check_code(graph: Graph, devices: tuple[Device, ...]) -> None:
    for kernel in graph.kernels:
        if not set(kernel.devices) & set(devices):
            what = "the target has only a CPU, and no code for it" if devices == (Device.CPU,) else "no code"
            raise PlanError("HC201", what, where=describe_kernel(kernel))


def _problem(context: PlanningContext, budget_bytes: int) -> Problem:
    return replace(context.problem, budget_bytes=budget_bytes, host_bytes=context.host_bytes)


def _smallest(context: PlanningContext) -> PlacedPlan:
    """Only what must run on the GPU does, and nothing stays there; the host holds what it takes."""
    decisions = all_cpu(context.problem, _untimed)
    return materialize(context, _with_least_bytes(context.problem, decisions), decisions)


def _with_least_bytes(problem: Problem, decisions: Decisions) -> Problem:
    """With the least memory that the decisions need, so that nothing is fetched ahead into more."""
    needed_bytes = simulate(replace(problem, budget_bytes=0), decisions).peak_gpu_bytes
    return replace(problem, budget_bytes=needed_bytes)


def _one_by_one(
    context: PlanningContext, budgets: Sequence[int], smallest: PlacedPlan
) -> tuple[PlacedPlan, ...]:
    """A short search for each budget, from the smallest on."""
    bound_us = simple_time_bound_us(context.problem)
    plans: dict[int, PlacedPlan] = {}
    best = replace(smallest, bound_us=bound_us)
    for budget_bytes in sorted(budgets):
        least_us = 0.0
        for share in _SHARES_OF_LARGE_GRAPHS:
            narrowed = _problem(context, int(budget_bytes * share))
            decisions, us = _rough(narrowed, context.effort)
            least_us = max(least_us, us * _LEAST_PLACED)
            if us >= best.makespan_us:
                break
            placed = materialize(context, narrowed, decisions, capacity_bytes=budget_bytes, must_fit=True)
            if placed.gpu_bytes <= budget_bytes:
                placed = no_faster_than(placed, least_us)  # as if it had not been placed
                best = replace(placed, bound_us=bound_us) if placed.makespan_us < best.makespan_us else best
                break
        plans[budget_bytes] = best
        context.watch.found(context, best)
    return tuple(plans[b] for b in budgets)


def _roughly(context: PlanningContext, budget_bytes: int) -> PlacedPlan | None:
    """What a short search finds, with less memory if it cannot be packed otherwise."""
    narrowed = _problem(context, budget_bytes)
    for _ in range(_PACKING_TRIALS):
        decisions, us = _rough(narrowed, context.effort)
        if us == math.inf:
            return None
        placed = materialize(context, narrowed, decisions)
        if placed.gpu_bytes <= budget_bytes:
            return placed
        excess_bytes = placed.gpu_bytes - budget_bytes
        narrowed = replace(narrowed, budget_bytes=narrowed.budget_bytes - excess_bytes)
    return None


def _rough(problem: Problem, effort: Effort) -> tuple[Decisions, float]:
    """Decisions and their time from a short search; the time is infinite if nothing fits."""
    core = Core(problem)
    starts = [
        all_cpu(problem, _untimed),
        *greedy_fills(problem),
        *light_fills(problem),
        *streaming_fills(problem),
        *side_by_side_fills(problem),
    ]
    fitting = [found for found in map(core.repaired, starts) if found is not None]
    if not fitting:
        return starts[0], math.inf
    best = min(fitting, key=core.makespan_us)
    evaluations = Effort(_ROUGH_SHARE * effort.seconds).evaluations(problem.kernel_count)
    return core.anneal(best, evaluations, _SEED)


def _untimed(_: object) -> float:
    return 0.0


def _over_budget(context: PlanningContext, needed_bytes: int, budget_bytes: int) -> PlanError:
    graph, problem = context.graph, context.problem
    bound = [k for k, us in enumerate(problem.cpu_us) if us == math.inf]
    position = max(bound, key=lambda k: smallest_working_set_bytes(problem, k))
    largest = graph.kernel[problem.kernel_names[position]]
    alone_bytes = smallest_working_set_bytes(problem, position)
    pinned = ", and is pinned there" if largest.name in context.pins else ""
    kib = -(-needed_bytes // 1024)  # rounded up, so that the budget suggested is met
    return PlanError(
        "HC203",
        f"peak GPU memory {needed_bytes:,} bytes exceeds the budget of {budget_bytes:,} bytes",
        where=f"{describe_kernel(largest)} alone needs {alone_bytes:,} bytes{pinned}",
        remedy=f"the smallest budget that fits is {needed_bytes:,} bytes: --gpu-memory {kib}KiB",
        smallest_budget_bytes=needed_bytes,
    )
