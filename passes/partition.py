"""Which device runs each kernel, and what stays in the GPU's memory, so that its arena fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph, Kernel
from hybridc.ir.plan import align
from hybridc.machine import Machine
from hybridc.passes.pins import NO_PINS, Pins
from hybridc.passes.planner.bound import simple_time_bound_us
from hybridc.passes.planner.decisions import Decisions
from hybridc.passes.planner.ladder import THOROUGH_SHARES, climb
from hybridc.passes.planner.order import best_order
from hybridc.passes.planner.policies import all_cpu, with_gpu_kernels
from hybridc.passes.planner.problem import Problem, problem_of
from hybridc.passes.planner.proof import proven
from hybridc.passes.planner.realise import Draft, realise, tightened
from hybridc.passes.planner.simulate import simulate

DEFAULT_SECONDS = 10.0
_SIMULATED_KERNELS_PER_SECOND = 6e6
"""Nominal speed of the search: turns seconds into a number of simulations, the same on every machine."""
_EVALUATIONS_PER_KERNEL = 500
"""More than this many simulations for each kernel rarely improve a plan."""
_PROOF_SECONDS = 2.0
"""From this effort on the best plan of a small graph is proven: to begin takes a second of its own."""
_UNLIMITED_BYTES = 2**62


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
    budget_bytes: int | None,
    devices: Sequence[Device],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Draft:
    """The fastest plan that is found for a target's devices, `(CPU,)` or `(GPU, CPU)`.

    `pins` are devices of kernels by name; without a budget the plan takes what memory is of use to it.
    Ensures: the GPU's arena has at most `budget_bytes`; with more of them the plan is never slower; the
    same arguments give the same plan. Raises PlanError HC201 if a kernel has code for none of the devices,
    HC203 if nothing fits.
    """
    if Device.GPU not in devices:
        return _on_cpu(graph, machine)
    budget_bytes = _UNLIMITED_BYTES if budget_bytes is None else budget_bytes
    return partition_each(graph, machine, (budget_bytes,), pins=pins, effort=effort, report=report)[0]


def partition_each(
    graph: Graph,
    machine: Machine,
    budgets: Sequence[int],
    *,
    pins: Pins = NO_PINS,
    effort: Effort | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Draft, ...]:
    """What `partition` finds for a GPU, for each of several budgets in bytes, with the effort of the largest.

    Raises PlanError HC201 if a kernel has no code, HC203 if a budget is too small.
    """
    _check_code(graph, (Device.GPU, Device.CPU))
    problem = _problem(graph, machine, pins)
    smallest = _smallest(graph, machine, problem)
    if smallest.gpu_bytes > min(budgets):
        raise _over_budget(graph, problem, smallest.gpu_bytes, min(budgets), pins)
    effort = effort or Effort()
    evaluations = effort.evaluations(problem.kernel_count)
    drafts = climb(graph, machine, problem, budgets, smallest, evaluations, report)
    if effort.of_proof:
        pairs = zip(drafts, budgets, strict=True)
        drafts = tuple(proven(graph, machine, draft, b, effort.of_proof) for draft, b in pairs)
    return tuple(tightened(graph, machine, draft) for draft in drafts)


def all_gpu_peak_bytes(graph: Graph, machine: Machine) -> int:
    """Bytes of the GPU's arena if every kernel that has GPU code runs there, and nothing is copied twice."""
    problem = _problem(graph, machine, NO_PINS)
    everything = with_gpu_kernels(problem, [us < float("inf") for us in problem.gpu_us], keep=True)
    return _realise_least(graph, machine, problem, everything).gpu_bytes


def smallest_budget_bytes(graph: Graph, machine: Machine, pins: Pins = NO_PINS) -> int:
    """The smallest budget that `partition` meets; any larger one is met too."""
    return _smallest(graph, machine, _problem(graph, machine, pins)).gpu_bytes


def _check_code(graph: Graph, devices: tuple[Device, ...]) -> None:
    for kernel in graph.kernels:
        if not set(kernel.devices) & set(devices):
            what = "the target has only a CPU, and no code for it" if devices == (Device.CPU,) else "no code"
            raise PlanError("HC201", what, where=_describe(kernel))


def _on_cpu(graph: Graph, machine: Machine) -> Draft:
    _check_code(graph, (Device.CPU,))
    problem = problem_of(graph, machine, 0, pins={k.name: Device.CPU for k in graph.kernels})
    draft = realise(graph, machine, problem, all_cpu(problem, _untimed), devices=(Device.CPU,))
    return replace(tightened(graph, machine, draft), bound_us=simple_time_bound_us(problem))


def _problem(graph: Graph, machine: Machine, pins: Pins) -> Problem:
    return problem_of(graph, machine, 0, order=best_order(graph), pins=pins)


def _smallest(graph: Graph, machine: Machine, problem: Problem) -> Draft:
    """Only what must run on the GPU does, and nothing stays there."""
    return _realise_least(graph, machine, problem, all_cpu(problem, _untimed))


def _realise_least(graph: Graph, machine: Machine, problem: Problem, decisions: Decisions) -> Draft:
    """With the least memory that the decisions need, so that nothing is fetched ahead into more."""
    needed_bytes = simulate(replace(problem, budget_bytes=0), decisions).peak_gpu_bytes
    return realise(graph, machine, replace(problem, budget_bytes=needed_bytes), decisions)


def _untimed(_: object) -> float:
    return 0.0


def _over_budget(
    graph: Graph, problem: Problem, needed_bytes: int, budget_bytes: int, pins: Pins
) -> PlanError:
    bound = [k for k in graph.kernels if problem.cpu_us[problem.kernel_names.index(k.name)] == float("inf")]
    largest = max(bound, key=lambda kernel: footprint_bytes(graph, kernel))
    pinned = ", and is pinned there" if largest.name in pins else ""
    kib = -(-needed_bytes // 1024)
    return PlanError(
        "HC203",
        f"peak GPU memory {needed_bytes:,} bytes exceeds the budget of {budget_bytes:,} bytes",
        where=f"{_describe(largest)} alone needs {footprint_bytes(graph, largest):,} bytes{pinned}",
        remedy=f"the smallest budget that fits is {needed_bytes:,} bytes: --gpu-memory {kib}KiB",
        smallest_budget_bytes=needed_bytes,
    )


def footprint_bytes(graph: Graph, kernel: Kernel) -> int:
    """GPU bytes that one kernel needs while it runs: inputs, outputs, weights and workspace, aligned."""
    names = dict.fromkeys((*kernel.inputs, *kernel.outputs))
    return sum(align(graph.tensor[name].size_bytes) for name in names) + align(kernel.gpu_workspace_bytes)


def _describe(kernel: Kernel) -> str:
    return f"kernel {kernel.name!r} ({', '.join(kernel.origins) or kernel.function})"
