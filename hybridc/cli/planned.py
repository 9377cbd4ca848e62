"""The plan that a command is about: of a model, planned now, or of an artifact."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridc.cli.arguments import compile_options
from hybridc.cli.files import existing_file
from hybridc.errors import UsageError
from hybridc.options import FP32, exact_bytes
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.ir import Graph, Plan
    from hybridc.machine import Machine
    from hybridc.options import Budget
    from hybridc.passes.pins import Pins
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


def plan_of(arguments: argparse.Namespace, gpu_memory: Budget | None) -> PlanOf:
    """Plan `arguments.source`, or read its plan if it is an artifact. Raises HybridcError."""
    return _of_artifact(arguments) if arguments.source.is_dir() else _of_model(arguments, gpu_memory)


def _of_model(arguments: argparse.Namespace, gpu_memory: Budget | None) -> PlanOf:
    existing_file(arguments.source, "the model")
    options = compile_options(arguments, () if gpu_memory is None else (gpu_memory,))
    from hybridc.compiler import plan_model
    from hybridc.report.table import plural

    with terminal_progress() as progress:
        planned = plan_model(arguments.source, options, progress)
    title = f"Plan of {arguments.source} for {options.target} on {options.machine.name}"
    if planned.machine.measured_us:
        title += f", with {plural(len(planned.machine.measured_us), 'measured time')}"
    return PlanOf(
        planned.graphs[-1],
        planned.plan,
        planned.machine,
        planned.pins[-1],
        title,
        planned.all_gpu_peak_bytes,
        planned.smallest_budget_bytes,
        planned.smallest_bytes_bound,
    )


def _of_artifact(arguments: argparse.Namespace) -> PlanOf:
    given = arguments.machine or arguments.shape or arguments.dim or arguments.threads
    given = given or arguments.profile_kernels or not arguments.winograd or arguments.pin
    given = given or arguments.precision != FP32
    given = given or arguments.host_memory
    if given or arguments.target != "native":
        raise UsageError(
            "HC516",
            "an artifact's plans are fixed",
            where=str(arguments.source),
            remedy="give options of planning with the ONNX model",
        )
    from hybridc.artifact import open_artifact
    from hybridc.runtime.session import verify_plans

    artifact = open_artifact(arguments.source, check_weights=False, check_host=False)
    verify_plans(artifact)  # reports take names and positions of a plan for granted
    if arguments.gpu_memory is not None:
        artifact = artifact.within(exact_bytes(arguments.gpu_memory))
    title = f"Plan of {arguments.source}"
    if len(artifact.plans) > 1:
        title += f", number {artifact.number + 1} of those for {artifact.budgets}"
    manifest = artifact.manifest
    return PlanOf(artifact.graph, artifact.plan, manifest.machine, artifact.stored_plan.pins, title)
