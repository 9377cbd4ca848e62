"""The order of the passes: the list `STAGES`, and nothing else, knows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from hybridc.errors import UsageError
from hybridc.ir import Device, Graph, Plan, Run, Step
from hybridc.ir.plan import plan_to_json
from hybridc.machine import Machine
from hybridc.options import Budget
from hybridc.passes.attention import fuse_attention
from hybridc.passes.canonicalize import canonicalize
from hybridc.passes.fuse import fuse
from hybridc.passes.insert_copies import insert_copies
from hybridc.passes.layout import choose_layout
from hybridc.passes.lower import Lowered, lower
from hybridc.passes.partition import Placement, all_cpu, partition
from hybridc.passes.plan import all_gpu_peak_bytes, assemble
from hybridc.passes.program import Program
from hybridc.passes.read_graph import read_graph
from hybridc.passes.reuse_buffers import reuse_buffers
from hybridc.passes.schedule import Chooser, schedule_functions
from hybridc.passes.separable import fuse_separable
from hybridc.passes.verify import verify
from hybridc.progress import Progress
from hybridc.schedules.registry import Scheduled
from hybridc.targets import Target


@dataclass(frozen=True)
class Compilation:
    """What is known so far: each stage fills in more."""

    program: Program
    target: Target
    machine: Machine
    gpu_memory: Budget | None
    winograd: bool = True
    chooser: Chooser | None = None
    scheduled: dict[tuple[str, Device], Scheduled] | None = None
    graph: Graph | None = None
    budget_bytes: int | None = None
    placement: Placement | None = None
    steps: tuple[Step, ...] | None = None
    plan: Plan | None = None
    lowered: Lowered | None = None

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


def _schedule(c: Compilation, progress: Progress) -> Compilation:
    scheduled = schedule_functions(
        c.program, c.target, progress.kernels, winograd=c.winograd, chooser=c.chooser
    )
    return replace(c, scheduled=scheduled)


def _read_graph(c: Compilation, _: Progress) -> Compilation:
    assert c.scheduled is not None
    return replace(c, graph=read_graph(c.program, c.scheduled))


def _partition(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None
    if not c.target.has_gpu:
        return replace(c, placement=all_cpu(c.graph))
    budget_bytes = c.gpu_memory.resolve(all_gpu_peak_bytes(c.graph)) if c.gpu_memory is not None else None
    return replace(c, budget_bytes=budget_bytes, placement=partition(c.graph, c.machine, budget_bytes))


def _insert_copies(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None and c.placement is not None
    return replace(c, steps=insert_copies(c.graph, c.placement))


def _reuse_buffers(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None and c.steps is not None
    steps, buffers, arenas = reuse_buffers(c.graph, c.steps, c.devices)
    return replace(c, plan=assemble(c.graph, c.machine, c.budget_bytes, steps, buffers, arenas))


def _verify(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None and c.plan is not None
    verify(c.graph, c.plan)
    return c


def _lower(c: Compilation, _: Progress) -> Compilation:
    assert c.graph is not None and c.plan is not None and c.scheduled is not None
    return replace(c, lowered=lower(c.graph, c.plan, c.scheduled, c.target))


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


def _show_placement(c: Compilation) -> tuple[str, str]:
    assert c.graph is not None and c.placement is not None
    lines = [f"{d.value}  {k.name}" for k, d in zip(c.graph.kernels, c.placement, strict=True)]
    return ".txt", "\n".join(lines) + "\n"


def _show_steps(c: Compilation) -> tuple[str, str]:
    assert c.steps is not None
    return ".txt", "".join(f"{i:4}  {_line(step)}\n" for i, step in enumerate(c.steps))


def _line(step: Step) -> str:
    what = step.kernel if isinstance(step, Run) else f"copy {step.tensor}"
    waits = f"  waits for {', '.join(map(str, step.waits))}" if step.waits else ""
    return f"{step.lane.value:4}{what}{waits}"


def _show_plan(c: Compilation) -> tuple[str, str]:
    assert c.plan is not None
    return ".json", _json(plan_to_json(c.plan))


def _show_verdict(c: Compilation) -> tuple[str, str]:
    assert c.plan is not None
    return ".txt", f"accepted: {len(c.plan.steps)} steps, {len(c.plan.buffers)} buffers\n"


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
    Stage("fuse", lambda c, _: replace(c, program=fuse(c.program)), _show_program),
    # there too; behind fuse, which has put their epilogues into both convolutions
    Stage("separable", lambda c, _: _on_cpu(c, partial(fuse_separable, target=c.target)), _show_program),
    # before the graph: only the schedule knows how much workspace a kernel needs, and the budget counts it
    Stage("schedule", _schedule, _show_scheduled),
    Stage("graph", _read_graph, _show_graph),
    Stage("partition", _partition, _show_placement),
    Stage("insert_copies", _insert_copies, _show_steps),
    Stage("reuse_buffers", _reuse_buffers, _show_plan),
    Stage("verify", _verify, _show_verdict),
    Stage("lower", _lower, _show_lowered),
)
"""From an imported program to a module that code is generated for."""
