"""The order of the passes: the list `STAGES`, and nothing else, knows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from hybridc.errors import UsageError
from hybridc.ir import Device, Graph, Plan
from hybridc.ir.plan import plan_to_json
from hybridc.ir.verify import verify
from hybridc.machine import Machine
from hybridc.options import BF16, BF16_ERROR, FP32, INT8, Budget
from hybridc.passes.canonicalize.canonicalize import canonicalize
from hybridc.passes.fuse.attention import fuse_attention
from hybridc.passes.fuse.fuse import fuse
from hybridc.passes.fuse.separable import fuse_separable
from hybridc.passes.fuse.working_set import kernel_groups
from hybridc.passes.layout.layout import choose_layout
from hybridc.passes.lower.lower import Lowered, lower
from hybridc.passes.planner.choose_tilings import Tiling, choose_tilings
from hybridc.passes.planner.make_plans import make_plans
from hybridc.passes.planner.model.pins import carried_pins, resolve_pins
from hybridc.passes.planner.search.partition import Effort, all_gpu_peak_bytes
from hybridc.passes.precision.precision import Errors, mark_integers, reduce_precision
from hybridc.passes.precision.quantized import QUANTIZED_RULES
from hybridc.passes.program.prim_funcs import FunctionTable
from hybridc.passes.program.program import Program
from hybridc.passes.read_graph import read_graph
from hybridc.passes.schedule import Chooser, schedule_functions
from hybridc.passes.tiling.tile import tile
from hybridc.progress import Progress
from hybridc.schedules.rule import Scheduled
from hybridc.targets import DEFAULT_THREADS, Target

TILINGS = 6
"""Halvings of what the model needs to which its kernels may be cut up."""
MOST_KERNELS = 500
"""Networks cut up into more are not tried: planning them takes minutes, and launches their time."""

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
    carried: tuple[tuple[int, int], ...] = ()
    """Inputs and outputs, by position, of which a run takes what the run before made."""
    host_bytes: int | None = None
    """What a plan may hold in the host's memory; None: no limit."""
    winograd: bool = True
    threads: int = DEFAULT_THREADS
    """Of the CPU, that share the tasks of a kernel."""
    precision: str = FP32
    bf16_error: float = BF16_ERROR
    """How much rounding factors may change a kernel's result, as a fraction of it."""
    rounding: Errors | None = None
    """Measures that; needed for bf16."""
    chooser: Chooser | None = None
    profiler: Profiler | None = None
    """Measures what the planner takes instead of the machine's speeds; None: nothing is measured."""
    unfused: Program | None = None
    """What `fuse` began with."""
    functions: FunctionTable = field(default_factory=FunctionTable)
    """Those of the network whole and cut up, as the next two."""
    scheduled: Mapping[tuple[str, Device], Scheduled] | None = None
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By the names of the tensors."""
    graph: Graph | None = None
    """Of the whole network."""
    all_gpu_peak_bytes: int = 0
    """What the model needs entirely on the GPU, in whole kernels; 0 without a GPU."""
    tilings: tuple[Tiling, ...] = ()
    """What is planned: the whole network, and ways of cutting it up."""
    plans: tuple[Plan, ...] = ()
    """One for each distinct budget, smallest first."""
    chosen: tuple[Tiling, ...] = ()
    """What each plan is of."""
    lowered: Lowered | None = None

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


def _choose_layout(c: Compilation, program: Program) -> Program:
    return choose_layout(program, c.target.isa, QUANTIZED_RULES if c.precision == INT8 else ())


def _fuse(c: Compilation, _: Progress) -> Compilation:
    return replace(c, program=fuse(c.program, c.functions), unfused=c.program)


def _separable(c: Compilation, _: Progress) -> Compilation:
    return _on_cpu(c, partial(fuse_separable, target=c.target, threads=c.threads))


def _precision(c: Compilation, _: Progress) -> Compilation:
    if c.precision == INT8:
        return replace(c, program=mark_integers(c.program))
    if c.precision != BF16:
        return c
    assert c.rounding is not None
    program = reduce_precision(
        c.program, c.target, c.bf16_error, c.rounding, winograd=c.winograd, threads=c.threads
    )
    return replace(c, program=program)


def _schedule(c: Compilation, progress: Progress) -> Compilation:
    known = c.scheduled or {}
    scheduled = schedule_functions(
        c.program,
        c.target,
        progress.kernels,
        winograd=c.winograd,
        threads=c.threads,
        chooser=c.chooser,
        known=known,
    )
    return replace(c, scheduled={**known, **scheduled}, weights={**c.weights, **c.program.weights})


def _read_graph(c: Compilation, _: Progress) -> Compilation:
    assert c.scheduled is not None
    return replace(c, graph=read_graph(c.program, c.scheduled, c.carried))


def _tile(c: Compilation, progress: Progress) -> Compilation:
    """Cut large kernels up in several ways, and keep those that are predicted to pay for some budget."""
    assert c.graph is not None
    whole = Tiling(c.graph, resolve_pins(c.graph, c.pins))
    c = replace(c, tilings=(whole,))
    if not c.target.has_gpu:
        return c
    c = replace(c, all_gpu_peak_bytes=all_gpu_peak_bytes(whole.graph, c.machine))
    if not c.gpu_memory:
        return c
    c = _cut_up(c, progress)
    tilings = choose_tilings(
        c.tilings, c.machine, c.all_gpu_peak_bytes, max(c.budgets), c.effort, c.host_bytes
    )
    return replace(c, tilings=tilings)


def _cut_up(c: Compilation, progress: Progress) -> Compilation:
    """With the network cut up to halves, quarters, ... of what it needs, as far as budgets may use it."""
    assert c.unfused is not None
    whole, done = c.tilings[0], c
    if len(whole.graph.kernels) > MOST_KERNELS:
        return c
    found: list[Tiling] = []
    for limit_bytes in sorted(c.all_gpu_peak_bytes >> k for k in range(1, TILINGS)):
        program = tile(c.unfused, limit_bytes)
        if program is c.unfused or (found and limit_bytes > max(c.budgets)):
            break
        if sum(not group.is_view for group in kernel_groups(program)) > MOST_KERNELS:
            continue
        done = _to_graph(replace(done, program=program), progress)
        assert done.graph is not None
        pins = carried_pins(whole.graph, whole.pins, done.graph)
        if pins is not None:
            found.append(Tiling(done.graph, pins, limit_bytes))
    tilings = (whole, *reversed(found))
    return replace(c, tilings=tilings, scheduled=done.scheduled, weights=done.weights)


def _to_graph(c: Compilation, progress: Progress) -> Compilation:
    """From the program before `fuse` to the graph."""
    for stage in STAGES[_position("fuse") : _position("graph") + 1]:
        c = stage.run(c, progress)
    return c


def _profile(c: Compilation) -> Compilation:
    assert c.scheduled is not None
    if c.profiler is None:
        return c
    called = {kernel.function for tiling in c.tilings for kernel in tiling.graph.kernels}
    scheduled = {key: made for key, made in c.scheduled.items() if key[0] in called}
    return replace(c, machine=replace(c.machine, measured_us=c.profiler(scheduled)))


def _plan(c: Compilation, progress: Progress) -> Compilation:
    c = _profile(c)
    found = make_plans(
        c.tilings,
        c.machine,
        c.budgets,
        c.devices,
        effort=c.effort,
        host_bytes=c.host_bytes,
        report=progress.kernels,
    )
    return replace(c, chosen=tuple(t for t, _ in found), plans=tuple(plan for _, plan in found))


def _verify(c: Compilation, _: Progress) -> Compilation:
    for tiling, plan in zip(c.chosen, c.plans, strict=True):
        verify(tiling.graph, plan)
    return c


def _lower(c: Compilation, _: Progress) -> Compilation:
    assert c.scheduled is not None
    graphs = [tiling.graph for tiling in c.chosen]
    return replace(c, lowered=lower(graphs, c.plans, c.scheduled, c.target))


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


def _show_tilings(c: Compilation) -> tuple[str, str]:
    return ".json", _json([asdict(tiling) for tiling in c.tilings])


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
    Stage("layout", lambda c, _: _on_cpu(c, partial(_choose_layout, c)), _show_program),
    Stage("fuse", _fuse, _show_program),
    # there too; behind fuse, which has put their epilogues into both convolutions
    Stage("separable", _separable, _show_program),
    # behind fuse and separable, which decide what a kernel is
    Stage("precision", _precision, _show_program),
    # before the graph: only the schedule knows how much workspace a kernel needs, and the budget counts it
    Stage("schedule", _schedule, _show_scheduled),
    Stage("graph", _read_graph, _show_graph),
    # behind the graph, which tells what the whole network needs; it takes what it cuts up through fuse again
    Stage("tile", _tile, _show_tilings),
    # partition, insert_copies and reuse_buffers, which depend on each other
    Stage("plan", _plan, _show_plan),
    Stage("verify", _verify, _show_verdict),
    Stage("lower", _lower, _show_lowered),
)
"""From an imported program to a module that code is generated for."""
