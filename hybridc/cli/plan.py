"""Show what runs where, and why: kernels, copies, and memory and time against their proven bounds.

Plans a model, or reads the plan of an artifact; of a training step, the plan of each of its programs.
Needs no GPU, and generates no code.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.support.arguments import (
    BUDGET_HELP,
    add_compile_options,
    add_gpu_budgets,
    add_json,
    add_no_weights,
)
from hybridc.cli.support.files import existing_file, measured_to_json, print_json, read_json, write_text
from hybridc.cli.support.planned import plans_of
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.cli.support.train_options import add_training
from hybridc.errors import UsageError
from hybridc.options import Budget, parse_effort

if TYPE_CHECKING:
    from hybridc.cli.support.planned import PlanOf
    from hybridc.report.trace import MeasuredRun

HELP = "show what runs where, and why"
EXAMPLE = """\
  hybridc plan resnet.onnx --target cuda+avx2 --gpu-memory 25%,50%
  hybridc plan resnet.hyb --html resnet.html
  hybridc plan open.hyb --dim batch=1 --dim sequence=100
  hybridc plan net.onnx --train --loss softmax_cross_entropy"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="MODEL.onnx|OUT.hyb", help="a model or an artifact")
    add_compile_options(parser)
    add_no_weights(parser)
    add_gpu_budgets(parser, f"{BUDGET_HELP}; a list gives a plan for each (default: no limit)")
    parser.add_argument("--all", action="store_true", help="show every row of long tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="page with time, memory and placement")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="TRACE",
        help="show on that page also what `hybridc run --trace TRACE` measured",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="the predicted run for Perfetto, ui.perfetto.dev"
    )
    add_json(parser)
    parser.add_argument_group("bound").add_argument(
        "--bound-seconds",
        type=parse_effort,
        metavar="SECONDS",
        help="effort to tighten the bound on the time of each plan (default: what the search gives)",
    )
    add_training(parser, program="all; for --html and --trace, step")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.measured is not None and arguments.html is None:
        remedy = "add --html FILE, or remove --measured"
        raise UsageError("HC500", "--measured requires --html", remedy=remedy)
    measured = None if arguments.measured is None else _measured(arguments.measured)
    found = _plans(arguments, measured)
    drawn = _of_first_program(found)
    if len(drawn) > 1 and (arguments.html is not None or arguments.trace is not None):
        what = f"--html and --trace show one plan, but there are {len(drawn)}"
        raise UsageError("HC500", what, remedy="give a single budget")
    _write_files(drawn[-1], arguments, measured)
    if arguments.json:
        print_json(_all_to_json(found))
    else:
        from hybridc.report import render_text

        width = output_width()
        texts = [
            render_text(each.report(), each.title, everything=arguments.all, width=width) for each in found
        ]
        print_text("\n".join(texts))
        if found[-1].buckets:
            print_text("\n".join(_bucket_lines(found[-1])) + "\n")
        if found[-1].planning is not None:
            from hybridc.report.planning import planning_text

            print_text(planning_text(found[-1].planning) + "\n")
    return 0


def _bucket_lines(found: PlanOf) -> list[str]:
    """A table of all buckets of sizes."""
    from hybridc.options import format_bytes
    from hybridc.report.table import Column, format_us, render_table

    names = list(found.buckets[0].sizes)
    columns = [*(Column(name, numeric=True) for name in names)]
    columns += [Column(each, numeric=True) for each in ("GPU memory", "host memory", "predicted run")]
    rows = [
        [
            *(str(row.sizes[name]) for name in names),
            format_bytes(row.gpu_bytes),
            format_bytes(row.cpu_bytes),
            format_us(row.predicted_us),
        ]
        for row in found.buckets
    ]
    shown = next(row.text for row in found.buckets if row.is_shown)
    return [
        "",
        f"Sizes; the plan above is that of {shown}",
        *("  " + line for line in render_table(columns, rows)),
    ]


def _of_first_program(found: Sequence[PlanOf]) -> list[PlanOf]:
    """Of a training step, the plans that --html and --trace are about; else all."""
    return [each for each in found if each.program == found[0].program]


def _all_to_json(found: Sequence[PlanOf]) -> dict[str, Any]:
    """As `_to_json`; of a training step in `programs`, for each of them by its name."""
    programs = dict.fromkeys(each.program for each in found)
    if None in programs:
        return _to_json(found)
    return {"programs": {name: _to_json([p for p in found if p.program == name]) for name in programs}}


def _to_json(found: Sequence[PlanOf]) -> dict[str, Any]:
    """The report of the largest budget, and in `plans` those of all of several, the smallest first."""
    from hybridc.report import report_to_json

    reports = [report_to_json(each.report()) for each in found]
    code = found[-1].code
    described = {
        "measured_us": measured_to_json(found[-1].machine.measured_us),
        "cuda": None if code is None else asdict(code),
        "planning": None if found[-1].planning is None else asdict(found[-1].planning),
    }
    buckets = [asdict(row) for row in found[-1].buckets]
    several = ({"plans": reports} if len(reports) > 1 else {}) | ({"buckets": buckets} if buckets else {})
    return reports[-1] | described | several


def _write_files(found: PlanOf, arguments: argparse.Namespace, measured: MeasuredRun | None) -> None:
    from hybridc.report.trace import trace_to_json

    if arguments.html is not None:
        from hybridc.report.page import render_page

        page = render_page(found.graph, found.plan, found.report(), found.title, measured, found.buckets)
        write_text(arguments.html, page)
    if arguments.trace is not None:
        import json

        write_text(arguments.trace, json.dumps(trace_to_json(found.graph, found.plan)) + "\n")


def _measured(path: Path) -> MeasuredRun:
    """The measured run of a trace. Raises UsageError HC536 if it has none."""
    from hybridc.report.trace import measured_run

    data = read_json(existing_file(path, "the trace"))
    try:
        return measured_run(data)
    except (AttributeError, KeyError, TypeError):
        raise _refuse_trace(path, "it is no trace of hybridc") from None
    except ValueError as error:
        raise _refuse_trace(path, error) from None


def _plans(arguments: argparse.Namespace, measured: MeasuredRun | None) -> tuple[PlanOf, ...]:
    """The plans to show. Of an artifact's several, unless a budget is given, that which was measured.

    Raises UsageError HC536 if it is not among them.
    """
    is_chosen = measured is not None and arguments.source.is_dir() and "gpu_memory" not in arguments
    if is_chosen and measured is not None and measured.budget_bytes is not None:
        arguments.gpu_memory = (Budget(size_bytes=measured.budget_bytes),)
    try:
        found = plans_of(arguments, arguments.bound_seconds)
    except UsageError as error:
        if not is_chosen or error.code != "HC558":
            raise
        raise _refuse_trace(arguments.measured, error.what) from None
    if measured is not None:
        try:
            measured.check_is_of(_of_first_program(found)[-1].plan)
        except ValueError as error:
            raise _refuse_trace(arguments.measured, error) from None
    return found


def _refuse_trace(path: Path, why: object) -> UsageError:
    return UsageError(
        "HC536",
        f"not a measured run of this plan: {why}",
        where=str(path),
        remedy="measure with `hybridc run OUT.hyb --trace FILE`, and show the plan of that artifact",
    )
