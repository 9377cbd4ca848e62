"""A part of `training.py` that plans training steps and runs nothing: states that stay on the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hybridc.ir import Device
from hybridc.ir.plan import align, resident_pairs
from hybridc.machine import load_machine
from hybridc.options import CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.make_plans import make_plan
from hybridc.passes.planner.model.context import Effort
from hybridc.progress import NullProgress
from hybridc.targets import parse_target
from training.steps import build, programs_of

BATCHES = {"cifar_quick": 100, "alexnet": 16, "resnet18": 32}
MACHINES = ("laptop-4gb", "desktop-12gb", "h100")


def states(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Predicted times of steps with momentum, without a limit: states on the host between them, and not.

    On several machines, whatever is asked for.
    """
    for name in names:
        model = build(name, batch=BATCHES[name])
        step = programs_of(model, optimizer="sgd:lr=0.1,momentum=0.9").step
        for profile in MACHINES:
            options = CompileOptions(target=parse_target("cuda+avx2"), machine=load_machine(profile))
            done = run_stages(import_model(step, options)[1], NullProgress(), stop_after="graph")
            host_graph = replace(done.graph, loop_carried=())
            on_host, kept = (
                make_plan(graph, options.machine, None, (Device.GPU, Device.CPU), effort=Effort(seconds))
                for graph in (host_graph, done.graph)
            )
            pairs = resident_pairs(done.graph, kept.steps)
            sizes = {old: align(done.graph.tensor[old].size_bytes) for old, _ in done.graph.loop_carried}
            yield {
                "model": name,
                "batch": BATCHES[name],
                "machine": profile,
                "states": len(sizes),
                "state_bytes": sum(sizes.values()),
                "resident": len(pairs),
                "resident_bytes": sum(sizes[old] for old in pairs),
                "gpu_bytes": kept.arena_bytes(Device.GPU),
                "host_us": on_host.makespan_us,
                "time_us": kept.makespan_us,
                "bound_us": kept.time_bound_us,
                "speedup": on_host.makespan_us / kept.makespan_us,
            }


def states_passed(rows: Sequence[dict[str, Any]]) -> bool:
    speedups = [row["speedup"] for row in rows]
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    print(f"states that stay make a step {mean:.2f} times faster, {min(speedups):.2f} to {max(speedups):.2f}")
    return min(speedups) >= 1 - 1e-9
