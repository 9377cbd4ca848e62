"""The order of the passes: the list `STAGES`, and nothing else, knows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from hybridc.errors import PlanError, UsageError
from hybridc.ir import Device, Graph, Plan
from hybridc.ir.plan import plan_to_json
from hybridc.machine import Machine
from hybridc.options import Budget
from hybridc.passes.attention import fuse_attention
from hybridc.passes.canonicalize import canonicalize
from hybridc.passes.fuse import fuse
from hybridc.passes.layout import choose_layout
from hybridc.passes.lower import Lowered, lower
from hybridc.passes.partition import Effort, all_gpu_peak_bytes
from hybridc.passes.pins import resolve_pins
from hybridc.passes.plan import make_plans
from hybridc.passes.program import Program
from hybridc.passes.read_graph import read_graph
from hybridc.passes.schedule import Chooser, schedule_functions
from hybridc.passes.separable import fuse_separable
from hybridc.passes.tile import tile
from hybridc.passes.verify import verify
from hybridc.passes.working_set import largest_working_set_bytes
from hybridc.progress import Progress
from hybridc.schedules.registry import Scheduled
from hybridc.targets import Target

TILINGS = 6
"""Halvings of what the model needs to which its kernels may be cut up."""
MOST_KERNELS = 1000
"""Networks cut up into more are not tried: planning them takes minutes, and launches their time."""
MOST_BINDINGS = 3000
"""Nor are those of more bindings scheduled, to see how many kernels they are."""
TRIAL_SHARE = 0.1
"""Of the planner's effort, to tell which way of cutting up is best."""

Profiler = Callable[[Mapping[tuple[str, Device], Scheduled]], Mapping[tuple[str, Device], float]]
"""Microseconds of a call of each function, by name and device; of those that it can measure."""


@dataclass(frozen=True)
class Compilation:
    """What is known so far: each stage fills in more."""

    program: Program
    target: Target
    machine: Machine
    gpu_memory: tuple[Budget, ...] = ()
    """Empty: no limit."""
    pins: tuple[tuple[str, Device], ...] = ()
    effort: Effort = field(default_factory=Effort)
    winograd: bool = True
    chooser: Chooser | None = None
    profiler: Profiler | None = None
    """Measures what the planner takes instead of the machine's speeds; None: nothing is measured."""
    unfused: Program | None = None
    """What `fuse` began with."""
    scheduled: dict[tuple[str, Device], Scheduled] | None = None
    graph: Graph | None = None
    all_gpu_peak_bytes: int = 0
    """What the model needs entirely on the GPU, in whole kernels; 0 without a GPU."""
    plans: tuple[Plan, ...] = ()
    """One for each distinct budget, smallest first."""
    lowered: Lowered | None = None

    @property
    def kernel_count(self) -> int:
        return len(self.graph.kernels) if self.graph is not None else 0

    @property
    def budgets(self) -> list[int]:
        """GPU bytes, each once and smallest first."""
        return sorted({budget.resolve(self.all_gpu_peak_bytes) for budget in self.gpu_memory})

    @property
    def devices(self) -> tuple[Device, ...]:
        return (Device.GPU, Device.CPU) if self.target.has_gpu else (Device.CPU,)


@dataclass(frozen=True, slots=True)
class Stage:
    """A named step of the compiler. `show` gives what it made as text, and the suffix of its file."""

    name: str
    run: Callable[[Compilation, Progress], Compilation]
    show: Callable[[Compilation], tuple[str, str]]


def run_stages(
    compilation: Compilation,
    progress: Progress,
    *,
    stop_after: str | None = None,
    dump_ir: Path | None = None,
) -> Compilation:
    """Run the stages in order, up to and with `stop_after`; write what each made to `dump_ir`."""
    last = _position(stop_after) if stop_after else len(STAGES) - 1
    for number, stage in enumerate(STAGES[: last + 1]):
        progress.stage(stage.name)
        compilation = stage.run(compilation, progress)
        if dump_ir is not None:
            _dump(dump_ir, number, stage, compilation)
    return compilation


def _position(name: str) -> int:
    names = [stage.name for stage in STAGES]
    if name not in names:
        raise UsageError("HC520", f"there is no stage {name!r}", remedy=f"stages are {', '.join(names)}")
    return names.index(name)


def _dump(folder: Path, number: int, stage: Stage, compilation: Compilation) -> None:
    suffix, text = stage.show(compilation)
    path = folder / f"{number:02}_{stage.name}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UsageError(
            "HC521", f"cannot write {path}: {error.strerror}", remedy="name another --dump-ir folder"
        ) from error


# ------------------------------------------------------------------------------ one line per stage


def _on_cpu(c: Compilation, run: Callable[[Program], Program]) -> Compilation:
    return c if c.target.has_gpu else replace(c, program=run(c.program))


def _tile(c: Compilation, progress: Progress) -> Compilation:
    """Cut large kernels up, if that is predicted to pay at the smallest budget.

    How finely depends on powers of two of what the model needs, so that near budgets share their kernels.
    Each way of cutting goes through the stages before this one; the whole network has been there.
    """
    if not c.target.has_gpu:
        return c
    assert c.graph is not None and c.unfused is not None
    whole = c.unfused
    c = replace(c, all_gpu_peak_bytes=all_gpu_peak_bytes(c.graph, c.machine))
    budget_bytes = min(c.budgets, default=c.all_gpu_peak_bytes)
    if largest_working_set_bytes(whole) <= budget_bytes:
        return c
    limits = [c.all_gpu_peak_bytes >> k for k in range(1, TILINGS)]
    fitting = [limit for limit in limits if budget_bytes / 4 < limit <= budget_bytes]
    programs = [whole]
    for program in (tile(whole, limit) for limit in fitting):
        if len(program.bindings) <= MOST_BINDINGS and all(program is not p for p in programs):
            programs.append(program)
    cut_up = [_to_graph(replace(c, program=program), progress) for program in programs[1:]]
    trials = [c, *(trial for trial in cut_up if trial.kernel_count <= MOST_KERNELS)]
    if len(trials) == 1:
        return c
    return min(trials, key=lambda trial: _predicted_us(trial, budget_bytes))


def _to_graph(c: Compilation, progress: Progress) -> Compilation:
    """From the program before `fuse` to the graph."""
    for stage in STAGES[_position("fuse") : _position("graph") + 1]:
        c = stage.run(c, progress)
    return c


def _predicted_us(c: Compilation, budget_bytes: int) -> float:
    assert c.graph is not None
    effort = Effort(TRIAL_SHARE * c.effort.seconds)
    try:
        return make_plans(c.graph, c.machine, [budget_bytes], c.devices, effort=effort)[0].makespan_us
    except PlanError:
        return math.inf


def _schedule(c: Compilation, progress: Progress) -> Compilation:
    scheduled = schedule_functions(
        c.program, c.target, progress.kernels, winograd=c.winograd, chooser=c.chooser
    )
    return replace(c, scheduled=scheduled)


def _read_graph(c: Compilation, _: Progress) -> Compilation:
    assert c.scheduled is not None
    return replace(c, graph=read_graph(c.program, c.scheduled))


def _profile(c: Compilation) -> Compilation:
    assert c.scheduled is not None
    if c.profiler is None:
        return c
    return replace(c, machine=replace(c.machine, measured_us=c.profiler(c.scheduled)))


def _plan(c: Compilation, progress: Progress) -> Compilation:
    c = _profile(c)
    assert c.graph is not None
    plans = make_plans(
        c.graph,
        c.machine,
        c.budgets,
        c.devices,
        pins=resolve_pins(c.graph, c.pins),
        effort=c.effort,
        report=progress.kernels,
    )
    return replace(c, plans=plans)


def _verify(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None
    for plan in c.plans:
        verify(c.graph, plan)
    return c


def _lower(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None and c.scheduled is not None
    return replace(c, lowered=lower(c.graph, c.plans, c.scheduled, c.target))


# --------------------------------------------------------------------------------- what they made


def _show_program(c: Compilation) -> tuple[str, str]:
    return ".py", c.program.module.script()


def _show_scheduled(c: Compilation) -> tuple[str, str]:
    assert c.scheduled is not None
    parts = [
        f"# {name} on {device}: rule {s.rule}, packed {dict(s.packings)}, "
        f"workspace {list(s.workspace_bytes)} bytes\n"
        f"{s.function.script()}\n"
        for (name, device), s in c.scheduled.items()
    ]
    return ".py", "\n".join(parts)


def _show_graph(c: Compilation) -> tuple[str, str]:
    assert c.graph is not None
    return ".json", _json(asdict(c.graph))


def _show_plan(c: Compilation) -> tuple[str, str]:
    return ".json", _json([plan_to_json(plan) for plan in c.plans])


def _show_verdict(c: Compilation) -> tuple[str, str]:
    lines = [f"accepted: {len(plan.steps)} steps, {len(plan.buffers)} buffers\n" for plan in c.plans]
    return ".txt", "".join(lines)


def _show_lowered(c: Compilation) -> tuple[str, str]:
    assert c.lowered is not None
    return ".py", c.lowered.module.script()


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


STAGES: tuple[Stage, ...] = (
    Stage("canonicalize", lambda c, _: replace(c, program=canonicalize(c.program)), _show_program),
    # these two only where a CPU runs alone: a GPU beside it has other schedules, and reads the same tensors
    Stage("attention", lambda c, _: _on_cpu(c, fuse_attention), _show_program),
    Stage("layout", lambda c, _: _on_cpu(c, partial(choose_layout, isa=c.target.isa)), _show_program),
    Stage("fuse", lambda c, _: replace(c, program=fuse(c.program), unfused=c.program), _show_program),
    # there too; behind fuse, which has put their epilogues into both convolutions
    Stage("separable", lambda c, _: _on_cpu(c, partial(fuse_separable, target=c.target)), _show_program),
    # before the graph: only the schedule knows how much workspace a kernel needs, and the budget counts it
    Stage("schedule", _schedule, _show_scheduled),
    Stage("graph", _read_graph, _show_graph),
    # behind the graph, which tells what the whole network needs; it takes what it cuts up through fuse again
    Stage("tile", _tile, _show_program),
    # partition, insert_copies and reuse_buffers, which depend on each other
    Stage("plan", _plan, _show_plan),
    Stage("verify", _verify, _show_verdict),
    Stage("lower", _lower, _show_lowered),
)
"""From an imported program to a module that code is generated for."""
