"""Plans of a network whose large products are in two parts, which both devices compute side by side.

Both parts take about as long, so it is best to have all second parts on the CPU, however much memory there
is; what does not fit beside the first parts is decided by a search that begins there. A decoder's caches lie
on the GPU as far as there is room for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice

from hybridc.ir import Device, Graph, Kernel, Role
from hybridc.machine import Machine
from hybridc.passes.planner.choose_tilings import ColumnCut
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize, repacked, without_copies
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.cost import copy_us, kernel_us
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.order import level_order
from hybridc.passes.planner.other_ways import CacheSetting, cache_settings
from hybridc.passes.planner.search.policies import side_by_side_fills, streaming_fills

_HEADS = 1
"""The axis of heads in caches."""
_SEARCHES = 3
"""Numbers of caches on the GPU that are searched for, the best by their starts."""
_STREAMED = 4
"""Numbers for which streaming is weighed, too, evenly spaced: each costs some seconds."""
_NARROWED = (1.0, 0.99, 0.97, 0.94)
"""Shares of the memory with which a plan is searched for until its buffers fit when they are placed."""
_ANNEALING_SHARE = 0.25
"""Of the effort for a budget: the starts are near the best."""
_SEED = 1
_CLEARLY = 0.95
"""Where both orders let the devices compute side by side, searches differ by a per cent or two."""
# A GPU that has nearly nothing to do is better left out by the other ways.
_MOST_SHARE = 0.95
"""Of columns in second parts."""
# What is saved is an estimate, and another graph to plan takes seconds.
_LEAST_SAVED = 0.05
"""Share of the time of all kernels that products in two parts must save."""


def second_kernels(graph: Graph, second: Set[str]) -> frozenset[str]:
    """Kernels that read tensors of second parts, and those whose results only such kernels read, by name.

    These tensors are weights, and caches before and after a run.
    """
    caches = {name for pair in graph.caches for name in pair}
    found = {kernel.name for kernel in graph.kernels if not second.isdisjoint(kernel.inputs)}
    outputs = {*graph.outputs, *(t.name for t in graph.tensors if t.role is Role.STATE)}
    for kernel in reversed(graph.kernels):
        touched = {*kernel.inputs, *kernel.outputs}
        if caches.isdisjoint(touched) and outputs.isdisjoint(kernel.outputs):
            readers = {graph.kernels[k].name for name in kernel.outputs for k in graph.consumers[name]}
            if readers and readers <= found:
                found.add(kernel.name)
    return frozenset(n for n in found if Device.CPU in graph.kernel[n].devices)


def cut_worth_making(weight_bytes: Mapping[str, int], graph: Graph, machine: Machine) -> ColumnCut | None:
    """The products that are worth computing in two parts, which take equally long; None if there are none.

    `weight_bytes` are those of products that can be cut. On both devices a product takes `gpu * cpu / (gpu +
    cpu)`, as resistors in parallel do; that has to be more than what the exchanges of rows and parts take.
    """
    reader = {name: kernel for kernel in graph.kernels for name in kernel.inputs}
    chosen, gpu_us, cpu_us, saved_us = set[str](), 0.0, 0.0, 0.0
    for weight in weight_bytes:
        kernel = reader.get(weight)
        if kernel is None or set(kernel.devices) != {Device.GPU, Device.CPU}:
            continue
        own_gpu_us, own_cpu_us = (kernel_us(kernel, machine, device) for device in (Device.GPU, Device.CPU))
        both_us = own_gpu_us * own_cpu_us / (own_gpu_us + own_cpu_us)
        exchange_us = sum(
            copy_us(graph.tensor[name].size_bytes, machine, device)
            for name, device in ((kernel.inputs[0], Device.CPU), (kernel.outputs[0], Device.GPU))
        )
        if both_us > exchange_us:
            chosen.add(weight)
            gpu_us, cpu_us = gpu_us + own_gpu_us, cpu_us + own_cpu_us
            saved_us += both_us - exchange_us
    all_us = sum(kernel_us(k, machine, d) for k in graph.kernels for d in k.devices[:1])
    if saved_us < _LEAST_SAVED * all_us:
        return None
    return ColumnCut(frozenset(chosen), gpu_us / (gpu_us + cpu_us))


def cut_by_bandwidth(weight_bytes: Mapping[str, int], machine: Machine) -> ColumnCut | None:
    """The same for any number of rows: the parts take equally long where reading the weights is all that
    takes time, as it does for one row. It pays where that takes longer than an exchange for one row."""
    gpu_gb_s, cpu_gb_s = (
        each.bandwidth_gb_s * each.efficiency("matmul").memory for each in (machine.gpu, machine.cpu)
    )
    exchange_us = 2 * machine.link.latency_us
    both_gb_s = gpu_gb_s + cpu_gb_s
    chosen = {name for name, size in weight_bytes.items() if size / (both_gb_s * 1e3) > exchange_us}
    return ColumnCut(frozenset(chosen), cpu_gb_s / (gpu_gb_s + cpu_gb_s)) if chosen else None


def with_heads(cut: ColumnCut, weight_bytes: Mapping[str, int], graph: Graph, budget_bytes: int) -> ColumnCut:
    """The cut with heads of caches in second parts, too, as many as balance devices like the columns.

    Where first parts do not fit the budget so, second parts are larger, so that all first ones have room. If
    copies could bring more than the CPU reads meanwhile, the search finds what is better streamed.
    """
    heads = {graph.tensor[old].shape[_HEADS] for old, _ in graph.caches}
    if len(heads) != 1:
        return cut
    [count] = heads
    cache_bytes = sum(graph.tensor[old].size_bytes for old, _ in graph.caches)
    cut_bytes = sum(weight_bytes[name] for name in cut.weights)
    missing_bytes = cut_bytes + cache_bytes + _other_bytes(graph, cut.weights) - budget_bytes
    share = min(max(cut.share, missing_bytes / (cut_bytes + cache_bytes)), _MOST_SHARE)
    of_heads = round(share * count) / count
    of_columns = (missing_bytes - of_heads * cache_bytes) / cut_bytes
    return replace(cut, share=min(max(cut.share, of_columns), _MOST_SHARE), heads=of_heads)


def _other_bytes(graph: Graph, cut: Set[str]) -> int:
    """What a GPU holds beside products and caches: other weights, as far as one kernel reads them (of a table
    some rows, which the CPU looks up), and at any kernel what it works with."""
    size = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
    others = {name for kernel in graph.kernels if cut.isdisjoint(kernel.inputs) for name in kernel.inputs}
    weights = {tensor.name for tensor in graph.tensors if tensor.role is Role.WEIGHT}
    apart = {*weights, *(name for pair in graph.caches for name in pair)}

    def read_bytes(weight: str) -> int:
        return min(size[weight], max(graph.kernels[k].bytes_moved for k in graph.consumers[weight]))

    def working_bytes(kernel: Kernel) -> int:
        return kernel.gpu_workspace_bytes + sum(size[n] for n in {*kernel.inputs, *kernel.outputs} - apart)

    return sum(map(read_bytes, others & weights)) + max(map(working_bytes, graph.kernels), default=0)


def side_by_side_plan(context: PlanningContext, budget_bytes: int) -> PlacedPlan | None:
    """The fastest plan that is found near all second parts on the CPU; None if none fits the budget.

    Requires: nothing is pinned by the user, and the context names second parts.
    """
    context = _in_better_order(context, budget_bytes)
    best: PlacedPlan | None = None
    for setting, start in islice(_starts(_settings(context, budget_bytes)), _SEARCHES):
        found = _placed(context, setting, start, budget_bytes)
        if found is not None and (best is None or found.makespan_us < best.makespan_us):
            best = found
    return None if best is None else repacked(context, best, context.effort.packing)


def _settings(context: PlanningContext, budget_bytes: int) -> list[CacheSetting]:
    """With the caches of 0, 1, ... layers on the GPU; none where layers do not follow one another."""
    if context.graph.caches:
        return cache_settings(context, budget_bytes)
    return [CacheSetting(context, replace(context.problem, budget_bytes=budget_bytes), frozenset(), 0)]


def _in_better_order(context: PlanningContext, budget_bytes: int) -> PlanningContext:
    """With kernels level by level, where without a search that is clearly better than an order that needs
    few bytes: one in which a device has to wait for the other's part."""
    levels = replace(context, order=level_order(context.graph))
    own_us, levels_us = (_least_start_us(each, budget_bytes) for each in (context, levels))
    return levels if levels_us < _CLEARLY * own_us else context


def _least_start_us(context: PlanningContext, budget_bytes: int) -> float:
    times_us = (
        Core(setting.problem).makespan_us(start)
        for setting in _settings(context, budget_bytes)
        if setting.problem.budget_bytes >= 0
        for start in side_by_side_fills(setting.problem)
    )
    return min(times_us, default=math.inf)


def _starts(settings: Sequence[CacheSetting]) -> Iterator[tuple[CacheSetting, Decisions]]:
    """For each number of caches the best start, the fastest first.

    For some of the numbers weights of both parts are streamed, too: with many rows, as those of a prompt, the
    GPU computes faster than the CPU by more than copies take.
    """
    found: list[tuple[float, int, CacheSetting, Decisions]] = []
    roomy = [setting for setting in settings if setting.problem.budget_bytes >= 0]
    for number, setting in enumerate(reversed(roomy)):
        core = Core(setting.problem)
        starts = list(side_by_side_fills(setting.problem))
        if number % -(-len(roomy) // _STREAMED) == 0:
            starts += filter(None, map(core.repaired, streaming_fills(setting.problem)))
        timed = [(core.makespan_us(start), start) for start in starts]
        us, start = min(timed, key=lambda each: each[0], default=(math.inf, None))
        if start is not None and us < math.inf:
            found.append((us, setting.gpu_layers, setting, start))
    for _, _, setting, start in sorted(found, key=lambda each: each[:2]):
        yield setting, start


def _placed(
    context: PlanningContext, setting: CacheSetting, start: Decisions, budget_bytes: int
) -> PlacedPlan | None:
    """What a search from a start finds, in as much memory as its buffers fit."""
    effort = Effort(_ANNEALING_SHARE * context.effort.seconds)
    for share in _NARROWED:
        context.watch.check()
        problem = replace(setting.problem, budget_bytes=int(setting.problem.budget_bytes * share))
        core = Core(problem)
        repaired = core.repaired(start)
        if repaired is None:
            return None
        decisions, _ = core.anneal(repaired, effort.evaluations(problem.kernel_count), _SEED)
        found = materialize(setting.context, problem, decisions, capacity_bytes=setting.problem.budget_bytes)
        kept = without_copies(context, found, setting.names, budget_bytes) if setting.names else found
        if kept.fits(budget_bytes, context.host_bytes):
            return kept
    return None
