"""GPU-resident states: tensors that stay in the GPU's memory from run to run.

A graph that carries values over takes an output of one run as an input of the next: a training step its
parameters and the optimizer's moments. Where only GPU kernels touch such a pair, the input needs no copy to
the GPU and the output none back, if the new value ends where the old one began. Which pairs stay is decided
after the search, which has them on the host between runs: a pair costs its bytes during the whole run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hybridc.ir import Copy, Device, Graph, Run, Step
from hybridc.ir.plan import align
from hybridc.passes.planner.emit.materialize import PlacedPlan, repacked, without_copies
from hybridc.passes.planner.model.context import PlanningContext

# A packing tells by how many bytes it failed, so a few trials suffice; of large graphs each takes seconds.
_TRIALS = 6
"""Packings that are tried, each with fewer pairs than the one before."""


def without_bytes(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with these tensors empty: nothing copies them, and no memory holds them."""
    empty = set(names)
    tensors = (replace(t, shape=(0,)) if t.name in empty else t for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def gpu_users(graph: Graph, names: Collection[str]) -> list[str]:
    """Kernels that read or write some of these tensors, and have code for the GPU."""
    wanted = set(names)
    users = (k for k in graph.kernels if not wanted.isdisjoint((*k.inputs, *k.outputs)))
    return [kernel.name for kernel in users if Device.GPU in kernel.devices]


def with_gpu_resident_states(context: PlanningContext, placed: PlacedPlan, capacity_bytes: int) -> PlacedPlan:
    """The plan with as many carried pairs GPU-resident as fit the capacity in bytes; itself, if none does.

    Those come first whose old value is needed first: their copies stand at both ends of the run, where
    there is least beside which they could run.
    """
    graph = context.graph
    movable = _movable(graph, placed.listed)
    count = len(movable)
    for _ in range(_TRIALS):
        if not count:
            break
        names = {name for pair in movable[:count] for name in pair}
        kept = without_copies(context, placed, names, capacity_bytes)
        if kept.gpu_bytes <= capacity_bytes:
            return repacked(context, kept, context.effort.packing)
        # at least one pair less, so that the trials end
        count = min(count - 1, _fitting(graph, movable[:count], kept.gpu_bytes - capacity_bytes))
    return placed


def _fitting(graph: Graph, pairs: Sequence[tuple[str, str]], excess_bytes: int) -> int:
    """How many of the pairs are left without the last ones that have so many bytes."""
    left = len(pairs)
    while left and excess_bytes > 0:
        left -= 1
        excess_bytes -= align(graph.tensor[pairs[left][0]].size_bytes)
    return left


def _movable(graph: Graph, steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Pairs that only the GPU touches, and whose new value is written when the old one is not needed more."""
    copies: dict[str, list[tuple[int, Device]]] = {}
    runs: dict[str, list[tuple[int, Device]]] = {}
    for position, step in enumerate(steps):
        if isinstance(step, Copy):
            copies.setdefault(step.tensor, []).append((position, step.target))
            continue
        kernel = graph.kernel[step.kernel]
        for name in dict.fromkeys((*kernel.inputs, *kernel.outputs)):
            runs.setdefault(name, []).append((position, step.device))

    def is_movable(old: str, new: str) -> bool:
        if any(device is Device.CPU for name in (old, new) for _, device in runs.get(name, ())):
            return False
        if any(target is Device.CPU for _, target in copies.get(old, ())) or old not in copies:
            return False
        # exactly its one copy to the host, which falls away
        if [target for _, target in copies.get(new, ())] != [Device.CPU]:
            return False
        kernel = graph.kernels[graph.producer[new]]
        written, last_read = runs[new][0][0], runs[old][-1][0]
        # the kernel that writes the new value reads the old one: it must be able to overwrite it
        if last_read == written:
            return (new, old) in kernel.may_overwrite and kernel.inputs.count(old) == 1
        times = sum(isinstance(step, Run) and step.kernel == kernel.name for step in steps)
        return last_read < written and times == 1  # what runs twice has two results, at two places

    found = [pair for pair in graph.loop_carried if is_movable(*pair)]
    return sorted(found, key=lambda pair: copies[pair[0]][0][0])
