"""What plans lose on machines that are not as their profile says, and whether simpler ways would lose less.

    python benchmarks/regret.py [--machine laptop-4gb] [--models resnet50,bert] [--draws 20] [--seconds 2]
                                [--tiled]

Each network is planned for shares of the memory that it needs with the nominal profile. Then machines are
drawn around it (`drawn`), with seeds, and the plan's steps run there (`emit/replay.py`): in the same order,
with the same waits, sharing memory and link. Its regret is how much slower that is than the best that is
known for the drawn machine: the plan that is made knowing it, this plan, or a baseline. The baselines (a
split in two, to offload everything, the CPU alone) are chosen with the nominal profile, as the plan is, and
once more knowing the machine. With `--tiled` networks are cut up where the nominal profile says that it pays,
as `hybridc plan` does; baselines are of the network whole. Nothing is timed, and nothing runs. Written after
each network. Exits with 1 if a wanted figure is missed."""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median, quantiles
from typing import Any

from common import write_result
from plans import SUITE, tilings_of

from hybridc import models
from hybridc.ir import Device, Graph, Plan, Step
from hybridc.machine import Machine, Processor, load_machine
from hybridc.passes.phases import TiledNetwork
from hybridc.passes.planner.choose_tilings import Tiling, choose_tilings
from hybridc.passes.planner.emit.materialize import materialize
from hybridc.passes.planner.emit.replay import replayed_us
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.context import Effort
from hybridc.passes.planner.model.core import Core
from hybridc.passes.planner.model.cost import kernel_us
from hybridc.passes.planner.robust import make_robust_plans
from hybridc.passes.planner.search.policies import BASELINES

SHARES = (0.5, 0.25, 0.1)
MEDIAN_WANTED, TAIL_WANTED, BETTER_WANTED = 0.05, 0.20, 0.02
"""Median and 95th percentile of the regret, and how often a baseline may be better by `CLEARLY`."""
CLEARLY = 1.02
NOISE = 0.2
"""Of each function's time on each device: the standard deviation of its logarithm."""
SPEEDS = {"gpu": (0.3, 1.0), "cpu": (0.5, 1.1), "link": (0.6, 1.0)}
"""Of what the profile predicts."""
LAUNCH, CONTENTION = (0.5, 3.0), (0.0, 0.4)
"""Times the profile's launch and latency; what is lost of a shared memory's and of the link's bandwidth."""


Planner = Callable[..., tuple[tuple[Tiling, Plan], ...]]
PLANNERS: dict[str, Planner] = {"usual": make_plans, "robust": make_robust_plans}
"""Both with the nominal profile; the second as with `--robust`."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a plan does, and to which graph."""

    graph: Graph
    steps: Sequence[Step]

    def us(self, machine: Machine) -> float:
        """What it takes on a machine."""
        return replayed_us(self.graph, self.steps, machine)


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="laptop-4gb")
    parser.add_argument("--models", default="", help="comma-separated; default: all")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of search, on the nominal machine")
    parser.add_argument("--tiled", action="store_true", help="cut networks up where it pays")
    arguments = parser.parse_args()
    machine, effort = load_machine(arguments.machine), Effort(arguments.seconds)
    rows: list[dict[str, Any]] = []
    for name in arguments.models.split(",") if arguments.models else SUITE:
        share = max(SHARES) if arguments.tiled else None
        network = tilings_of(models.build(name, **SUITE[name]), machine, share, arguments.seconds)
        rows += rows_of(name, network, arguments.draws, arguments.seed, effort)
        print("\n".join(text(row) for row in summarise([r for r in rows if r["model"] == name])), flush=True)
        total = summarise([{**row, "model": "all"} for row in rows])
        path = write_result("regret", [*summarise(rows), *total, *rows])
    print("\n".join(map(text, total)))
    print("written to", path)
    return 0 if all(map(is_as_wanted, total)) else 1


def rows_of(name: str, network: TiledNetwork, draws: int, seed: int, effort: Effort) -> list[dict[str, Any]]:
    """A row for each share of the memory and each drawn machine."""
    graphs = [tiling.graph for tiling in network.tilings]
    rows = []
    for share in SHARES:
        budget_bytes = int(network.all_gpu_peak_bytes * share)

        def planned(machine: Machine, planner: Planner = make_plans, budget_bytes: int = budget_bytes) -> Way:
            tilings, all_bytes = network.tilings, network.all_gpu_peak_bytes
            if len(tilings) == 1:  # the order of kernels is chosen for each machine
                tilings = choose_tilings(tilings, machine, all_bytes, budget_bytes, effort)
            devices = (Device.GPU, Device.CPU)
            [(tiling, plan)] = planner(tilings, machine, [budget_bytes], devices, effort=effort)
            return Way(tiling.graph, plan.steps)

        made = {kind: planned(network.machine, planner) for kind, planner in PLANNERS.items()}
        baselines = baselines_of(network.whole.graph, network.machine, budget_bytes)
        for draw in range(draws):
            machine = drawn(network.machine, graphs, random.Random(f"{seed} {name} {share} {draw}"))
            informed = baselines_of(network.whole.graph, machine, budget_bytes)
            rows.append(
                {
                    "table": "draws",
                    "model": name,
                    "seed": seed,
                    "effort": effort.seconds,
                    "share": share,
                    "draw": draw,
                    "tiled": len(network.tilings) > 1,
                    "kernels": {kind: len(way.graph.kernels) for kind, way in made.items()},
                    "plans_us": {kind: way.us(machine) for kind, way in made.items()},
                    "informed_us": planned(machine).us(machine),
                    "baselines_us": {name: way.us(machine) for name, way in baselines.items()},
                    "informed_baselines_us": {name: way.us(machine) for name, way in informed.items()},
                }
            )
    return rows


def drawn(nominal: Machine, graphs: Sequence[Graph], draw: random.Random) -> Machine:
    """A machine around the nominal one, whose kernels are off from their predicted times one by one, too."""
    speed = {what: draw.uniform(*limits) for what, limits in SPEEDS.items()}
    launch, kept = draw.uniform(*LAUNCH), 1 - draw.uniform(*CONTENTION)
    functions = {kernel.function: kernel for graph in graphs for kernel in graph.kernels}
    times_us = {}
    for function, kernel in functions.items():
        for device in kernel.devices:
            launch_us = nominal.processor(device).launch_us
            work_us = max(0.0, kernel_us(kernel, nominal, device) - launch_us)
            noise = draw.lognormvariate(0, NOISE)
            times_us[function, device] = launch * launch_us + work_us * noise / speed[device.value]
    link = replace(
        nominal.link,
        h2d_gb_s=nominal.link.h2d_gb_s * speed["link"],
        d2h_gb_s=nominal.link.d2h_gb_s * speed["link"],
        latency_us=nominal.link.latency_us * launch,
        both_directions=kept,
    )
    gpu, cpu = (shared(processor, kept) for processor in (nominal.gpu, nominal.cpu))
    return replace(nominal, name="drawn", gpu=gpu, cpu=cpu, link=link, measured_us=times_us)


def shared(processor: Processor, kept: float) -> Processor:
    return replace(processor, shared_gb_s=kept * processor.together_gb_s)


def baselines_of(graph: Graph, machine: Machine, budget_bytes: int) -> dict[str, Way]:
    """The baselines that fit."""
    context = Tiling(graph).context(machine, Effort(0.01), None)
    problem = replace(context.problem, budget_bytes=budget_bytes)
    core = Core(problem)
    found = {}
    for name, policy in BASELINES.items():
        decisions = core.repaired(policy(problem, core.makespan_us))
        if decisions is not None:
            found[name] = Way(graph, materialize(context, problem, decisions).steps)
    return found


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model and planner."""
    found = []
    for name, kind in product(dict.fromkeys(row["model"] for row in rows), PLANNERS):
        of_model = [row for row in rows if row["model"] == name]
        regrets = [row["plans_us"][kind] / best_us(row) - 1 for row in of_model]
        found.append(
            {
                "table": "summary",
                "model": name,
                "planner": kind,
                "draws": len(of_model),
                "median": median(regrets),
                "tail": quantiles(regrets, n=20, method="inclusive")[-1] if len(regrets) > 1 else regrets[0],
                "worst": max(regrets),
                **{
                    key: share_better(of_model, kind, key)
                    for key in ("baselines_us", "informed_baselines_us")
                },
            }
        )
    return found


def best_us(row: dict[str, Any]) -> float:
    """Of all ways that were tried on a machine."""
    others = (*row["baselines_us"].values(), *row["informed_baselines_us"].values())
    return min(*row["plans_us"].values(), row["informed_us"], *others)


def share_better(rows: Sequence[dict[str, Any]], kind: str, key: str) -> float:
    """Of the draws in which a baseline is clearly faster than the plan."""
    return sum(row["plans_us"][kind] > CLEARLY * min(row[key].values()) for row in rows) / len(rows)


def text(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:18} {row['planner']:6} {row['draws']:4} draws: regret {row['median']:6.1%}, 95 %"
        f" within {row['tail']:6.1%}, worst {row['worst']:6.1%}; a baseline clearly better in"
        f" {row['baselines_us']:6.1%}, one that knows the machine in {row['informed_baselines_us']:6.1%}"
    )


def is_as_wanted(row: dict[str, Any]) -> bool:
    return bool(
        row["median"] <= MEDIAN_WANTED and row["tail"] <= TAIL_WANTED and row["baselines_us"] <= BETTER_WANTED
    )


if __name__ == "__main__":
    sys.exit(main())
