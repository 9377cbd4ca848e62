"""Parts of `training.py` that plan training steps and run nothing: memory and time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hybridc.errors import PlanError
from hybridc.ir import Device, Graph
from hybridc.machine import Machine
from hybridc.passes.planner.model.context import Effort, PlanningContext
from hybridc.passes.planner.model.cost import kernel_us
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes, partition
from training.steps import NETWORKS, cut_up, network, smallest_on_gpu

CUT = 4
"""Kernels are cut up to this fraction of what is needed entirely on the GPU."""
LAYRUB_REDUCTION = 0.582
LEAST_MEAN_REDUCTION, LEAST_BEST_REDUCTION, MOST_SLOWDOWN = 0.84, 0.995, 0.1


def memory(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The smallest budget with every kernel on the GPU, and the time at Layrub's reduction."""
    for name in names:
        start = time.perf_counter()
        step, baseline = network(name, machine)
        budget = int((1 - LAYRUB_REDUCTION) * baseline)
        all_gpu = all_gpu_peak_bytes(step.graph, step.machine)
        graphs = dict.fromkeys((step.graph, cut_up(step, all_gpu // CUT)))
        smallest = [smallest_on_gpu(step, graph) for graph in graphs]
        free = sum(kernel_us(kernel, step.machine, Device.GPU) for kernel in step.graph.kernels)
        limited = min(_time_us(graph, step.machine, budget, seconds) for graph in graphs)
        yield {
            "model": name,
            "batch": NETWORKS[name]["batch"],
            "machine": machine,
            "kernels": len(step.graph.kernels),
            "baseline_bytes": baseline,
            "all_gpu_bytes": all_gpu,
            "smallest_bytes": min(smallest),
            "smallest_whole_bytes": smallest[0],
            "reduction": 1 - min(smallest) / baseline,
            "budget_bytes": budget,
            "all_gpu_us": free,
            "time_us": limited,
            "slowdown": limited / free - 1,
            "seconds": time.perf_counter() - start,
        }


def _time_us(graph: Graph, machine: Machine, budget_bytes: int, seconds: float) -> float:
    """Of a plan for one budget, searched for at that budget alone; infinite if there is none."""
    try:
        [draft] = partition(
            PlanningContext(graph, machine, effort=Effort(seconds)), [budget_bytes], first_bytes=budget_bytes
        )
    except PlanError:
        return math.inf
    return draft.makespan_us


def memory_passed(rows: Sequence[dict[str, Any]]) -> bool:
    reductions = [row["reduction"] for row in rows]
    slowdown = sum(row["slowdown"] for row in rows) / len(rows)
    print(f"mean reduction {np.mean(reductions):.1%}, best {max(reductions):.2%}, slowdown {slowdown:.1%}")
    return (
        float(np.mean(reductions)) >= LEAST_MEAN_REDUCTION
        and max(reductions) >= LEAST_BEST_REDUCTION
        and slowdown <= MOST_SLOWDOWN
    )
