"""List the ONNX models that hybridc can build, and write one to a file.

They are real networks with seeded random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from hybridc.cli.support.arguments import add_json
from hybridc.cli.support.files import print_json, written_whole
from hybridc.cli.support.terminal import print_text
from hybridc.errors import UsageError
from hybridc.options import format_bytes

HELP = "list the models that hybridc can build, and export one"
EXAMPLE = """\
  hybridc models list
  hybridc models export unet unet.onnx --param seed=7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the models and their parameters", allow_abbrev=False)
    add_json(listing)
    export = actions.add_parser("export", help="write one as an ONNX file", allow_abbrev=False)
    export.add_argument("name", metavar="NAME")
    export.add_argument("file", type=Path, metavar="FILE.onnx")
    export.add_argument(
        "--param",
        type=_split_parameter,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the model; may be repeated",
    )
    export.add_argument(
        "--no-weights",
        dest="weights",
        action="store_false",
        help="write shapes and types of large weights alone, for `hybridc plan --no-weights`",
    )
    add_json(export)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        _list(arguments)
    else:
        _export(arguments)
    return 0


def _list(arguments: argparse.Namespace) -> None:
    from hybridc import models

    if arguments.json:
        print_json(
            [
                {"name": name, "description": models.describe(name), "parameters": models.parameters(name)}
                for name in models.names()
            ]
        )
        return
    for name in models.names():
        parameters = " ".join(f"{key}={value}" for key, value in models.parameters(name).items())
        print_text(f"{name}\n  {models.describe(name)}\n  {parameters}")


def _export(arguments: argparse.Namespace) -> None:
    from hybridc import models

    parameters = _read_parameters(arguments.param, models.parameters(arguments.name))
    with written_whole(arguments.file) as whole:
        models.export(arguments.name, whole, weights=arguments.weights, **parameters)
    size_bytes = arguments.file.stat().st_size
    if arguments.json:
        print_json({"path": str(arguments.file), "size_bytes": size_bytes, "parameters": parameters})
    else:
        print(f"{arguments.file}: {format_bytes(size_bytes)}")


def _split_parameter(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError("HC517", f"invalid parameter {text!r}", remedy="write KEY=VALUE")
    return key, value


def _read_parameters(pairs: list[tuple[str, str]], defaults: dict[str, Any]) -> dict[str, Any]:
    """Values of the type of the parameter's default; unknown names are left to `models` to refuse."""
    return {key: _read_value(key, text, defaults.get(key)) for key, text in pairs}


def _read_value(key: str, text: str, default: Any) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise UsageError(
            "HC517",
            f"invalid value {text!r} for parameter {key!r}",
            remedy=f"it must be of type {type(default).__name__}, for example {key}={default}",
        )
    return value
