"""Tell everything for which a model would be refused, node by node, without compiling it.

`compile` ends at the first refusal. Exit code 0 says that the model is taken, 3 that it is not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.cli.support.arguments import (
    add_json,
    add_model_options,
    add_no_weights,
    add_target,
    compile_options,
)
from hybridc.cli.support.files import existing_model, print_json
from hybridc.cli.support.imports import lasting_imports
from hybridc.cli.support.terminal import print_text
from hybridc.errors import ModelError

HELP = "tell everything for which a model would be refused"
EXAMPLE = "  hybridc check net.onnx --dim batch=1 --target cuda+avx2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    add_target(parser)
    add_model_options(parser)
    add_no_weights(parser)
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_model(arguments.model)
    options = compile_options(arguments)
    with lasting_imports():
        from hybridc.compiler import check_model
        from hybridc.report.table import plural

    found = check_model(arguments.model, options)
    if arguments.json:
        refusals = [
            {"code": error.code, "what": error.what, "where": error.where, "remedy": error.remedy}
            for error in found
        ]
        print_json({"model": str(arguments.model), "target": str(options.target), "refusals": refusals})
    elif found:
        print_text("\n".join([*map(str, found), f"{plural(len(found), 'refusal')}."]))
    else:
        print_text(f"{arguments.model} is taken for {options.target}.")
    return ModelError.exit_code if found else 0
