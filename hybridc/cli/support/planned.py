"""The plans that a command is about: of a model, planned now, or of an artifact."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridc.cli.support.arguments import compile_options, given_options
from hybridc.cli.support.files import existing_file
from hybridc.errors import UsageError
from hybridc.options import exact_bytes, format_bytes
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.artifact.load import Artifact
    from hybridc.ir import Graph, Plan
    from hybridc.machine import Machine
    from hybridc.passes.planner.model.pins import Pins
    from hybridc.report import Report


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
        )


def plans_of(arguments: argparse.Namespace, bound_seconds: float | None = None) -> tuple[PlanOf, ...]:
    """Plan `arguments.source`, or read its plans if it is an artifact: one per budget, smallest first.

    Without `--gpu-memory` it is one plan, of an artifact that of the largest budget. `bound_seconds` is
    effort to tighten the bound of each plan of a model. Raises HybridcError.
    """
    if arguments.source.is_dir():
        return _of_artifact(arguments, bound_seconds)
    return _of_model(arguments, bound_seconds)


def _of_model(arguments: argparse.Namespace, bound_seconds: float | None) -> tuple[PlanOf, ...]:
    existing_file(arguments.source, "the model")
    options = compile_options(arguments)
    from hybridc.compiler import plan_model
    from hybridc.report.table import plural

    with terminal_progress() as progress:
        planned = plan_model(arguments.source, options, progress, bound_seconds=bound_seconds)
    title = f"Plan of {arguments.source} for {options.target} on {options.machine.name}"
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
        )
        for graph, plan, pins in zip(planned.graphs, planned.plans, planned.pins, strict=True)
    )


def _of_artifact(arguments: argparse.Namespace, bound_seconds: float | None) -> tuple[PlanOf, ...]:
    given = given_options(arguments)
    budgets = given.pop("gpu_memory", ())
    if given or bound_seconds is not None:
        raise UsageError(
            "HC516",
            "an artifact's plans are fixed",
            where=str(arguments.source),
            remedy="planning options apply to ONNX models only",
        )
    from hybridc.artifact import open_artifact
    from hybridc.runtime.session import verify_plans

    artifact = open_artifact(arguments.source, check_weights=False, check_host=False)
    verify_plans(artifact)  # reports take names and positions of a plan for granted
    chosen = {a.number: a for a in (artifact.within(exact_bytes(budget)) for budget in budgets)}
    return tuple(_stored(arguments, chosen[number]) for number in sorted(chosen)) or (
        _stored(arguments, artifact),
    )


def _stored(arguments: argparse.Namespace, artifact: Artifact) -> PlanOf:
    title = f"Plan of {arguments.source}"
    if len(artifact.plans) > 1:
        title += f", {artifact.number + 1} of {len(artifact.plans)}, for the budgets {artifact.budgets}"
    return PlanOf(artifact.graph, artifact.plan, artifact.manifest.machine, artifact.stored_plan.pins, title)
