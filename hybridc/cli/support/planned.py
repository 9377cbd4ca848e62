"""The plans that a command is about: of a model, planned now, or of an artifact."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.cli.support.arguments import check_sizes, compile_options, given_options
from hybridc.cli.support.files import existing_model
from hybridc.cli.support.imports import lasting_imports
from hybridc.cli.support.interrupts import deferred_interrupts
from hybridc.cli.support.train_options import PROGRAMS, check_training, training_spec
from hybridc.errors import UsageError
from hybridc.options import exact_bytes, format_bytes
from hybridc.progress import terminal_progress
from hybridc.sizes import union_text

if TYPE_CHECKING:
    from hybridc.artifact.load import Artifact
    from hybridc.ir import Graph, Plan
    from hybridc.machine import Machine
    from hybridc.options import CompileOptions, Size
    from hybridc.passes.planner.model.pins import Pins
    from hybridc.passes.planner.watch import PlanningTime
    from hybridc.report import Report
    from hybridc.report.buckets import BucketRow
    from hybridc.results import Planned

_PROGRAM = {
    "step": "the training step",
    "evaluate": "the evaluation",
    "accumulate": "the accumulation",
    "update": "the update",
}


@dataclass(frozen=True, slots=True)
class CudaCode:
    """The code for GPUs that an artifact has."""

    architectures: tuple[str, ...]
    """With machine code of their own; newer ones take PTX of the oldest."""
    image_bytes: int

    def __str__(self) -> str:
        return f"{format_bytes(self.image_bytes)} of GPU code for {', '.join(self.architectures)} and newer"


@dataclass(frozen=True)
class PlanOf:
    """A plan, and what it was made for."""

    graph: Graph
    plan: Plan
    machine: Machine
    pins: Pins
    title: str
    all_gpu_peak_bytes: int | None = None
    smallest_budget_bytes: int | None = None
    smallest_bytes_bound: int | None = None
    program: str | None = None
    """Of a training step, the one that is planned."""
    code: CudaCode | None = None
    """Of an artifact with code for GPUs."""
    planning: PlanningTime | None = None
    """What the search took, where it was made now."""
    buckets: tuple[BucketRow, ...] = ()
    """With open dimensions what all plans take, of which this is that of one bucket."""
    whole: Graph | None = None
    """The network with no kernel cut up."""

    def report(self) -> Report:
        from hybridc.report import report_plan

        return report_plan(
            self.graph,
            self.plan,
            self.all_gpu_peak_bytes,
            self.smallest_budget_bytes,
            self.smallest_bytes_bound,
            machine=self.machine,
            pins=self.pins,
            whole=self.whole,
        )


def plans_of(
    arguments: argparse.Namespace,
    bound_seconds: float | None = None,
    *,
    programs: Collection[str] = PROGRAMS,
) -> tuple[PlanOf, ...]:
    """Plan `arguments.source`, or read its plans if it is an artifact: one per budget, smallest first.

    Without `--gpu-memory` it is one plan, of an artifact that of the largest budget. Of a training step, such
    plans of each of `programs`, or of `--program`. `bound_seconds` is effort to tighten the bound of each
    plan of a model. Raises HybridcError.
    """
    check_training(arguments)
    wanted = (arguments.program,) if arguments.program else programs
    if not arguments.source.is_dir():
        return _of_model(arguments, wanted, bound_seconds)
    from hybridc.training.artifact import is_training_artifact, open_training

    if not is_training_artifact(arguments.source):
        _check_program(arguments)
        return _of_artifact(arguments, bound_seconds)
    found = open_training(arguments.source).programs
    return tuple(
        plan
        for name in _existing(found, wanted, arguments)
        for plan in _of_artifact(arguments, bound_seconds, name)
    )


def _check_program(arguments: argparse.Namespace) -> None:
    if arguments.program is not None:
        what = "--program is for training steps"
        remedy = "remove it, or plan a training step with --train"
        raise UsageError("HC525", what, where=str(arguments.source), remedy=remedy)


def _existing(found: Collection[str], wanted: Collection[str], arguments: argparse.Namespace) -> list[str]:
    """Those that are `wanted` of the programs that there are."""
    chosen = [name for name in found if name in wanted]
    if not chosen:
        what = f"the training step has no program {arguments.program!r}"
        remedy = f"its programs are {', '.join(found)}; accumulate and update are made by --accumulate"
        raise UsageError("HC525", what, where=str(arguments.source), remedy=remedy)
    return chosen


def _of_model(
    arguments: argparse.Namespace, wanted: Collection[str], bound_seconds: float | None
) -> tuple[PlanOf, ...]:
    existing_model(arguments.source)
    options = compile_options(arguments)
    if not arguments.train:
        _check_program(arguments)
        with lasting_imports():
            from hybridc.compiler import plan_model

        with terminal_progress(quiet=arguments.quiet) as progress:
            planned = plan_model(
                arguments.source,
                options,
                progress,
                bound_seconds=bound_seconds,
                listening=deferred_interrupts,
            )
        return _plans(arguments, options, planned)
    with lasting_imports():
        from hybridc.training.compile import plan_training

    spec = training_spec(arguments)
    _existing(PROGRAMS if spec.accumulate > 1 else PROGRAMS[:2], wanted, arguments)
    with terminal_progress(quiet=arguments.quiet) as progress:
        found = plan_training(
            arguments.source, options, spec, progress, wanted=wanted, bound_seconds=bound_seconds
        )
    return tuple(plan for name, made in found.items() for plan in _plans(arguments, options, made, name))


def _plans(
    arguments: argparse.Namespace, options: CompileOptions, planned: Planned, program: str | None = None
) -> tuple[PlanOf, ...]:
    from hybridc.report.buckets import BucketRow
    from hybridc.report.table import plural

    what = _described(arguments.source, program)
    title = f"Plan of {what} for {options.target.of_each[-1]} on {options.machine.name}"
    if planned.machine.measured_us:
        title += f", with {plural(len(planned.machine.measured_us), 'measured time')}"
    return tuple(
        PlanOf(
            graph,
            plan,
            planned.machine,
            pins,
            title if len(planned.plans) == 1 else f"{title}, budget {format_bytes(plan.budget_bytes or 0)}",
            planned.all_gpu_peak_bytes,
            planned.smallest_budget_bytes,
            planned.smallest_bytes_bound,
            program,
            planning=planned.planning,
            buckets=tuple(
                BucketRow.of(each.sizes, each.plans[i], is_shown=each is planned.buckets[-1])
                for each in planned.buckets
            ),
            whole=planned.whole,
        )
        for i, (graph, plan, pins) in enumerate(zip(planned.graphs, planned.plans, planned.pins, strict=True))
    )


def _described(source: Path, program: str | None) -> str:
    return str(source) if program is None else f"{_PROGRAM[program]} of {source}"


def _of_artifact(
    arguments: argparse.Namespace, bound_seconds: float | None, program: str | None = None
) -> tuple[PlanOf, ...]:
    given = given_options(arguments)
    budgets, sizes = given.pop("gpu_memory", ()), dict(given.pop("dims", ()))
    if given or bound_seconds is not None or arguments.train:
        raise UsageError(
            "HC516",
            "an artifact's plans are fixed",
            where=str(arguments.source),
            remedy="planning options apply to ONNX models only",
        )
    from hybridc.artifact import open_artifact
    from hybridc.runtime.session import verify_plans

    path = arguments.source / (program or "")
    artifact = open_artifact(path, check_weights=False, check_host=False)
    verify_plans(artifact)  # reports take names and positions of a plan for granted
    chosen = {a.number: a for a in (artifact.within(exact_bytes(budget)) for budget in budgets)}
    shown = [chosen[number] for number in sorted(chosen)] or [artifact]
    return tuple(_stored(arguments, _of_sizes(each, sizes), program) for each in shown)


def _of_sizes(artifact: Artifact, sizes: Mapping[str, Size]) -> Artifact:
    """With the plan for these sizes of open dimensions, the largest of those that are not given. Raises
    UsageError HC512 for an unknown dimension, HC554 for a size that there is no plan for."""
    if not sizes:
        return artifact
    of_each = artifact.in_buckets()
    names = [each.name for each in artifact.manifest.dimensions]
    check_sizes(names, sizes)
    largest = of_each[-1].interface.sizes
    wanted = [sizes.get(name, each.high) for name, each in zip(names, largest, strict=True)]
    for each in of_each:
        pairs = zip(wanted, each.interface.sizes, strict=True)
        if all(isinstance(size, int) and size in interval for size, interval in pairs):
            return each
    ranges = {name: union_text(each.interface.sizes[i] for each in of_each) for i, name in enumerate(names)}
    what = f"there is no plan for {' and '.join(f'{name}={size}' for name, size in sizes.items())}"
    remedy = f"sizes are {', '.join(f'{name}={text}' for name, text in ranges.items())}"
    raise UsageError("HC554", what, where=str(artifact.path), remedy=remedy)


def _stored(arguments: argparse.Namespace, artifact: Artifact, program: str | None) -> PlanOf:
    from hybridc.report.buckets import BucketRow

    title = f"Plan of {_described(arguments.source, program)}"
    manifest = artifact.manifest
    budgets = len(artifact.plans) // len(manifest.interfaces)
    if budgets > 1:
        title += f", {artifact.number % budgets + 1} of {budgets}, for the budgets {artifact.budgets}"
    names = [each.name for each in manifest.dimensions]
    code = None
    if manifest.cuda_image_bytes is not None:
        code = CudaCode(manifest.cuda_architectures, manifest.cuda_image_bytes)
        title += f", with {code}"
    return PlanOf(
        artifact.graph,
        artifact.plan,
        manifest.machine,
        artifact.stored_plan.pins,
        title,
        program=program,
        code=code,
        buckets=tuple(
            BucketRow.of(
                dict(zip(names, each.interface.sizes, strict=True)),
                each.plan,
                is_shown=each.number == artifact.number,
            )
            for each in artifact.in_buckets()
            if names
        ),
    )
