"""How fast others' ways to run a decoder on two devices would be: what a plan is held against.

By the same simulator, with the same kernels, times and budget. Each way is taken at its best: of a split in
whole layers that number of layers, of streaming that number of caches on the GPU, which is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.emit.materialize import PlacedPlan, materialize, repacked, without_copies
from hybridc.passes.planner.emit.resident_states import without_bytes
from hybridc.passes.planner.model.caches import CacheGroup, cache_groups
from hybridc.passes.planner.model.context import PlanningContext
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.decisions import Decisions
from hybridc.passes.planner.model.order import best_order
from hybridc.passes.planner.model.pins import NO_PINS
from hybridc.passes.planner.model.problem import Problem
from hybridc.passes.planner.search.policies import offload_everything, with_gpu_kernels

LAYER_SPLIT, STREAMING, CPU_ALONE = "layer split", "streaming", "CPU alone"
# The fastest may leave holes in the arena.
_PACKINGS = 4
"""Splits of which one that fits is looked for."""


@dataclass(frozen=True, slots=True)
class OtherWay:
    """What others would make of the same decoder, budget and machine."""

    name: str
    makespan_us: float | None
    """Predicted time of a run; None: it does not fit the budget."""
    gpu_layers: int | None = None
    """Of a layer split, the number of layers on the GPU that is fastest."""
    layers: int | None = None
    """All that there are."""


@dataclass(frozen=True)
class CacheSetting:
    """The decoder with some of its caches on the GPU, where they cost no copies, the others on the host."""

    context: PlanningContext
    problem: Problem
    """With the budget that is left beside them."""
    names: frozenset[str]
    """Of the caches on the GPU."""
    gpu_layers: int


_Tried = tuple[CacheSetting, Decisions]


def other_ways(graph: Graph, machine: Machine, budget_bytes: int) -> tuple[OtherWay, ...]:
    """A split in whole layers, streaming of all weights, and the CPU alone; none where there is no cache.

    A layer has its cache on its device. Where streaming leaves caches on the host, what touches them runs on
    the CPU.
    """
    settings = cache_settings(PlanningContext(graph, machine), budget_bytes)
    if not settings:
        return ()
    streamed = (
        (each, offload_everything(each.problem, lambda _: 0.0))
        for each in settings
        if each.problem.budget_bytes >= 0
    )
    nothing, layers = settings[0], len(settings) - 1
    alone = [(nothing, _on_cpu(nothing.problem, range(nothing.problem.kernel_count)))]
    best = next(_fastest(_all_splits(settings)), None)
    split = _way(LAYER_SPLIT, best)
    return (
        split if best is None else replace(split, gpu_layers=best[0].gpu_layers, layers=layers),
        _way(STREAMING, next(_fastest(streamed), None)),
        _way(CPU_ALONE, next(_fastest(alone), None)),
    )


def layer_split(context: PlanningContext, budget_bytes: int) -> PlacedPlan | None:
    """The fastest plan that splits a decoder in whole layers and fits a budget; None if there is none.

    Requires: nothing is pinned by the user.
    """
    for setting, decisions in islice(_fastest(_all_splits(cache_settings(context, budget_bytes))), _PACKINGS):
        found = materialize(setting.context, setting.problem, decisions)
        kept = without_copies(context, found, setting.names, budget_bytes)
        if kept.fits(budget_bytes, context.host_bytes):
            return repacked(context, kept, context.effort.packing)
    return None


def _way(name: str, best: _Tried | None) -> OtherWay:
    """As a plan with all its copies."""
    if best is None:
        return OtherWay(name, None)
    setting, decisions = best
    return OtherWay(name, materialize(setting.context, setting.problem, decisions).makespan_us)


def _fastest(tried: Iterable[_Tried]) -> Iterator[_Tried]:
    """Those that fit, the fastest first."""
    timed = [(Core(setting.problem).makespan_us(each), setting, each) for setting, each in tried]
    for us, setting, decisions in sorted(timed, key=lambda each: (each[0], each[1].gpu_layers)):
        if us < math.inf:
            yield setting, decisions


def cache_settings(context: PlanningContext, budget_bytes: int) -> list[CacheSetting]:
    """With the caches of the last 0, 1, ... layers on the GPU; none if it is no decoder
    whose layers follow one another. Second parts of caches are on the host."""
    graph = context.graph
    order = best_order(graph) if context.order is None else context.order
    groups = [group for group in cache_groups(graph) if not group.is_second(graph, context.second)]
    if not groups or any(Device.GPU not in group.devices(graph, NO_PINS) for group in groups):
        return []
    spans = _spans(order, groups)
    if any(max(before) >= min(after) for before, after in pairwise(spans)):
        return []
    found = []
    for count in range(len(groups) + 1):
        on_gpu = groups[len(groups) - count :]
        pins = {k: d for group in cache_groups(graph) for k, d in group.pins(graph, Device.CPU).items()}
        pins |= {k: d for group in on_gpu for k, d in group.pins(graph, Device.GPU).items()}
        names = frozenset(name for group in on_gpu for name in group.names)
        left_bytes = budget_bytes - sum(group.size_bytes(graph) for group in on_gpu)
        beside = replace(context, graph=without_bytes(graph, names), pins=pins, order=tuple(order))
        found.append(CacheSetting(beside, replace(beside.problem, budget_bytes=left_bytes), names, count))
    return found


def _all_splits(settings: Sequence[CacheSetting]) -> Iterator[_Tried]:
    if not settings:
        return
    context = settings[0].context
    assert context.order is not None
    starts = _layer_starts(context.graph, context.order, _spans(context.order, cache_groups(context.graph)))
    for setting in settings:
        if setting.problem.budget_bytes >= 0:
            first = len(settings) - 1 - setting.gpu_layers
            yield from ((setting, each) for each in _splits(setting.problem, starts, first))


def _splits(problem: Problem, starts: Sequence[int], first: int) -> Iterator[Decisions]:
    """Layers from `first` on the GPU with all their weights, and what follows the last one there or not."""
    end, count = starts[-1], problem.kernel_count
    begin = starts[first]
    yield _on_cpu(problem, (*range(begin), *range(end, count)))
    if begin < end:
        yield _on_cpu(problem, range(begin))


def _on_cpu(problem: Problem, kernels: Iterable[int]) -> Decisions:
    """These kernels on the CPU, if they have code for it, the others on the GPU with all that they read."""
    wanted = set(kernels)
    pairs = enumerate(zip(problem.gpu_us, problem.cpu_us, strict=True))
    on_gpu = [gpu < math.inf and (k not in wanted or cpu == math.inf) for k, (gpu, cpu) in pairs]
    return with_gpu_kernels(problem, on_gpu, keep=True)


def _spans(order: Sequence[int], groups: Sequence[CacheGroup]) -> list[list[int]]:
    """Where in the order that stands which touches the caches of each layer."""
    place = {position: i for i, position in enumerate(order)}
    return [[place[position] for position in group.kernels] for group in groups]


def _layer_starts(graph: Graph, order: Sequence[int], spans: Sequence[Sequence[int]]) -> list[int]:
    """Where in the order each layer begins, and behind them where the last one ends.

    A layer has one group of caches. Between those of two layers the fewest bytes that cross a cut tell where
    it begins: the last such cut, as there is another in front of what follows attention.
    """
    crossing = _crossing_bytes(graph, order)
    starts = [
        min(range(max(before) + 1, min(after) + 1), key=lambda cut: (crossing[cut], -cut))
        for before, after in pairwise(spans)
    ]
    if not starts:  # a single layer is all there is
        return [0, len(order)]
    length = starts[1] - starts[0] if len(starts) > 1 else starts[0]
    end = max(starts[-1] + length, max(spans[-1]) + 1)
    return [max(starts[0] - length, 0), *starts, min(end, len(order))]


def _crossing_bytes(graph: Graph, order: Sequence[int]) -> list[int]:
    """For each cut of the order, bytes of what is computed before it and read behind it; caches aside."""
    place = {graph.kernels[position].name: i for i, position in enumerate(order)}
    caches = {name for pair in graph.caches for name in pair}
    changes = [0] * (len(order) + 1)
    for name, producer in graph.producer.items():
        readers = [place[graph.kernels[k].name] for k in graph.consumers[name]]
        made = place[graph.kernels[producer].name]
        if readers and name not in caches:
            changes[made + 1] += graph.tensor[name].size_bytes
            changes[min(max(readers) + 1, len(order))] -= graph.tensor[name].size_bytes
    found, total = [], 0
    for change in changes:
        total += change
        found.append(total)
    return found
