"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hybridc.options import (
    BF16_ERROR,
    DEFAULT_PLAN_SECONDS,
    FP32,
    PRECISIONS,
    CompileOptions,
    parse_budget,
    parse_budgets,
    parse_bytes,
    parse_count,
    parse_dim,
    parse_effort,
    parse_pin,
    parse_seconds,
    parse_shape,
)
from hybridc.targets import DEFAULT_THREADS, parse_target

DEFAULT_TUNE_SECONDS = 60.0
BUDGET_HELP = (
    "GPU memory that is never exceeded, in bytes or as a percentage of what the model needs when fully"
    " GPU-resident"
)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, byte counts as integers"
    )


def add_threads(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--threads",
        type=parse_count,
        default=default,
        metavar="N",
        help="CPU threads (default: one per core)",
    )


def add_host_memory(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--host-memory",
        type=parse_bytes,
        default=default,
        metavar="8GiB",
        help="host memory that a run may use for arena and staging buffers (default: no limit)",
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Everything a plan depends on but the budget, under the names of `hybridc.keywords`.

    An option that is not given is not stored: `CompileOptions` has the defaults.
    """
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    _add_model(add)
    _add_planning(add)
    add_host_memory(parser, argparse.SUPPRESS)
    _add_kernels(add)


def _add_model(add: Callable[..., object]) -> None:
    add(
        "--target",
        metavar="TARGET",
        help="[cuda[:sm_80,sm_90]+]ISA, with ISA one of avx2, avx512, avx512_bf16, amx, native"
        " (default: native)",
    )
    add(
        "--shape",
        dest="shapes",
        type=parse_shape,
        action="append",
        metavar="NAME=1x3x224x224",
        help="fix the shape of an input; may be repeated",
    )
    add(
        "--dim",
        dest="dims",
        type=parse_dim,
        action="append",
        metavar="NAME=8",
        help="fix a named dimension in all inputs; may be repeated",
    )


def _add_planning(add: Callable[..., object]) -> None:
    add(
        "--machine",
        metavar="NAME|FILE.json",
        help="profile of the machine to plan for; `hybridc machine show` lists them",
    )
    add(
        "--pin",
        dest="pins",
        type=parse_pin,
        action="append",
        metavar="NODE=cpu|gpu",
        help="device that a node must run on; NODE may contain * and ?; may be repeated",
    )
    add(
        "--plan-seconds",
        type=parse_effort,
        metavar="SECONDS",
        help="planning effort, in seconds of a nominal machine: every machine finds the same plan"
        f" (default: {DEFAULT_PLAN_SECONDS:g})",
    )
    add(
        "--profile-kernels",
        action="store_true",
        help="measure each distinct kernel on this computer, and plan with these times; use the --machine"
        " profile that `hybridc machine calibrate` wrote here",
    )


def _add_kernels(add: Callable[..., object]) -> None:
    add(
        "--threads",
        type=parse_count,
        metavar="N",
        help="CPU threads that kernels are scheduled for and that a run of the artifact uses (default:"
        f" one per core; {DEFAULT_THREADS} if this processor cannot run the target)",
    )
    add(
        "--no-fast-algorithms",
        dest="fast_algorithms",
        action="store_false",
        help="do not use Winograd, Strassen or FFT kernels, whose rounding errors are a few times larger",
    )
    add("--no-winograd", dest="fast_algorithms", action="store_false", help=argparse.SUPPRESS)  # deprecated
    add(
        "--precision",
        choices=PRECISIONS,
        help="bf16: round the operands of matrix products and convolutions on the CPU, and accumulate in"
        f" fp32; int8: compute quantized ones with integers (default: {FP32})",
    )
    add(
        "--bf16-error",
        type=float,
        metavar="FRACTION",
        help="largest relative change of a kernel's result by bf16, measured on random inputs; others stay"
        f" in fp32 (default: {BF16_ERROR:g})",
    )


def add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune",
        dest="tune_seconds",
        default=argparse.SUPPRESS,
        type=parse_seconds,
        nargs="?",
        const=DEFAULT_TUNE_SECONDS,
        metavar="SECONDS",
        help="measure candidate tiles of CPU kernels on this machine for about this long (default:"
        " %(const)g), and"
        " use the fastest",
    )
    parser.add_argument(
        "--tune-record",
        default=argparse.SUPPRESS,
        type=Path,
        metavar="FILE.json",
        help="file of measured tiles to use; --tune adds to it (default with --tune: a file in the user's"
        " cache)",
    )


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    """One budget."""
    parser.add_argument(
        "--gpu-memory",
        type=lambda text: (parse_budget(text),),
        default=argparse.SUPPRESS,
        metavar="64MiB|50%",
        help=f"{BUDGET_HELP} (default: no limit)",
    )


def add_gpu_budgets(parser: argparse.ArgumentParser, purpose: str) -> None:
    """A list of budgets."""
    parser.add_argument(
        "--gpu-memory",
        type=parse_budgets,
        default=argparse.SUPPRESS,
        metavar="64MiB|50%|A,B,C",
        help=purpose,
    )


def compile_options(arguments: argparse.Namespace, **more: Any) -> CompileOptions:
    """The options that the command line gives; `more` are fields of `CompileOptions`."""
    from hybridc.machine import load_machine

    given = given_options(arguments)
    for name, read in (("target", parse_target), ("machine", load_machine)):
        if name in given:
            given[name] = read(given[name])
    if "host_memory" in given:
        given["host_memory_bytes"] = given.pop("host_memory")
    return CompileOptions(**given | more)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a compilation that the command line gives, under the names of `hybridc.keywords`."""
    from hybridc.keywords import CompileKeywords

    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in CompileKeywords.__annotations__
    }
