"""Print a script that completes hybridc's commands, options and files in a shell.

It is made from the commands themselves by shtab: pip install 'hybridc[completion]'. Write it to where the
shell looks for such scripts, and again after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from hybridc.cli.support.terminal import print_text
from hybridc.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
HELP = "print a script that completes commands and options in a shell"
EXAMPLE = """\
  hybridc completion bash
  hybridc completion zsh"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def execute(arguments: argparse.Namespace) -> int:
    from hybridc.cli.main import build_parser

    try:
        import shtab
    except ImportError:
        what, remedy = "completion needs the package shtab", "pip install 'hybridc[completion]'"
        raise UsageError("HC585", what, remedy=remedy) from None
    parser, _ = build_parser()
    for action in _actions(parser):
        if action.type is Path:
            vars(action)["complete"] = shtab.FILE  # what shtab looks for
    print_text(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
