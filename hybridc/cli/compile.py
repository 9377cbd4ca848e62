"""Compile an ONNX model into an artifact that runs within a GPU memory budget.

The artifact is a folder. It holds the code for the CPU and, if the target has one, the GPU, the
plan of what runs where, and the weights.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.arguments import (
    add_compile_options,
    add_gpu_budgets,
    add_json,
    add_tuning,
    compile_options,
)
from hybridc.cli.files import existing_file, measured_to_json, print_json
from hybridc.cli.training import add_training, check_training, compile_for_training
from hybridc.errors import UsageError
from hybridc.options import format_bytes
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.ir import Graph, Plan
    from hybridc.results import Compiled

HELP = "compile an ONNX model into an artifact"
EXAMPLE = """\
  hybridc compile resnet.onnx -o resnet.hyb --target cuda+avx2 --gpu-memory 64MiB
  hybridc compile resnet.onnx -o resnet.hyb --target cuda+avx2 --gpu-memory 32MiB,64MiB,50%
  hybridc compile net.onnx -o step.hyb --train --loss softmax_cross_entropy --optimizer adam:lr=1e-3"""

_NAMED = 4
"""Nodes of those that stayed in fp32 that the summary names; the JSON document has them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT.hyb",
        help="folder to write; needed unless --stop-after is given",
    )
    add_compile_options(parser)
    add_gpu_budgets(
        parser,
        "GPU bytes never to be exceeded, or a percentage of what the model needs entirely on the GPU; of"
        " several each gets a plan, and a run takes one (default: no limit)",
    )
    add_tuning(parser)
    add_training(parser)
    parser.add_argument("--stop-after", metavar="STAGE", help="end after this stage, and write no artifact")
    parser.add_argument(
        "--dump-ir", type=Path, metavar="DIR", help="write the IR after every stage into a folder"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_file(arguments.model, "the model")
    check_training(arguments)
    if arguments.output is not None and not arguments.train:
        from hybridc.artifact.store import check_destination

        check_destination(arguments.output)
    elif arguments.output is None and arguments.stop_after is None:
        raise UsageError("HC500", "no output is named", remedy="give -o OUT.hyb, or --stop-after STAGE")
    options = compile_options(
        arguments,
        arguments.gpu_memory,
        tune_seconds=arguments.tune,
        tune_record=arguments.tune_record,
        stop_after=arguments.stop_after,
        dump_ir=arguments.dump_ir,
    )
    if arguments.train:
        return compile_for_training(arguments, options)
    from hybridc.compiler import compile_model

    with terminal_progress() as progress:
        compiled = compile_model(arguments.model, arguments.output, options, progress)
    if compiled.path is None:
        _report_stop(compiled, arguments)
    elif arguments.json:
        print_json(compiled_to_json(compiled) | {"target": str(options.target)})
    else:
        print(_summary(compiled, str(options.target)))
    return 0


def compiled_to_json(compiled: Compiled) -> dict[str, Any]:
    """What was compiled, without the tables of the plan report. The compiler went to the end.

    Figures of a plan are those of the largest budget; `plans` has them for each, the smallest first.
    """
    assert compiled.path is not None
    plans = [_plan_to_json(g, plan) for g, plan in zip(compiled.graphs, compiled.plans, strict=True)]
    return {
        "path": str(compiled.path),
        "artifact_bytes": _folder_bytes(compiled.path),
        "seconds": dict(compiled.seconds),
        "functions": len({kernel.function for graph in compiled.graphs for kernel in graph.kernels}),
        "tuned": dict(compiled.tuned),
        "measured_us": measured_to_json(compiled.measured_us),
        "precision": _precisions(compiled.graphs[-1]),
        **plans[-1],
        "plans": plans,
    }


def _precisions(graph: Graph) -> list[dict[str, Any]]:
    """Of kernels for which another precision than fp32 was asked."""
    return [
        {"kernel": k.name, "origins": list(k.origins), "precision": k.precision, "note": k.precision_note}
        for k in graph.kernels
        if k.precision != "fp32" or k.precision_note
    ]


def _plan_to_json(graph: Graph, plan: Plan) -> dict[str, Any]:
    from hybridc.report import report_plan, report_to_json

    report = report_to_json(report_plan(graph, plan))
    return {
        "budget_bytes": report["budget_bytes"],
        "kernels": len(report["kernels"]),
        "copies": len(report["copies"]),
        "copied_bytes": sum(row["size_bytes"] for row in report["copies"]),
        "devices": report["devices"],
        "makespan_us": report["makespan_us"],
    }


def _summary(compiled: Compiled, target: str) -> str:
    from hybridc.report.table import plural

    data = compiled_to_json(compiled)
    kernels = plural(len(compiled.graphs[-1].kernels), "kernel")
    functions = plural(data["functions"], "distinct function")
    lines = [
        f"{compiled.path}: {format_bytes(data['artifact_bytes'])}, for {target}",
        f"  {kernels} ({functions}), compiled in {sum(compiled.seconds.values()):.1f} s",
    ]
    if data["tuned"]:
        lines.append(f"  {plural(len(data['tuned']), 'function')} with a tile that was measured to be faster")
    if data["measured_us"]:
        lines.append(f"  planned with {plural(len(data['measured_us']), 'measured time')}")
    lines += precision_summary(compiled.graphs[-1])
    for plan in data["plans"]:
        if len(data["plans"]) > 1:
            lines.append(f"plan for {format_bytes(plan['budget_bytes'])} of GPU memory:")
        lines += _plan_summary(plan)
    return "\n".join(lines)


def precision_summary(graph: Graph) -> list[str]:
    """Lines that count what multiplies in less than fp32, and name by their reasons the nodes that do not."""
    from hybridc.report.table import plural

    reduced = Counter(kernel.precision for kernel in graph.kernels if kernel.precision != "fp32")
    stayed: dict[str, list[str]] = {}
    for kernel in graph.kernels:
        if kernel.precision_note:
            stayed.setdefault(kernel.precision_note, []).extend(kernel.origins[:1] or (kernel.name,))
    lines = [f"  {plural(count, 'kernel')} in {precision}" for precision, count in sorted(reduced.items())]
    for note, nodes in stayed.items():
        named = ", ".join(nodes[:_NAMED]) + (
            f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        )
        lines.append(f"  {plural(len(nodes), 'kernel')} stayed in fp32, as {note}: {named}")
    return lines


def plan_summary(graph: Graph, plan: Plan) -> list[str]:
    """Lines about one plan."""
    return _plan_summary(_plan_to_json(graph, plan))


def _plan_summary(plan: dict[str, Any]) -> list[str]:
    from hybridc.report.table import format_us, plural

    lines = []
    for row in plan["devices"]:
        budget = f" of {format_bytes(row['budget_bytes'])}" if row["budget_bytes"] is not None else ""
        memory = (
            f"{format_bytes(row['peak_bytes'])}{budget}, lower bound {format_bytes(row['lower_bound_bytes'])}"
        )
        lines.append(f"  {row['device']}: {plural(row['kernels'], 'kernel')}, memory {memory}")
    if plan["copies"]:
        lines.append(f"  {plural(plan['copies'], 'copy', 'copies')} of {format_bytes(plan['copied_bytes'])}")
    return [*lines, f"  predicted run: {format_us(plan['makespan_us'])}"]


def _report_stop(compiled: Compiled, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json({"stopped_after": arguments.stop_after, "seconds": dict(compiled.seconds)})
    else:
        print(f"stopped after {arguments.stop_after}; no artifact was written")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
