"""Show what runs where, and why: kernels, copies, and peak memory against budget and lower bound.

Plans a model, or reads the plan of an artifact. Needs no GPU, and generates no code.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.cli.arguments import add_compile_options, add_gpu_memory, add_json, compile_options
from hybridc.cli.files import existing_file, print_json
from hybridc.errors import UsageError
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.report import Report

HELP = "show what runs where, and why"
EXAMPLE = "  hybridc plan resnet.onnx --target cuda+avx2 --gpu-memory 50% --all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="MODEL.onnx|OUT.hyb")
    add_compile_options(parser)
    add_gpu_memory(parser)
    parser.add_argument("--all", action="store_true", help="show every row of long tables")
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.source.is_dir():
        report, title = _read_artifact(arguments)
    else:
        report, title = _plan_model(arguments)
    if arguments.json:
        from hybridc.report import report_to_json

        print_json(report_to_json(report))
    else:
        from hybridc.report import render_text

        print(render_text(report, title, everything=arguments.all), end="")
    return 0


def _plan_model(arguments: argparse.Namespace) -> tuple[Report, str]:
    existing_file(arguments.source, "the model")
    options = compile_options(arguments, arguments.gpu_memory)
    from hybridc.compiler import plan_model
    from hybridc.report import report_plan

    with terminal_progress() as progress:
        planned = plan_model(arguments.source, options, progress)
    report = report_plan(
        planned.graph, planned.plan, planned.all_gpu_peak_bytes, planned.smallest_budget_bytes
    )
    return report, f"Plan of {arguments.source} for {options.target} on {options.machine.name}"


def _read_artifact(arguments: argparse.Namespace) -> tuple[Report, str]:
    given = arguments.gpu_memory or arguments.machine or arguments.shape or arguments.dim or arguments.threads
    if given or arguments.target != "native" or not arguments.winograd:
        raise UsageError(
            "HC516",
            "an artifact's plan is fixed",
            where=str(arguments.source),
            remedy="give options of planning with the ONNX model",
        )
    from hybridc.artifact import open_artifact
    from hybridc.report import report_plan

    artifact = open_artifact(arguments.source, check_weights=False, check_host=False)
    return report_plan(artifact.graph, artifact.plan), f"Plan of {arguments.source}"
