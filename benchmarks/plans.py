"""Predicted plans of the suite: gap to the proven bound, and speed-up over other ways to place a network.

    python benchmarks/plans.py [--machine laptop-4gb] [--models resnet50,bert] [--seconds 60]

For each model and share of what it needs entirely on the GPU: our plan's predicted time, the bound that no
plan of the same kernels in the same order is faster than, and the same simulator's time for a split in two
(as llama.cpp's `-ngl`), for offloading everything with prefetch (as vDNN), and for the CPU alone. Nothing is
run; times are those of the machine profile. Exits with 1 if one of the three is faster than our plan.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections import defaultdict
from typing import Any

import onnx
from common import write_result
from cpu import SUITE as CPU_SUITE

from hybridc import models
from hybridc.compiler import import_model
from hybridc.ir import Device
from hybridc.machine import Machine, load_machine
from hybridc.options import Budget, CompileOptions
from hybridc.passes.pipeline import Compilation, run_stages
from hybridc.passes.planner.bound import time_bound
from hybridc.passes.planner.core import Core
from hybridc.passes.planner.order import best_order
from hybridc.passes.planner.policies import BASELINES
from hybridc.passes.planner.problem import problem_of
from hybridc.passes.planner.relaxation import smallest_working_set_bytes
from hybridc.progress import Silent
from hybridc.targets import parse_target

SUITE: dict[str, dict[str, Any]] = {**CPU_SUITE, "resnet152": {"batch": 4}}
BOUND_NODES = 10
"""Of branch and bound, which tightens the bound: some 20 seconds for a hundred and more kernels."""
MOST_BOUNDED = 300
"""Kernels up to which the bound is tightened."""
SHARES = (0.75, 0.5, 0.25, 0.1)


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="laptop-4gb")
    parser.add_argument("--models", default="", help="comma-separated; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of search, on the nominal machine")
    arguments = parser.parse_args()
    machine = load_machine(arguments.machine)
    names = arguments.models.split(",") if arguments.models else list(SUITE)
    rows: list[dict[str, Any]] = []
    for name in names:
        model = models.build(name, **SUITE[name])
        whole = planned(model, machine, None, 1.0)
        for share in SHARES:
            rows.append({"model": name} | row(model, whole, machine, share, arguments.seconds))
            print(text(rows[-1]), flush=True)
    print("\n".join(summarise(rows)))
    print("written to", write_result("plans", rows))
    return 0 if all(r["time_us"] <= r["best_baseline_us"] * (1 + 1e-9) for r in rows) else 1


def planned(model: onnx.ModelProto, machine: Machine, share: float | None, seconds: float) -> Compilation:
    """The model with its kernels scheduled for both devices, and planned."""
    options = CompileOptions(
        target=parse_target("cuda+avx2"),
        gpu_memory=() if share is None else (Budget(percent=100 * share),),
        machine=machine,
        plan_seconds=seconds,
    )
    return run_stages(import_model(model, options)[1], Silent(), stop_after="plan")


def row(
    model: onnx.ModelProto, whole: Compilation, machine: Machine, share: float, seconds: float
) -> dict[str, Any]:
    """One model at one budget. The baselines have the kernels of `whole`, which are not cut up."""
    start = time.perf_counter()
    done = planned(model, machine, share, seconds)
    elapsed_s = time.perf_counter() - start
    assert done.graph is not None and whole.graph is not None
    (plan,) = done.plans
    assert plan.budget_bytes is not None
    problem = problem_of(done.graph, machine, plan.budget_bytes, order=best_order(done.graph))
    uncut = problem_of(whole.graph, machine, plan.budget_bytes, order=best_order(whole.graph))
    core = Core(uncut)
    baselines = {
        name: core.makespan_us(policy(uncut, core.makespan_us)) for name, policy in BASELINES.items()
    }
    sizes = [smallest_working_set_bytes(uncut, k) for k in range(uncut.kernel_count)]
    bound_us = plan.time_bound_us
    if problem.kernel_count <= MOST_BOUNDED:
        bound_us = max(bound_us, time_bound(problem, nodes=BOUND_NODES).bound_us)
    bound_us = min(bound_us, plan.makespan_us)
    return {
        "machine": machine.name,
        "share": share,
        "budget_bytes": plan.budget_bytes,
        "arena_bytes": plan.arena_bytes(Device.GPU),
        "kernels": problem.kernel_count,
        "kernels_uncut": uncut.kernel_count,
        "kernels_too_large": sum(size > plan.budget_bytes for size in sizes),
        "time_us": plan.makespan_us,
        "bound_us": bound_us,
        "gap": plan.makespan_us / bound_us - 1,
        "baselines_us": {name: us if math.isfinite(us) else None for name, us in baselines.items()},
        "best_baseline_us": min(baselines.values()),
        "seconds": elapsed_s,
    }


def text(row: dict[str, Any]) -> str:
    speedup = row["best_baseline_us"] / row["time_us"]
    others = ", ".join(
        f"{name} {us / 1e3:.2f}" if us is not None else f"{name} does not fit"
        for name, us in row["baselines_us"].items()
    )
    return (
        f"{row['model']:18} {row['share']:5.0%}  {row['time_us'] / 1e3:9.2f} ms"
        f"  bound {row['bound_us'] / 1e3:9.2f}  gap {row['gap']:6.1%}"
        f"  {speedup:5.2f} x the best baseline ({others})"
        f"  {row['kernels_too_large']:3} of {row['kernels_uncut']} kernels too large,"
        f" {row['kernels']} planned  {row['seconds']:.0f} s"
    )


def summarise(rows: list[dict[str, Any]]) -> list[str]:
    """Per share the mean gap, and the geometric mean of the speed-up over the best baseline."""
    lines = []
    by_share: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_share[row["share"]].append(row)
    for share, group in by_share.items():
        gap = sum(row["gap"] for row in group) / len(group)
        logs = [math.log(row["best_baseline_us"] / row["time_us"]) for row in group]
        lines.append(f"{share:.0%}: mean gap {gap:.1%}, speed-up {math.exp(sum(logs) / len(logs)):.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
