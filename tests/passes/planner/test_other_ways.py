"""Others' ways to run a decoder: their times by hand, and what they may hold of the GPU's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridc.ir import Device, Graph
from hybridc.ir.plan import ALIGNMENT_BYTES
from hybridc.machine import Machine
from hybridc.passes.planner.model.cost import copy_us, kernel_us
from hybridc.passes.planner.other_ways import CPU_ALONE, LAYER_SPLIT, STREAMING, OtherWay, other_ways
from tests.support.graphs import GraphBuilder, machine

GPU, CPU = Device.GPU, Device.CPU
UNIT = ALIGNMENT_BYTES
LAYERS, CACHE, WEIGHT = 4, 8, 6
FAST_GPU = machine(gpu_gflops=1e6)


def decoder(layers: int = LAYERS) -> Graph:
    """Behind an embedding, layers of three kernels: a product, rows that take their places, and attention
    with the next product; then a head."""
    build = GraphBuilder()
    ids, pairs, appending = build.input("ids", 1), [], []
    caches = [build.input(f"key{i}", CACHE) for i in range(layers)]
    x = build.kernel((ids, build.weight("table", 3)), {"x": 2})
    for i, old in enumerate(caches):
        made = build.kernel((x, build.weight(f"w{i}", WEIGHT)), {f"q{i}": 4})
        new = build.kernel((old, made), {f"new_{old}": CACHE}, overwrite=((f"new_{old}", old),))
        appending.append(len(build.kernels) - 1)
        pairs.append((old, new))
        x = build.kernel((made, new, x, build.weight(f"u{i}", WEIGHT)), {f"x{i}": 2})
    logits = build.kernel((x, build.weight("head", 5)), {"logits": 3})
    graph = build.graph(logits, *(new for _, new in pairs))
    kernels = tuple(replace(k, appends=i in appending) for i, k in enumerate(build.kernels))
    return replace(graph, kernels=kernels, loop_carried=tuple(pairs))


def named(graph: Graph, machine: Machine, units: int) -> dict[str, OtherWay]:
    return {way.name: way for way in other_ways(graph, machine, units * UNIT)}


def split_us(graph: Graph, machine: Machine, gpu_layers: int, *, head_on_gpu: bool) -> float:
    """One device after the other; a copy of x in between, and at the end of the logits."""
    first_on_gpu = 1 + 3 * (LAYERS - gpu_layers)
    last = len(graph.kernels) - 1
    where = [
        GPU if first_on_gpu <= i < last or (i == last and head_on_gpu) else CPU
        for i in range(len(graph.kernels))
    ]
    us = sum(kernel_us(k, machine, device) for k, device in zip(graph.kernels, where, strict=True))
    x_us = copy_us(2 * UNIT, machine, GPU)
    out_us = copy_us((3 if head_on_gpu else 2) * UNIT, machine, CPU)
    return us + x_us + out_us


@pytest.mark.parametrize(("units", "gpu_layers"), [(33, 1), (53, 2), (75, 3)])
def test_split_has_as_many_whole_layers_on_the_gpu_as_fit(units: int, gpu_layers: int) -> None:
    """A layer has 20 units of weights and cache, at most 8 more are at work, and the head has 5."""
    graph = decoder()
    split = named(graph, FAST_GPU, units)[LAYER_SPLIT]
    assert (split.gpu_layers, split.layers) == (gpu_layers, LAYERS)
    expected = [split_us(graph, FAST_GPU, gpu_layers, head_on_gpu=head) for head in (False, True)]
    assert split.makespan_us == pytest.approx(min(expected), rel=1e-6)


def test_cpu_alone_is_the_sum_of_its_kernels() -> None:
    graph = decoder()
    alone = named(graph, FAST_GPU, 30)[CPU_ALONE]
    assert alone.makespan_us == pytest.approx(sum(kernel_us(k, FAST_GPU, CPU) for k in graph.kernels))


def test_streaming_takes_at_least_as_long_as_its_copies() -> None:
    graph, slow_link = decoder(), machine(gpu_gflops=1e6, link_gb_s=0.01)
    streaming = named(graph, slow_link, 60)[STREAMING].makespan_us
    copies_us = copy_us(2 * WEIGHT * UNIT, slow_link, GPU)
    assert streaming is not None and streaming >= copies_us
    fast = named(graph, machine(gpu_gflops=1e6, link_gb_s=1e6), 60)[STREAMING].makespan_us
    assert fast is not None and fast < streaming


def test_where_the_gpu_is_slow_no_layer_is_there() -> None:
    split = named(decoder(), machine(gpu_gflops=1e-3), 200)[LAYER_SPLIT]
    assert split.gpu_layers == 0


def test_without_room_the_split_is_the_cpu_alone() -> None:
    ways = named(decoder(), FAST_GPU, 0)
    assert ways[LAYER_SPLIT].gpu_layers == 0
    assert ways[LAYER_SPLIT].makespan_us == ways[CPU_ALONE].makespan_us


def test_other_networks_have_none() -> None:
    assert not other_ways(replace(decoder(), loop_carried=()), FAST_GPU, 60 * UNIT)
