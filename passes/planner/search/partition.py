"""Which device runs each kernel, and what stays in the GPU's memory, so that its arena fits the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel
from hybridc.machine import Machine
from hybridc.passes.planner.bounds.bound import bytes_bound, simple_time_bound_us, time_bound
from hybridc.passes.planner.bounds.exact import LARGEST_KERNEL_COUNT
from hybridc.passes.planner.emit.insert_copies import insert_copies
from hybridc.passes.planner.emit.materialize import SHORT, PlacedPlan, materialize, repacked
from hybridc.passes.planner.emit.reuse_buffers import reuse_buffers
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.order import best_order, level_order
from hybridc.passes.planner.model.pins import NO_PINS, Pins
from hybridc.passes.planner.model.problem import Problem, problem_of
from hybridc.passes.planner.model.simulate import simulate
from hybridc.passes.planner.model.structure import smallest_working_set_bytes
from hybridc.passes.planner.search.budget_grid import THOROUGH_SHARES, plan_all_budgets
from hybridc.passes.planner.search.policies import all_cpu, greedy_fills, light_fills, with_gpu_kernels
from hybridc.passes.planner.search.proof import proven

DEFAULT_SECONDS = 10.0
_SIMULATED_KERNELS_PER_SECOND = 6e6
"""Nominal speed of the search: turns seconds into a number of simulations, the same on every machine."""
_EVALUATIONS_PER_KERNEL = 8000
"""More than this many simulations for each kernel rarely improve a plan."""
_PROOF_SECONDS = 2.0
"""From this effort on the best plan of a small graph is proven: to begin takes a second of its own."""
_ROUGH_SHARE = 0.1
"""Of the effort, for a search that only compares graphs."""
_PACKING_TRIALS = 3
"""How often such a search is repeated with less memory because its result could not be packed."""
_SEED = 1
_ROOM = (0.95, 0.85, 0.7)
"""Shares of the memory to search with where there is no time for packing: the first that can be packed."""
MOST_CLIMBED = 4000
"""Kernels of a graph up to which plans are searched for at many budgets. A single plan of more takes long."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, in seconds of a nominal machine."""

    seconds: float = DEFAULT_SECONDS

    def evaluations(self, kernel_count: int) -> int:
        """Simulations for one budget, of the several that are searched."""
        kernels = max(kernel_count, 1)
        share = self.seconds * _SIMULATED_KERNELS_PER_SECOND / (len(THOROUGH_SHARES) + 1)
        return int(min(share / kernels, _EVALUATIONS_PER_KERNEL * kernels))

    @property
    def of_proof(self) -> float:
        """For the exact solver, in its own unit of several seconds; 0: do without."""
        return self.seconds / 20 if self.seconds >= _PROOF_SECONDS else 0.0


def partition(
    graph: Graph,
    machine: Machine,
    budgets: Sequence[int],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    order: Sequence[int] | None = None,
    first_bytes: int = 0,
    all_bytes: int | None = None,
    host_bytes: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PlacedPlan, ...]:
    """The fastest plan that is found for a GPU and a CPU, for each of several budgets of the GPU in bytes.

    `pins` are devices of kernels by name; kernels run in `order` on each device, by default one that needs
    few bytes. Plans that need less than `first_bytes` are not searched for;
    budgets are most often shares of `all_bytes`, by default what the graph needs entirely on the GPU.
    The host's arena is kept within `host_bytes` where a plan is found that does with so little.
    Ensures: the GPU's arena has at most the budget; with more of it the plan is never slower; the same
    arguments give the same plan, whatever other budgets are asked for. Raises PlanError HC201 if a kernel
    has no code, HC203 if a budget is too small. Of a graph of more than `MOST_CLIMBED` kernels plans come
    from a short search for each budget, and more memory is never slower among those that are asked for.
    """
    _check_code(graph, (Device.GPU, Device.CPU))
    problem = _problem(graph, machine, pins, order)
    smallest = _smallest(graph, machine, problem)
    if smallest.gpu_bytes > min(budgets):
        raise _over_budget(graph, problem, smallest.gpu_bytes, min(budgets), pins)
    problem = replace(problem, host_bytes=host_bytes)
    effort = effort or Effort()
    if problem.kernel_count > MOST_CLIMBED:
        return _one_by_one(graph, machine, problem, budgets, smallest, effort)
    start = smallest
    if smallest.gpu_bytes < first_bytes <= min(budgets):
        start = _roughly(graph, machine, replace(problem, budget_bytes=first_bytes), effort) or smallest
    evaluations = effort.evaluations(problem.kernel_count)
    drafts = plan_all_budgets(
        graph, machine, problem, budgets, start, evaluations, report, all_bytes=all_bytes
    )
    if not effort.of_proof:
        return drafts
    pairs = zip(drafts, budgets, strict=True)
    return tuple(proven(graph, machine, draft, b, effort.of_proof) for draft, b in pairs)


def choose_order(
    graph: Graph,
    machine: Machine,
    budgets: Sequence[int],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    host_bytes: int | None = None,
) -> tuple[int, ...] | None:
    """The order of kernels in which short searches find the faster plans for budgets in bytes, on average.

    None is the one that needs few bytes.
    """
    levels = level_order(graph)
    if not LARGEST_KERNEL_COUNT < len(levels) <= MOST_CLIMBED or levels == best_order(graph):
        return None  # of few kernels every order is searched

    def log_time(order: tuple[int, ...] | None) -> float:
        times_us = (
            rough_time_us(graph, machine, b, pins=pins, effort=effort, order=order, host_bytes=host_bytes)
            for b in budgets
        )
        return sum(math.log(us) if us > 0 else -math.inf for us in times_us)

    return min((None, levels), key=log_time)


def rough_time_us(
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    order: Sequence[int] | None = None,
    host_bytes: int | None = None,
) -> float:
    """What a short search says that `partition` can reach, before packing; infinite if it finds nothing."""
    problem = replace(_problem(graph, machine, pins, order), budget_bytes=budget_bytes, host_bytes=host_bytes)
    return _rough(problem, effort or Effort())[1]


def time_bound_us(
    graph: Graph,
    machine: Machine,
    budget_bytes: int,
    *,
    pins: Pins = NO_PINS,
    order: Sequence[int] | None = None,
) -> float:
    """What no plan that `partition` finds for a budget in bytes, and this order, is faster than."""
    problem = replace(_problem(graph, machine, pins, order), budget_bytes=budget_bytes)
    if problem.kernel_count <= LARGEST_KERNEL_COUNT:
        return simple_time_bound_us(problem)  # the order of the kernels may be another
    return time_bound(problem, recompute=True).bound_us


def on_cpu(graph: Graph, machine: Machine) -> PlacedPlan:
    """The plan for a target without a GPU. Raises PlanError HC201 if a kernel has no code for a CPU."""
    _check_code(graph, (Device.CPU,))
    problem = problem_of(graph, machine, 0, pins={k.name: Device.CPU for k in graph.kernels})
    draft = materialize(graph, machine, problem, all_cpu(problem, _untimed), devices=(Device.CPU,))
    return replace(repacked(graph, machine, draft), bound_us=simple_time_bound_us(problem))


def all_gpu_peak_bytes(graph: Graph, machine: Machine) -> int:
    """Bytes of the GPU's arena if every kernel that has GPU code runs there, and nothing is copied twice."""
    problem = _problem(graph, machine, NO_PINS)
    everything = with_gpu_kernels(problem, [us < math.inf for us in problem.gpu_us], keep=True)
    least = _with_least_bytes(problem, everything)
    listed = insert_copies(graph, least, simulate(least, everything))
    _, _, (arena,) = reuse_buffers(
        graph, listed, (Device.GPU,), gpu_capacity_bytes=least.budget_bytes, effort=SHORT
    )
    return arena.size_bytes


def smallest_budget_bytes(graph: Graph, machine: Machine, pins: Pins = NO_PINS) -> int:
    """The smallest budget that `partition` meets; any larger one is met too."""
    return _smallest(graph, machine, _problem(graph, machine, pins)).gpu_bytes


def smallest_bytes_bound(graph: Graph, machine: Machine, pins: Pins = NO_PINS) -> int:
    """What no plan of the graph needs less than, whatever `smallest_budget_bytes` finds."""
    return bytes_bound(_problem(graph, machine, pins))


def _check_code(graph: Graph, devices: tuple[Device, ...]) -> None:
    for kernel in graph.kernels:
        if not set(kernel.devices) & set(devices):
            what = "the target has only a CPU, and no code for it" if devices == (Device.CPU,) else "no code"
            raise PlanError("HC201", what, where=_describe(kernel))


def _problem(graph: Graph, machine: Machine, pins: Pins, order: Sequence[int] | None = None) -> Problem:
    return problem_of(graph, machine, 0, order=best_order(graph) if order is None else order, pins=pins)


def _smallest(graph: Graph, machine: Machine, problem: Problem) -> PlacedPlan:
    """Only what must run on the GPU does, and nothing stays there."""
    return _realise_least(graph, machine, problem, all_cpu(problem, _untimed))


def _realise_least(graph: Graph, machine: Machine, problem: Problem, decisions: Decisions) -> PlacedPlan:
    return materialize(graph, machine, _with_least_bytes(problem, decisions), decisions)


def _with_least_bytes(problem: Problem, decisions: Decisions) -> Problem:
    """With the least memory that the decisions need, so that nothing is fetched ahead into more."""
    needed_bytes = simulate(replace(problem, budget_bytes=0), decisions).peak_gpu_bytes
    return replace(problem, budget_bytes=needed_bytes)


def _one_by_one(
    graph: Graph,
    machine: Machine,
    problem: Problem,
    budgets: Sequence[int],
    smallest: PlacedPlan,
    effort: Effort,
) -> tuple[PlacedPlan, ...]:
    """A short search for each budget, from the smallest on."""
    bound_us = simple_time_bound_us(problem)
    drafts: dict[int, PlacedPlan] = {}
    best = replace(smallest, bound_us=bound_us)
    for budget_bytes in sorted(budgets):
        for share in _ROOM:
            narrowed = replace(problem, budget_bytes=int(budget_bytes * share))
            decisions, us = _rough(narrowed, effort)
            if us >= best.makespan_us:
                break
            draft = materialize(graph, machine, narrowed, decisions, capacity_bytes=budget_bytes)
            if draft.gpu_bytes <= budget_bytes:
                best = replace(draft, bound_us=bound_us) if draft.makespan_us < best.makespan_us else best
                break
        drafts[budget_bytes] = best
    return tuple(drafts[b] for b in budgets)


def _roughly(graph: Graph, machine: Machine, problem: Problem, effort: Effort) -> PlacedPlan | None:
    """What a short search finds, with less memory if it cannot be packed otherwise."""
    narrowed = problem
    for _ in range(_PACKING_TRIALS):
        decisions, us = _rough(narrowed, effort)
        if us == math.inf:
            return None
        draft = materialize(graph, machine, narrowed, decisions)
        if draft.gpu_bytes <= problem.budget_bytes:
            return draft
        excess_bytes = draft.gpu_bytes - problem.budget_bytes
        narrowed = replace(narrowed, budget_bytes=narrowed.budget_bytes - excess_bytes)
    return None


def _rough(problem: Problem, effort: Effort) -> tuple[Decisions, float]:
    """Decisions and their time from a short search; the time is infinite if nothing fits."""
    core = Core(problem)
    starts = [all_cpu(problem, _untimed), *greedy_fills(problem), *light_fills(problem)]
    fitting = [found for found in map(core.repaired, starts) if found is not None]
    if not fitting:
        return starts[0], math.inf
    best = min(fitting, key=core.makespan_us)
    evaluations = Effort(_ROUGH_SHARE * effort.seconds).evaluations(problem.kernel_count)
    return core.anneal(best, evaluations, _SEED)


def _untimed(_: object) -> float:
    return 0.0


def _over_budget(
    graph: Graph, problem: Problem, needed_bytes: int, budget_bytes: int, pins: Pins
) -> PlanError:
    bound = [k for k, us in enumerate(problem.cpu_us) if us == math.inf]
    position = max(bound, key=lambda k: smallest_working_set_bytes(problem, k))
    largest = graph.kernel[problem.kernel_names[position]]
    alone_bytes = smallest_working_set_bytes(problem, position)
    pinned = ", and is pinned there" if largest.name in pins else ""
    kib = -(-needed_bytes // 1024)
    return PlanError(
        "HC203",
        f"peak GPU memory {needed_bytes:,} bytes exceeds the budget of {budget_bytes:,} bytes",
        where=f"{_describe(largest)} alone needs {alone_bytes:,} bytes{pinned}",
        remedy=f"the smallest budget that fits is {needed_bytes:,} bytes: --gpu-memory {kib}KiB",
        smallest_budget_bytes=needed_bytes,
    )


def _describe(kernel: Kernel) -> str:
    return f"kernel {kernel.name!r} ({', '.join(kernel.origins) or kernel.function})"
