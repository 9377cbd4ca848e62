"""MOCCASIN's random layered graphs (Bartan et al., ICML 2023), and what our plans compute again there.

A graph has layers of nodes, each with a duration and a size; wanted is the least time in which all are
computed in 90 or 80 % of the memory that its given order needs, results being kept or made again. There is
no CPU, and a copy takes as long as everything else: a plan that makes one does not count.

With the authors' files (`data/` of github.com/haoming-codes/moccasin) the graphs and budgets are theirs, and
so is the order. Without them graphs are drawn alike: layers whose sizes vary by three quarters around the
mean, edges to the next layer with a probability that gives as many as theirs have, and a share of edges that
skip layers (Gagrani et al., NeurIPS 2022).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridc.ir import Copy, Device, Graph, Kernel, Lane, Role, Tensor
from hybridc.machine import Link, Machine, Processor
from hybridc.passes.planner.choose_tilings import Tiling
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph of the paper."""

    nodes: int
    width: float
    """Mean nodes of a layer over layers."""
    density: float
    """Share of the pairs of nodes in neighbouring layers that have an edge, in the authors' file."""
    published: dict[float, tuple[float, float]]
    """Share of the memory -> time computed again as a share of all, and seconds to find it."""

    @property
    def file(self) -> str:
        return f"random_layered_n{self.nodes}_w{self.width}_nlv0.75_ed0.2_scd0.14.json"


# The figures are those of the authors' poster at ICML 2023, which has two of the four graphs.
INSTANCES = (
    Instance(100, 0.27, 0.41, {}),
    Instance(250, 0.43, 0.29, {0.9: (0.009, 55.0), 0.8: (0.049, 639.5)}),
    Instance(500, 0.36, 0.26, {}),
    Instance(1000, 0.31, 0.25, {0.9: (0.007, 3612.9), 0.8: (0.034, 3611.8)}),
)
SHARES = (0.9, 0.8)
VARIES, SKIPPING = 0.75, 0.14
UNIT_BYTES = 256
"""Of the graphs' sizes, so that aligning them costs nothing."""


@dataclass(frozen=True, slots=True)
class Layered:
    """Nodes in the given order: what each reads, its size and its duration."""

    reads: tuple[tuple[int, ...], ...]
    size: tuple[int, ...]
    duration: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most that is alive at a node: its result, and results that it or later nodes read."""
        last = {source: node for node, sources in enumerate(self.reads) for source in sources}
        live = most = 0
        for node, sources in enumerate(self.reads):
            live += self.size[node]
            most = max(most, live)
            live -= sum(self.size[source] for source in {*sources} if last[source] == node)
        return most


def read(path: Path) -> Layered:
    """A file of the authors'."""
    found = json.loads(path.read_text())
    position = {name: place for place, name in enumerate(found["graph"]["order"])}
    reads: list[list[int]] = [[] for _ in position]
    for link in found["links"]:
        reads[position[link["1"]]].append(position[link["0"]])
    nodes = sorted(found["nodes"], key=lambda node: position[node["name"]])
    return Layered(
        tuple(tuple(sorted(sources)) for sources in reads),
        tuple(node["out_cost"] for node in nodes),
        tuple(node["duration"] for node in nodes),
    )


def drawn(instance: Instance, seed: int = 1) -> Layered:
    """A graph that is alike: layer by layer, between one first and one last node."""
    draw = random.Random(f"{seed} {instance.nodes}")
    mean = instance.width * math.sqrt(instance.nodes / instance.width)
    layers, count = [[0]], 1
    while count < instance.nodes - 1:
        many = min(max(1, round(draw.uniform(1 - VARIES, 1 + VARIES) * mean)), instance.nodes - 1 - count)
        layers.append(list(range(count, count + many)))
        count += many
    layers.append([count])
    edges = {
        (source, node)
        for before, after in pairwise(layers)
        for source in before
        for node in after
        if draw.random() < instance.density
    }
    for before, after in pairwise(layers):  # each is read, and reads something
        edges |= {
            (source, draw.choice(after)) for source in before if not any((source, n) in edges for n in after)
        }
        edges |= {
            (draw.choice(before), node) for node in after if not any((s, node) in edges for s in before)
        }
    skips = round(len(edges) * SKIPPING / (1 - SKIPPING))
    level = {node: number for number, layer in enumerate(layers) for node in layer}
    while skips:
        source, node = sorted(draw.sample(range(instance.nodes), 2))
        if level[node] > level[source] + 1 and (source, node) not in edges:
            edges.add((source, node))
            skips -= 1
    reads = tuple(tuple(sorted(s for s, n in edges if n == node)) for node in range(instance.nodes))
    sizes = tuple(10 * draw.randint(1, 400) for _ in reads)
    durations = (0, *(draw.randint(0, 1000) for _ in reads[2:]), 0)
    return Layered(reads, sizes, durations)


def problem(layered: Layered) -> tuple[Graph, Machine]:
    """Kernels of a GPU alone, and a link on which each copy takes as long as all of them."""
    total_us = float(sum(layered.duration))
    tensors = [
        Tensor(f"n{i}", (size * UNIT_BYTES,), "uint8", Role.ACTIVATION) for i, size in enumerate(layered.size)
    ]
    kernels = [
        Kernel(
            f"n{i}", f"n{i}", tuple(f"n{s}" for s in sources), (f"n{i}",), (), 0, 1, 0, 0, (Device.GPU,), ()
        )
        for i, sources in enumerate(layered.reads)
    ]
    # the host asks for something, which has no bytes
    last = f"n{len(layered.reads) - 1}"
    tensors.append(Tensor("end", (0,), "uint8", Role.OUTPUT))
    kernels.append(Kernel("end", "end", (last,), ("end",), (), 0, 0, 0, 0, (Device.GPU,), ()))
    times_us = {(f"n{i}", Device.GPU): float(us) for i, us in enumerate(layered.duration)}
    times_us["end", Device.GPU] = 0.0
    memory_bytes = 1 << 40
    machine = Machine(
        "alone",
        Processor("gpu", 1, 1e9, 0, memory_bytes),
        Processor("cpu", 1, 1e9, 0, memory_bytes),
        Link(1e9, 1e9, total_us),
        measured_us=times_us,
    )
    return Graph(tuple(kernels), tuple(tensors), (), ("end",)), machine


def planned(layered: Layered, share: float, seconds: float) -> tuple[float | None, float]:
    """Time computed again as a share of all, None if the plan copies results; and its bound."""
    graph, machine = problem(layered)
    budget_bytes = math.ceil(layered.peak * share) * UNIT_BYTES
    given = Tiling(graph, order=tuple(range(len(graph.kernels))))
    [(_, plan)] = make_plans(
        (given,), machine, [budget_bytes], (Device.GPU, Device.CPU), effort=Effort(seconds)
    )
    total_us = float(sum(layered.duration))
    is_copied = any(isinstance(step, Copy) and step.lane is Lane.H2D for step in plan.steps)
    return None if is_copied else plan.makespan_us / total_us - 1, plan.time_bound_us / total_us - 1


def rows(nodes: int, seconds: float, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Their time computed again and ours, of the graph of so many nodes, for each share."""
    [instance] = [each for each in INSTANCES if each.nodes == nodes]
    layered = drawn(instance) if folder is None else read(folder / instance.file)
    for share in SHARES:
        start = time.perf_counter()
        again, bound = planned(layered, share, seconds)
        published = instance.published.get(share) if folder is not None else None
        yield {
            "experiment": f"MOCCASIN layered graph of {nodes} nodes at {share:.0%}",
            "unit": "time computed again",
            "is_drawn": folder is None,
            "edges": sum(map(len, layered.reads)),
            "budget": math.ceil(layered.peak * share),
            "published": published and published[0],
            "published_seconds": published and published[1],
            "ours": again,
            "bound": max(0.0, bound),
            "effort": seconds,
            "seconds": time.perf_counter() - start,
        }
