"""Compile an ONNX model into an artifact that runs within a GPU memory budget.

The artifact is a folder. It holds the code for the CPU and, if the target has one, the GPU, the
plan of what runs where, and the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.cli.support.arguments import (
    BUDGET_HELP,
    add_compile_options,
    add_gpu_budgets,
    add_json,
    add_tuning,
    compile_options,
)
from hybridc.cli.support.files import existing_model, print_json
from hybridc.cli.support.imports import lasting_imports
from hybridc.cli.support.terminal import print_text
from hybridc.cli.support.train_options import add_training, check_training, training_spec
from hybridc.options import missing_output
from hybridc.progress import terminal_progress

if TYPE_CHECKING:
    from hybridc.options import CompileOptions
    from hybridc.results import Compiled

HELP = "compile an ONNX model into an artifact"
EXAMPLE = """\
  hybridc compile net.onnx -o net.hyb --target cuda+avx2 --gpu-memory 64MiB,50%
  hybridc compile net.onnx -o step.hyb --train --loss softmax_cross_entropy"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT.hyb",
        help="folder to write; required without --stop-after",
    )
    add_compile_options(parser)
    add_gpu_budgets(parser, f"{BUDGET_HELP}; a list gives a plan for each (default: no limit)")
    add_json(parser)
    add_tuning(parser)
    add_training(parser)
    debugging = parser.add_argument_group("debugging")
    debugging.add_argument(
        "--stop-after", metavar="STAGE", help="stop after this stage, and write no artifact"
    )
    debugging.add_argument("--dump-ir", type=Path, metavar="DIR", help="folder for the IR after every stage")


def execute(arguments: argparse.Namespace) -> int:
    existing_model(arguments.model)
    check_training(arguments)
    if arguments.output is not None and not arguments.train:
        from hybridc.artifact.store import check_destination

        check_destination(arguments.output)
    elif arguments.output is None and arguments.stop_after is None:
        raise missing_output("give -o OUT.hyb, or --stop-after STAGE")
    options = compile_options(arguments, stop_after=arguments.stop_after, dump_ir=arguments.dump_ir)
    return _compile_training(arguments, options) if arguments.train else _compile(arguments, options)


def _compile(arguments: argparse.Namespace, options: CompileOptions) -> int:
    with lasting_imports():
        from hybridc.cli.support.summary import compiled_summary, compiled_to_json
        from hybridc.compiler import compile_model

    with terminal_progress(quiet=arguments.quiet) as progress:
        compiled = compile_model(arguments.model, arguments.output, options, progress)
    if compiled.path is None:
        _report_stop(compiled, arguments)
    elif arguments.json:
        print_json(compiled_to_json(compiled) | {"target": str(options.target)})
    else:
        print_text(compiled_summary(compiled, str(options.target)))
    return 0


def _compile_training(arguments: argparse.Namespace, options: CompileOptions) -> int:
    with lasting_imports():
        from hybridc.cli.support.summary import training_summary, training_to_json
        from hybridc.training.compile import compile_training

    spec = training_spec(arguments)
    with terminal_progress(quiet=arguments.quiet) as progress:
        made = compile_training(arguments.model, arguments.output, options, spec, progress)
    if arguments.json:
        print_json(training_to_json(made) | {"target": str(options.target)})
    else:
        print_text(training_summary(made, str(options.target)))
    return 0


def _report_stop(compiled: Compiled, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json({"stopped_after": arguments.stop_after, "seconds": dict(compiled.seconds)})
    else:
        print(f"stopped after {arguments.stop_after}; no artifact was written")
