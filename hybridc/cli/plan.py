"""Show what runs where, and why: kernels, copies, and memory and time against their proven bounds.

Plans a model, or reads the plan of an artifact. Needs no GPU, and generates no code.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.support.arguments import BUDGET_HELP, add_compile_options, add_gpu_budgets, add_json
from hybridc.cli.support.files import existing_file, measured_to_json, print_json, read_json, write_text
from hybridc.cli.support.planned import plans_of
from hybridc.errors import UsageError
from hybridc.options import parse_effort

if TYPE_CHECKING:
    from hybridc.cli.support.planned import PlanOf
    from hybridc.report.lanes import Span

HELP = "show what runs where, and why"
EXAMPLE = """\
  hybridc plan resnet.onnx --target cuda+avx2 --gpu-memory 50% --all
  hybridc plan resnet.onnx --target cuda+avx2 --gpu-memory 25%,50% --bound-seconds 60
  hybridc plan resnet.hyb --html resnet.html --trace resnet.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="MODEL.onnx|OUT.hyb")
    add_compile_options(parser)
    add_gpu_budgets(
        parser,
        f"{BUDGET_HELP}; a list gives a plan for each budget (default: no limit)",
    )
    parser.add_argument(
        "--bound-seconds",
        type=parse_effort,
        metavar="SECONDS",
        help="effort to tighten the time bound of each plan, in seconds of a nominal machine (default: the"
        " bound that"
        " the search gives)",
    )
    parser.add_argument("--all", action="store_true", help="show every row of long tables")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML page with time, memory and placement"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the predicted run for Perfetto, ui.perfetto.dev"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="TRACE",
        help="also show on that page what `hybridc run --trace TRACE` measured",
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.measured is not None and arguments.html is None:
        remedy = "add --html FILE, or remove --measured"
        raise UsageError("HC500", "--measured requires --html", remedy=remedy)
    found = plans_of(arguments, arguments.bound_seconds)
    if len(found) > 1 and (arguments.html is not None or arguments.trace is not None):
        what = f"--html and --trace show one plan, but there are {len(found)}"
        raise UsageError("HC500", what, remedy="give a single budget")
    _write_files(found[-1], arguments)
    if arguments.json:
        print_json(_to_json(found))
    else:
        from hybridc.report import render_text

        texts = [render_text(each.report(), each.title, everything=arguments.all) for each in found]
        print("\n".join(texts), end="")
    return 0


def _to_json(found: Sequence[PlanOf]) -> dict[str, Any]:
    """The report of the largest budget, and in `plans` those of all of several, the smallest first."""
    from hybridc.report import report_to_json

    reports = [report_to_json(each.report()) for each in found]
    measured = {"measured_us": measured_to_json(found[-1].machine.measured_us)}
    return reports[-1] | measured | ({"plans": reports} if len(reports) > 1 else {})


def _write_files(found: PlanOf, arguments: argparse.Namespace) -> None:
    from hybridc.report.trace import trace_to_json

    if arguments.html is not None:
        from hybridc.report.page import render_page

        measured = _measured(arguments.measured, len(found.plan.steps)) if arguments.measured else None
        write_text(
            arguments.html, render_page(found.graph, found.plan, found.report(), found.title, measured)
        )
    if arguments.trace is not None:
        import json

        write_text(arguments.trace, json.dumps(trace_to_json(found.graph, found.plan)) + "\n")


def _measured(path: Path, step_count: int) -> tuple[Span, ...]:
    """The measured run of a trace. Raises UsageError HC536 if it is none, or one of another plan."""
    from hybridc.report.trace import measured_spans

    data = read_json(existing_file(path, "the trace"))
    try:
        return measured_spans(data, step_count)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            "HC536",
            f"not a measured run of this plan: {error}",
            where=str(path),
            remedy="measure with `hybridc run OUT.hyb --trace FILE`, and show the plan of that artifact;"
            " if it has several, give both commands the same --gpu-memory",
        ) from None
