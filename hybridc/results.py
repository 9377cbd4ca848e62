"""What compiling and planning return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridc.frontend.ranges.opening import Dimension
from hybridc.ir import Device, Graph, Plan, Run
from hybridc.machine import Machine
from hybridc.options import format_bytes
from hybridc.passes.phases import ImportedNetwork, PlannedNetwork, TiledNetwork
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.search.partition import smallest_budget_bytes, smallest_bytes_bound
from hybridc.passes.planner.watch import PlanningTime
from hybridc.report.table import format_us, plural
from hybridc.sizes import Bucket, Interval


@dataclass(frozen=True, slots=True)
class Cached:
    """What the code of a library cost to make."""

    found: int
    """Functions that an earlier compilation had compiled."""
    functions: int
    """All that the library has; one that both devices run counts twice."""


@dataclass(frozen=True, slots=True)
class BucketPlans:
    """The plans for one bucket of the sizes of open dimensions."""

    sizes: Mapping[str, Interval]
    """By dimension."""
    plans: tuple[Plan, ...]
    """One for each distinct budget, smallest first."""
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    pins: tuple[Pins, ...]

    def __str__(self) -> str:
        """Such as `batch 9..16, seq 1`."""
        return ", ".join(f"{name} {interval}" for name, interval in self.sizes.items())

    @staticmethod
    def of_all(
        dimensions: Sequence[Dimension], buckets: Sequence[Bucket], networks: Sequence[PlannedNetwork]
    ) -> tuple[BucketPlans, ...]:
        """Of each bucket; none if there is no open dimension."""
        names = [each.name for each in dimensions]
        return tuple(
            BucketPlans(dict(zip(names, bucket, strict=True)), made.plans, made.graphs, made.pins)
            for bucket, made in zip(buckets, networks, strict=True)
            if names
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """What `compile_model` made; `path` is None if it was told to stop before there was an artifact."""

    path: Path | None
    plans: tuple[Plan, ...]
    """One for each distinct budget, smallest first."""
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    seconds: dict[str, float] = field(default_factory=dict)
    tuned: Mapping[str, str] = field(default_factory=dict)
    """Labels of the tiles that were measured to be faster than the predicted ones, by function."""
    measured_us: Mapping[tuple[str, Device], float] = field(default_factory=dict)
    """Times that were measured for the planner, by function and device."""
    cached: Cached | None = None
    """What was found in the cache; None without a cache or an artifact."""
    cuda_image_bytes: int | None = None
    """Of the GPU's code for all architectures of the target; None without any."""
    buckets: tuple[BucketPlans, ...] = ()
    """With open dimensions: the plans of all buckets, those of the largest sizes, which are `plans`, last."""

    def __repr__(self) -> str:
        if self.path is None:
            return "<Compiled: stopped before there was an artifact>"
        return f"<Compiled {self.path.name}: {_brief(self.graphs, self.plans)}>"

    @staticmethod
    def of(
        network: ImportedNetwork | TiledNetwork,
        path: Path | None,
        seconds: dict[str, float],
        tuned: Mapping[str, str],
    ) -> Compiled:
        """The result of a compilation that ended, or stopped early, with `network`."""
        measured_us = network.machine.measured_us
        if not isinstance(network, PlannedNetwork):
            return Compiled(path, (), (), seconds, tuned, measured_us)
        return Compiled(path, network.plans, network.graphs, seconds, tuned, measured_us)

    @property
    def plan(self) -> Plan | None:
        """That of the largest budget."""
        return self.plans[-1] if self.plans else None


@dataclass(frozen=True, slots=True)
class Planned:
    """What `plan_model` found, and the figures that a sensible budget lies between."""

    plans: tuple[Plan, ...]
    """One for each distinct budget, smallest first."""
    graphs: tuple[Graph, ...]
    """What each plan is of."""
    pins: tuple[Pins, ...]
    """Devices that the user gave kernels, for each plan."""
    all_gpu_peak_bytes: int
    smallest_budget_bytes: int
    smallest_bytes_bound: int
    """No plan of any tiling of the network needs less."""
    machine: Machine
    """The profile, with measured times where there are some."""
    planning: PlanningTime | None = None
    """What the search took."""
    buckets: tuple[BucketPlans, ...] = ()
    """With open dimensions: the plans of all buckets, those of the largest sizes, which are `plans`, last."""
    whole: Graph | None = None
    """The network with no kernel cut up, by which other ways to run it are told."""

    def __repr__(self) -> str:
        return f"<Planned: {_brief(self.graphs, self.plans)}>"

    @staticmethod
    def of(network: PlannedNetwork) -> Planned:
        """The result of planning, with the smallest budgets of all tilings."""
        smallest_bytes = bound_bytes = 0
        if network.job.options.target.has_gpu:
            problems = [(tiling.graph, network.machine, tiling.pins) for tiling in network.tilings]
            smallest_bytes = min(smallest_budget_bytes(*problem) for problem in problems)
            bound_bytes = min(smallest_bytes_bound(*problem) for problem in problems)
        return Planned(
            plans=network.plans,
            graphs=network.graphs,
            pins=network.pins,
            all_gpu_peak_bytes=network.all_gpu_peak_bytes,
            smallest_budget_bytes=smallest_bytes,
            smallest_bytes_bound=bound_bytes,
            machine=network.machine,
            planning=network.planning,
            whole=network.whole.graph,
        )

    @property
    def plan(self) -> Plan:
        """That of the largest budget."""
        return self.plans[-1]


def _brief(graphs: Sequence[Graph], plans: Sequence[Plan]) -> str:
    """The plan of the largest budget in one line, for people."""
    graph, plan = graphs[-1], plans[-1]
    on = Counter(step.device.value for step in plan.steps if isinstance(step, Run))
    parts = [
        f"{plural(len(graph.kernels), 'kernel')} ({', '.join(f'{n} {d}' for d, n in sorted(on.items()))})"
    ]
    if any(arena.device is Device.GPU for arena in plan.arenas):
        parts.append(f"{format_bytes(plan.arena_bytes(Device.GPU))} of GPU memory")
    parts.append(f"predicted {format_us(plan.makespan_us)}")
    of_several = f"{len(plans)} plans, the largest: " if len(plans) > 1 else ""
    return of_several + ", ".join(parts)
