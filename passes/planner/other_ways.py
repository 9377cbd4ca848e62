"""How fast others' ways to run a decoder on two devices would be: what a plan is held against.

By the same simulator, with the same kernels, times and budget. Each way is taken at its best: of a split in
whole layers that number of layers, of streaming that number of caches on the GPU, which is fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.emit.materialize import materialize
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
class _Setting:
    """The decoder with some of its caches on the GPU, where they cost no copies, the others on the host."""

    context: PlanningContext
    problem: Problem
    """With the budget that is left beside them."""


def other_ways(graph: Graph, machine: Machine, budget_bytes: int) -> tuple[OtherWay, ...]:
    """A split in whole layers, streaming of all weights, and the CPU alone; none where there is no cache.

    A layer has its cache on its device. Where streaming leaves caches on the host, what touches them runs on
    the CPU.
    """
    order = best_order(graph)
    groups = cache_groups(graph)
    if not groups or any(Device.GPU not in g.devices(graph, NO_PINS) for g in groups):
        return ()
    spans = _spans(order, groups)
    if any(max(before) >= min(after) for before, after in pairwise(spans)):
        return ()
    layers = len(groups)
    starts = _layer_starts(graph, order, spans)
    settings = [
        _setting(graph, machine, order, groups, range(layers - count, layers), budget_bytes)
        for count in range(layers + 1)
    ]
    splits = (
        (n, setting, decisions)
        for n, setting in enumerate(settings)
        for decisions in _splits(setting.problem, starts, layers - n)
    )
    streamed = ((n, s, offload_everything(s.problem, lambda _: 0.0)) for n, s in enumerate(settings))
    nothing = settings[0]
    alone = [(0, nothing, _on_cpu(nothing.problem, range(nothing.problem.kernel_count)))]
    ways = ((LAYER_SPLIT, splits), (STREAMING, streamed), (CPU_ALONE, alone))
    return tuple(_best(name, tried, layers) for name, tried in ways)


def _best(name: str, tried: Iterable[tuple[int, _Setting, Decisions]], layers: int) -> OtherWay:
    """The fastest of what is tried, as a plan with all its copies."""
    best: tuple[float, int, _Setting, Decisions] | None = None
    for count, setting, decisions in tried:
        us = Core(setting.problem).makespan_us(decisions) if setting.problem.budget_bytes >= 0 else math.inf
        if us < (math.inf if best is None else best[0]):
            best = us, count, setting, decisions
    if best is None:
        return OtherWay(name, None)
    _, count, setting, decisions = best
    try:
        us = materialize(setting.context, setting.problem, decisions).makespan_us
    except PlanError:
        return OtherWay(name, None)
    return OtherWay(name, us, count, layers) if name == LAYER_SPLIT else OtherWay(name, us)


def _setting(
    graph: Graph,
    machine: Machine,
    order: tuple[int, ...],
    groups: Sequence[CacheGroup],
    on_gpu: range,
    budget_bytes: int,
) -> _Setting:
    pins = {
        name: device
        for number, group in enumerate(groups)
        for name, device in group.pins(graph, Device.GPU if number in on_gpu else Device.CPU).items()
    }
    names = {name for number in on_gpu for name in groups[number].names}
    left_bytes = budget_bytes - sum(groups[number].size_bytes(graph) for number in on_gpu)
    context = PlanningContext(without_bytes(graph, names), machine, pins, order)
    return _Setting(context, replace(context.problem, budget_bytes=left_bytes))


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
