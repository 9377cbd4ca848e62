"""`main`: find the command, run it, and end with the exit code of what happened."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import re
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from hybridc.cli.support.files import NO_SPACE
from hybridc.cli.support.interrupts import exit_code, noted_interrupts
from hybridc.cli.support.suggest import did_you_mean
from hybridc.errors import HybridcError, InternalError, ModelWarning, UsageError, out_of_memory

COMMANDS = (
    *(
        "compile",
        "run",
        "serve",
        "generate",
        "group",
        "bench",
        "bundle",
        "sign",
        "verify",
        "check",
        "plan",
        "explain",
        "sweep",
        "compare",
        "train",
    ),
    *("models", "machine", "completion"),
)
EXIT_BROKEN_PIPE = 141
TRACEBACK_VARIABLE = "HYBRIDC_TRACEBACK"

_EPILOG = """\
A first tour:
  hybridc models export resnet resnet.onnx
  hybridc plan resnet.onnx --target cuda+avx2 --gpu-memory 50%
  hybridc compile resnet.onnx -o resnet.hyb --target cuda+avx2 --gpu-memory 50%
  hybridc run resnet.hyb --random --emulate-gpu 1G

Exit codes: 0 done, 1 internal error or failed comparison, 2 usage error, 3 model or artifact refused,
4 no plan fits the budget, 5 missing device or instruction set.
"""
_FILE_ERRORS = NO_SPACE | frozenset(
    {
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EISDIR,
    }
)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the terminal's width; indented lines, such as commands, stay as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns, 100))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if "\n  " in p else textwrap.fill(p, width) for p in paragraphs) + "\n"


class _Parser(argparse.ArgumentParser):
    """Reports wrong use as a `UsageError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("HC500", message, remedy=self._example(message) or f"see {self.prog} -h")

    def _example(self, message: str) -> str:
        """How to write an option that lacks its value."""
        missing = re.match(r"argument (?:-\w/)?(\S+): expected one argument", message)
        action = self._option_string_actions.get(missing[1]) if missing else None
        return f"write for example {missing[1]} {action.metavar}" if missing and action else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors go to standard error, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    interrupts: list[int] = []
    try:
        with noted_interrupts() as interrupts, _shown_warnings():
            code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        print(end="", flush=True)  # there may be no sys.stdout
        return exit_code(interrupts) if interrupts else code
    except KeyboardInterrupt:
        return exit_code(interrupts)
    except BrokenPipeError:
        _close_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        shown = _as_hybridc_error(error)
        print(shown, file=sys.stderr)
        return shown.exit_code


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """What the model is warned of is a line of its own; other warnings are shown as Python does."""
    show = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **others: Any) -> None:
        if issubclass(category, ModelWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            show(message, category, *where, **others)

    with warnings.catch_warnings():
        warnings.showwarning = shown
        yield


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and that of every command."""
    parser = _Parser(
        prog="hybridc",
        usage="hybridc COMMAND ...",
        description="Compile ONNX models for a GPU too small for them, together with the CPU beside it."
        " `hybridc COMMAND -h` shows a command's options.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog=parser.prog)
    of_command: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        module = _module(name)
        assert module.__doc__ is not None
        command = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__.strip(),
            allow_abbrev=False,
        )
        module.add_arguments(command)
        _simplify(command, module.EXAMPLE)
        of_command[name] = command
    return parser, of_command


def _simplify(command: argparse.ArgumentParser, example: str) -> None:
    """Give a command, and each of its actions, a short usage and its examples."""
    lines = [line for line in example.splitlines() if f" {command.prog} " in line]
    command.usage = _usage(command)
    command.epilog = "\n".join(["Example:", *lines])
    command.formatter_class = _Formatter
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                _simplify(subcommand, example)


def _usage(command: argparse.ArgumentParser) -> str:
    """The command with what it cannot do without; all its options would take ten lines."""
    words = [
        f"{action.option_strings[-1]} {action.metavar}" if action.option_strings else str(action.metavar)
        for action in command._actions
        if action.required
    ]
    return " ".join([command.prog, *words, "[OPTIONS]"])


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"hybridc.cli.{command}")


def _dispatch(argv: list[str]) -> int:
    _check_command(argv)
    parser, of_command = build_parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except SystemExit:  # -h has printed its text
        return 0
    if arguments.version:
        from importlib.metadata import version

        print(f"hybridc {version('hybridc')}")
        return 0
    if unknown:
        raise _unknown_arguments(unknown, of_command.get(arguments.command, parser))
    if arguments.command is None:
        parser.print_help()
        return 0
    code: int = _module(arguments.command).execute(arguments)
    return code


def _check_command(argv: list[str]) -> None:
    """Refuse an unknown command. Options in front of the command take no values, so the first word is it."""
    word = next((word for word in argv if not word.startswith("-")), None)
    if word is not None and word not in COMMANDS:
        remedy = did_you_mean(word, COMMANDS, "commands are")
        if word in ("help", "version"):
            remedy = f"write hybridc --{word}"
        elif word.endswith((".onnx", ".hyb")):
            remedy = f"did you mean hybridc {'compile' if word.endswith('.onnx') else 'run'} {word}?"
        raise UsageError("HC500", f"unknown command {word!r}", remedy=remedy)


def _unknown_arguments(unknown: list[str], parser: argparse.ArgumentParser) -> UsageError:
    options = sorted(set(re.findall(r"--[a-z][a-z-]*", parser.format_help())))
    first = unknown[0]
    if not first.startswith("-"):
        is_output = first.endswith(".hyb") and "--output" in options
        remedy = f"did you mean -o {first}?" if is_output else f"see {parser.prog} -h"
        return UsageError("HC500", f"unexpected argument {first!r}", remedy=remedy)
    option = first.split("=")[0]
    return UsageError(
        "HC500", f"unknown option {option}", remedy=did_you_mean(option, options, "options are")
    )


def _as_hybridc_error(error: Exception) -> HybridcError:
    exhausted = out_of_memory(error)
    if exhausted is not None:
        return exhausted
    if isinstance(error, HybridcError):
        return error
    if isinstance(error, OSError) and error.errno in _FILE_ERRORS:
        free = "free some space" if error.filename else "free some space, also for caches and temporary files"
        remedy = free if error.errno in NO_SPACE else "choose another location"
        return UsageError("HC531", str(error.strerror), where=str(error.filename or ""), remedy=remedy)
    first_line = next(iter(str(error).splitlines()), "")
    return InternalError(
        "HC900",
        f"internal error: {type(error).__name__}: {first_line}",
        remedy=f"this is a bug in hybridc; set {TRACEBACK_VARIABLE}=1 for the traceback and report it",
    )


def _close_stdout() -> None:
    """Let the interpreter flush into nothing at exit: the reader of the pipe has gone."""
    with contextlib.suppress(OSError, ValueError):  # standard output need not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
