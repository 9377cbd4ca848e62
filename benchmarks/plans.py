"""Predicted plans of the suite: gap to the proven bound, and speed-up over other ways to place a network.

    python benchmarks/plans.py [--machine laptop-4gb] [--models resnet50,bert] [--shares 50,25] [--seconds 60]
                               [--bound-seconds 60] [--whole] [--peaks] [--merge]

For each model and share of what it needs entirely on the GPU: our plan's predicted time, the bound that no
plan of the same kernels in the same order is faster than, and the same simulator's time for a split in two
(as llama.cpp's `-ngl`), for offloading everything with prefetch (as vDNN), and for the CPU alone. Nothing is
run; times are those that `hybridc plan` predicts: of the GPU's kernels by the model of GPU times, of the
CPU's by what their families reach, with what lanes lose to each other. With `--peaks` every kernel reaches
the data sheet's peaks and nothing is shared, for comparison. With `--whole` no kernel is cut up, whatever the
budget: what is left is the planner alone, on the graph that its rivals get. Written after each model; with
`--merge` the rows that are there for other models, shares, machines, times and the other kind of graph stay,
so that a record can be made in parts. Exits with 1 if one of the three is faster than our plan.

    python benchmarks/plans.py --drawn 2 --seed 1,2 [--seconds 10] [--later 60] [--later-draws 1]
                               [--bound-seconds 60] [--moves 50] [--merge]

plans thirteen networks, four of which stand in no other table, at shares that are drawn between 8 and 95 %,
two each and for each seed. A row says how large the gap is, how much of the budget is used, the seconds of
CPU until the first plan and in all, with `--later` what that much effort gains (for so many draws of each
network and seed), and with `--moves 50` what the best of all moves would gain that `hybridc explain` lists
for fifty kernels, which are drawn.
Written to plans_drawn.json after each draw of all networks; with `--merge` rows of other networks and
seeds stay. Exits with 1 if a wanted figure is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import onnx
from common import RESULTS, write_result
from cpu import SUITE as CPU_SUITE
from drawn_plans.judge import Judgement, cpu_seconds, gap, is_as_wanted, judge, summary
from drawn_plans.points import NETWORKS, drawn_shares

from hybridc import models
from hybridc.compile_cache import compile_cache
from hybridc.ir import Device, Graph, Plan
from hybridc.ir.graph import FAMILIES
from hybridc.machine import FULL_EFFICIENCY, Machine, Processor, load_machine
from hybridc.options import Budget, CompileOptions
from hybridc.passes.import_model import import_model
from hybridc.passes.phases import TiledNetwork
from hybridc.passes.pipeline import run_stages
from hybridc.passes.planner.choose_tilings import Tiling, choose_tilings
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.order import best_order
from hybridc.passes.planner.model.problem import problem_of
from hybridc.passes.planner.model.structure import smallest_working_set_bytes
from hybridc.passes.planner.search.policies import BASELINES
from hybridc.passes.planner.tighten_bound import with_tight_bound
from hybridc.progress import NullProgress
from hybridc.targets import parse_target

SUITE: dict[str, dict[str, Any]] = {**CPU_SUITE, "resnet152": {"batch": 4}}
BOUND_SECONDS = 60.0
"""Effort to tighten the bound of a plan, as `hybridc plan --bound-seconds 60` does."""
SHARES = (0.75, 0.5, 0.25, 0.1)
NOT_SHARED_GB_S = 1e6
"""What a memory reaches for several at once where that is not to matter."""
Row = dict[str, Any]


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="laptop-4gb")
    parser.add_argument("--models", default="", help="comma-separated; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of search, on the nominal machine")
    parser.add_argument("--shares", default="", help="in percent, comma-separated; default: 75,50,25,10")
    parser.add_argument("--whole", action="store_true", help="cut no kernel up")
    parser.add_argument("--peaks", action="store_true", help="kernels reach peaks, and nothing is shared")
    parser.add_argument("--merge", action="store_true", help="keep the rows of others in the result")
    parser.add_argument("--drawn", type=int, metavar="COUNT", help="draw so many shares for each network")
    parser.add_argument("--seed", default="1", help="of the shares that are drawn; several: comma-separated")
    parser.add_argument(
        "--bound-seconds",
        type=float,
        help=f"to tighten the bounds of plans; default: {BOUND_SECONDS:g}, of drawn ones 0",
    )
    parser.add_argument("--later", type=float, help="plan drawn budgets with so many seconds, too")
    parser.add_argument("--later-draws", type=int, help="of each network and seed; default: all")
    parser.add_argument("--moves", type=int, default=0, metavar="KERNELS", help="try moves of drawn plans")
    arguments = parser.parse_args()
    machine = load_machine(arguments.machine)
    if arguments.peaks:
        machine = at_peaks(machine)
    if arguments.drawn is not None:
        return plan_drawn(arguments, machine)
    names = arguments.models.split(",") if arguments.models else list(SUITE)
    shares = [float(share) / 100 for share in arguments.shares.split(",")] if arguments.shares else SHARES
    bound_seconds = BOUND_SECONDS if arguments.bound_seconds is None else arguments.bound_seconds
    kept = recorded_rows() if arguments.merge else []
    rows: list[Row] = []
    for name in names:
        model = models.build(name, **SUITE[name])
        network = tilings_of(model, machine, None if arguments.whole else max(shares), arguments.seconds)
        for share in shares:
            start, cpu_start = time.perf_counter(), cpu_seconds()
            tiling, plan = planned_share(network, share, arguments.seconds)
            seconds, cpu_planned = time.perf_counter() - start, cpu_seconds() - cpu_start
            rows.append({"model": name, "whole": arguments.whole, "date": datetime.date.today().isoformat()})
            rows[-1] |= {"effort": arguments.seconds, "seconds": seconds, "cpu_seconds": cpu_planned}
            rows[-1] |= row(tiling, plan, network.whole.graph, network.machine, share, bound_seconds)
            print(text(rows[-1]), flush=True)
        path = write_result("plans", with_new_rows(kept, rows))
    print("\n".join(summarise(rows)))
    print("written to", path)
    return 0 if all(r["time_us"] <= r["best_baseline_us"] * (1 + 1e-9) for r in rows) else 1


def plan_drawn(arguments: argparse.Namespace, machine: Machine) -> int:
    """Plan networks at shares that are drawn: each network once, then each a second time, and so on."""
    names = arguments.models.split(",") if arguments.models else list(NETWORKS)
    seeds = [int(seed) for seed in arguments.seed.split(",")]
    shares = {(name, seed): drawn_shares(name, arguments.drawn, seed) for name, seed in product(names, seeds)}
    tiled: dict[str, TiledNetwork] = {}
    found: dict[int, list[Judgement]] = {seed: [] for seed in seeds}
    rows = drawn_rows_of_others(machine.name, set(shares)) if arguments.merge else []
    for draw, seed in product(range(arguments.drawn), seeds):
        has_later = arguments.later_draws is None or draw < arguments.later_draws
        for name in names:
            if name not in tiled:
                largest = max(max(shares[name, each]) for each in seeds)
                tiled[name] = tilings_of(NETWORKS[name](), machine, largest, arguments.seconds)
            one = judge(
                tiled[name].tilings,
                tiled[name].machine,
                tiled[name].all_gpu_peak_bytes,
                shares[name, seed][draw],
                arguments.seconds,
                arguments.bound_seconds or 0.0,
                moved_kernels=arguments.moves,
                later_seconds=arguments.later if has_later else None,
            )
            found[seed].append(one)
            rows.append({"model": name, "machine": machine.name, "seed": seed, "draw": draw})
            rows[-1] |= {"effort": arguments.seconds, "later_effort": arguments.later} | one.row()
            print(f"{name:18} {one.text()}", flush=True)
        path = write_result("plans_drawn", rows)
    for seed, judgements in found.items():
        print(f"seed {seed}:", *summary(judgements), sep="\n")
    print("written to", path)
    return 0 if all(is_as_wanted(judgements) for judgements in found.values()) else 1


def drawn_rows_of_others(machine: str, drawn: set[tuple[str, int]]) -> list[Row]:
    """What the file of results says about other networks, seeds or machines."""
    path = RESULTS / "plans_drawn.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return [row for row in rows if row["machine"] != machine or (row["model"], row["seed"]) not in drawn]


def tilings_of(model: onnx.ModelProto, machine: Machine, share: float | None, seconds: float) -> TiledNetwork:
    """The model with its kernels scheduled for both devices, and cut up for budgets up to a share; None: it
    is not cut up. What was scheduled and estimated before comes from the user's cache."""
    with compile_cache(use=True) as cache:
        _, network = import_model(model, options_of(machine, share, seconds), cache)
        found: TiledNetwork = run_stages(network, NullProgress(), stop_after="tile")
    return found


def at_peaks(machine: Machine) -> Machine:
    """The machine if every kernel reached the data sheet's peaks, and lost nothing to what runs beside it."""

    def idealised(processor: Processor) -> Processor:
        # a family with known efficiencies is not estimated
        full = dict.fromkeys(FAMILIES, FULL_EFFICIENCY)
        return replace(processor, efficiencies=full, shared_gb_s=NOT_SHARED_GB_S)

    return replace(machine, gpu=idealised(machine.gpu), cpu=idealised(machine.cpu))


def recorded_rows() -> list[Row]:
    """What the file of results says, each row with its date."""
    path = RESULTS / "plans.json"
    record = json.loads(path.read_text()) if path.is_file() else {"date": "", "rows": []}
    return [{"date": record["date"], **row} for row in record["rows"]]


def identity(row: Row) -> tuple[object, ...]:
    """What a row is of; records from before times were estimated do not say so."""
    estimated = bool(row.get("has_estimated_times"))
    return row["machine"], row["whole"], estimated, row["model"], row["share"]


def with_new_rows(kept: list[Row], rows: list[Row]) -> list[Row]:
    """Both, of what both are of the new ones."""
    new = {identity(row) for row in rows}
    return [row for row in kept if identity(row) not in new] + rows


def options_of(machine: Machine, share: float | None, seconds: float) -> CompileOptions:
    return CompileOptions(
        target=parse_target("cuda+avx2"),
        gpu_memory=() if share is None else (Budget(percent=100 * share),),
        machine=machine,
        plan_seconds=seconds,
    )


def planned_share(network: TiledNetwork, share: float, seconds: float) -> tuple[Tiling, Plan]:
    """The fastest plan for a share of the memory, of the ways to cut the network up."""
    all_bytes, effort = network.all_gpu_peak_bytes, Effort(seconds)
    budget_bytes, tilings = int(all_bytes * share), network.tilings
    if not network.job.options.gpu_memory:  # left whole: the order of its kernels is still to be chosen
        tilings = choose_tilings(tilings, network.machine, all_bytes, budget_bytes, effort)
    [found] = make_plans(tilings, network.machine, [budget_bytes], (Device.GPU, Device.CPU), effort=effort)
    return found


def row(
    tiling: Tiling, plan: Plan, whole: Graph, machine: Machine, share: float, bound_seconds: float
) -> Row:
    """One plan of a model. The baselines have the kernels of `whole`, which are not cut up, and the same
    machine, with the times that were estimated for its kernels."""
    assert plan.budget_bytes is not None
    order = tiling.order or best_order(tiling.graph)
    problem = problem_of(tiling.graph, machine, plan.budget_bytes, order=order)
    uncut = problem_of(whole, machine, plan.budget_bytes, order=best_order(whole))
    core = Core(uncut)
    baselines = {
        name: core.makespan_us(policy(uncut, core.makespan_us)) for name, policy in BASELINES.items()
    }
    sizes = [smallest_working_set_bytes(uncut, k) for k in range(uncut.kernel_count)]
    start = time.perf_counter()
    tight = with_tight_bound(tiling, machine, plan, bound_seconds) if bound_seconds else plan
    bound_s = time.perf_counter() - start
    return {
        "machine": machine.name,
        "has_estimated_times": bool(machine.estimated_us),
        "has_contention": problem.contention.matters,
        "share": share,
        "budget_bytes": plan.budget_bytes,
        "arena_bytes": plan.arena_bytes(Device.GPU),
        "kernels": problem.kernel_count,
        "kernels_uncut": uncut.kernel_count,
        "kernels_too_large": sum(size > plan.budget_bytes for size in sizes),
        "time_us": plan.makespan_us,
        "bound_us": tight.time_bound_us,
        "gap": gap(plan.makespan_us, tight.time_bound_us),
        "baselines_us": {name: us if math.isfinite(us) else None for name, us in baselines.items()},
        "best_baseline_us": min(baselines.values()),
        "bound_seconds": bound_s,
    }


def text(row: Row) -> str:
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
        f" {row['kernels']} planned  {row['seconds']:.0f} s, {row['cpu_seconds']:.0f} s of CPU,"
        f" bound {row['bound_seconds']:.0f} s"
    )


def summarise(rows: list[Row]) -> list[str]:
    """Per share the mean gap, and the geometric mean of the speed-up over the best baseline."""
    lines = []
    by_share: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        by_share[row["share"]].append(row)
    for share, group in by_share.items():
        gap = sum(row["gap"] for row in group) / len(group)
        logs = [math.log(row["best_baseline_us"] / row["time_us"]) for row in group]
        lines.append(f"{share:.0%}: mean gap {gap:.1%}, speed-up {math.exp(sum(logs) / len(logs)):.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
