"""What is known of a network after each phase of the compiler: one frozen record per phase.

    ImportedNetwork -> FusedNetwork -> ScheduledNetwork -> GraphedNetwork    one network
    TiledNetwork -> PlannedNetwork -> LoweredNetwork                         the whole network and its tilings

Each record has the fields of the one before it and adds what its phase found, so a stage that takes a record
can rely on all of its fields. The type checker proves it: `pipeline.STAGES` has the right type only in an
order in which each stage gets what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hybridc.compile_cache import Cache, NoCache
from hybridc.ir import Device, Graph, Plan
from hybridc.machine import Machine
from hybridc.machines.typical import with_typical_shares
from hybridc.options import CompileOptions
from hybridc.passes.lower.lower import Lowered
from hybridc.passes.planner.choose_tilings import ColumnCut, Tiling
from hybridc.passes.planner.model.pins import Pins
from hybridc.passes.planner.watch import PlanningTime, Watch
from hybridc.passes.precision.precision import Errors
from hybridc.passes.precision.wide_program import NarrowTensors
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program
from hybridc.passes.schedule import Chooser
from hybridc.schedules.rule import Scheduled

Times = Mapping[tuple[str, Device], float]
"""Microseconds of a call of a function, by its name and device."""
Profiler = Callable[[Mapping[tuple[str, Device], Scheduled]], Times]
"""Measures functions; leaves out those that it cannot measure."""


@dataclass(frozen=True)
class Job:
    """What the compiler is asked to do. It stays the same from stage to stage."""

    options: CompileOptions
    loop_carried: tuple[tuple[int, int], ...] = ()
    """Inputs and outputs, by position, of which a run takes what the run before made."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Inputs that are the sizes of open dimensions, by variable, and the largest of the bucket."""
    open_axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """By variable of an input and axis, the variable of the input that says how many elements count."""
    many_sizes: bool = False
    """Whether the network is compiled for other sizes, too, which are to read the same weights."""
    tile_limits: tuple[int, ...] | None = None
    """Bytes that kernels are cut up to; None: all that may be worthwhile are tried."""
    cut: ColumnCut | None = None
    """Of the products that are in two parts for larger sizes, and so for these."""
    cache: Cache = field(default_factory=NoCache)
    """What earlier compilations left."""
    host_arena_bytes: int | None = None
    """What a plan may hold in the host's memory; None: no limit."""
    rounding: Errors | None = None
    """Measures how much rounding to bf16 changes the result of a function; needed for bf16."""
    chooser: Chooser | None = None
    """Chooses among the tile sizes of CPU functions; None: those that are predicted to be best."""
    profiler: Profiler | None = None
    """Measures times that the planner takes instead of predictions; None: nothing is measured."""
    watch: Watch | None = None
    """Hears of plans while they are searched for, and may end the search; None: it goes on to its end."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those of the target, the one that comes first in plans first."""
        return (Device.GPU, Device.CPU) if self.options.target.has_gpu else (Device.CPU,)


@dataclass(frozen=True)
class Library:
    """The functions that kernels call. A network and its tilings share one: nothing is made twice."""

    table: FunctionTable = field(default_factory=FunctionTable)
    """PrimFuncs by what they compute; `fuse` adds to it."""
    scheduled: Mapping[tuple[str, Device], Scheduled] = field(default_factory=dict)
    """Their code, by name and device."""
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What they read, by the names of the tensors."""
    profiled: frozenset[str] = frozenset()
    """Functions that were handed to the profiler."""
    measured_us: Times = field(default_factory=dict)
    estimated_us: Times = field(default_factory=dict)
    """Of GPU functions, by the model of GPU times."""


@dataclass(frozen=True)
class ImportedNetwork:
    """A network as Relax operators."""

    job: Job
    program: Program
    library: Library = field(default_factory=Library)
    """Of this network, or of what it is a tiling of."""
    narrow: NarrowTensors = field(default_factory=NarrowTensors)
    """What has 16-bit floats in the model, or is to be stored so."""

    @property
    def machine(self) -> Machine:
        """The profile of the machine, with what kernels usually reach and the times known so far."""
        machine, library = with_typical_shares(self.job.options.machine), self.library
        return replace(machine, measured_us=library.measured_us, estimated_us=library.estimated_us)


@dataclass(frozen=True)
class FusedNetwork(ImportedNetwork):
    """A network whose `program` calls a PrimFunc for each kernel."""

    unfused: Program = field(kw_only=True)
    """What `fuse` began with; tilings are made of it."""


@dataclass(frozen=True)
class ScheduledNetwork(FusedNetwork):
    """A network whose library has code for all functions that `program` calls."""

    @property
    def scheduled(self) -> Mapping[tuple[str, Device], Scheduled]:
        """The code of functions, by name and device."""
        return self.library.scheduled


@dataclass(frozen=True)
class GraphedNetwork(ScheduledNetwork):
    """A network as kernels and tensors."""

    graph: Graph = field(kw_only=True)


@dataclass(frozen=True)
class TiledNetwork:
    """The ways to run a network that are worth planning."""

    whole: GraphedNetwork
    """The network without tiling; its library has the functions of all tilings."""
    tilings: tuple[Tiling, ...]
    """The whole network first, then tilings of it, then those of them that have other layouts, too."""
    all_gpu_peak_bytes: int
    """What the whole network needs entirely on the GPU; 0 without a GPU."""

    @property
    def job(self) -> Job:
        return self.whole.job

    @property
    def library(self) -> Library:
        return self.whole.library

    @property
    def machine(self) -> Machine:
        return self.whole.machine

    @property
    def budgets(self) -> list[int]:
        """GPU bytes, each once and smallest first."""
        return budget_bytes(self.job, self.all_gpu_peak_bytes)


@dataclass(frozen=True)
class PlannedNetwork(TiledNetwork):
    """A network with a plan for each distinct budget, smallest first."""

    chosen: tuple[Tiling, ...]
    """What each plan is of."""
    plans: tuple[Plan, ...]
    planning: PlanningTime | None
    """What that took, where somebody watched it."""

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """What each plan is of."""
        return tuple(tiling.graph for tiling in self.chosen)

    @property
    def pins(self) -> tuple[Pins, ...]:
        """Devices that the user gave kernels, for each plan."""
        return tuple(tiling.pins for tiling in self.chosen)


@dataclass(frozen=True)
class LoweredNetwork(PlannedNetwork):
    """A network as a module that code is generated for."""

    lowered: Lowered


def budget_bytes(job: Job, all_gpu_peak_bytes: int) -> list[int]:
    """The GPU memory budgets of a job in bytes, each once and smallest first.

    Percentages are of `all_gpu_peak_bytes`.
    """
    return sorted({budget.resolve(all_gpu_peak_bytes) for budget in job.options.gpu_memory})
