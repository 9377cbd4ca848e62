"""From a graph, a machine and a budget to a plan: the planner's stages, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from hybridc.ir import Arena, Buffer, Device, Graph, Plan, Step
from hybridc.machine import Machine
from hybridc.passes.cost import step_times_us, timeline
from hybridc.passes.insert_copies import insert_copies
from hybridc.passes.partition import Placement, all_cpu, all_gpu, partition, smallest_placement
from hybridc.passes.reuse_buffers import reuse_buffers


def make_plan(graph: Graph, machine: Machine, budget_bytes: int | None, devices: Sequence[Device]) -> Plan:
    """Plan `graph` for the devices of a target: `(CPU,)` or `(GPU, CPU)`.

    `budget_bytes` limits the GPU's arena, its weights included; None means no limit. Raises PlanError
    HC201 if a kernel has code for none of the devices, and HC203 if no plan fits the budget.
    """
    if Device.GPU in devices:
        placement = partition(graph, machine, budget_bytes)
    else:
        placement, budget_bytes = all_cpu(graph), None
    steps, buffers, arenas = reuse_buffers(graph, insert_copies(graph, placement), devices)
    return assemble(graph, machine, budget_bytes, steps, buffers, arenas)


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


def all_gpu_peak_bytes(graph: Graph) -> int:
    """Bytes of the GPU's arena when every kernel that has GPU code runs there."""
    return _gpu_arena_bytes(graph, all_gpu(graph))


def smallest_budget_bytes(graph: Graph, machine: Machine) -> int:
    """The smallest budget that `make_plan` meets; any larger one is met too."""
    return _gpu_arena_bytes(graph, smallest_placement(graph))


def _gpu_arena_bytes(graph: Graph, placement: Placement) -> int:
    return reuse_buffers(graph, insert_copies(graph, placement), (Device.GPU,))[2][0].size_bytes
