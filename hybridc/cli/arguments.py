"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.options import (
    BF16_ERROR,
    FP32,
    PRECISIONS,
    Budget,
    CompileOptions,
    parse_budget,
    parse_budgets,
    parse_bytes,
    parse_count,
    parse_dim,
    parse_pin,
    parse_plan_seconds,
    parse_seconds,
    parse_shape,
)
from hybridc.targets import DEFAULT_THREADS, parse_target

DEFAULT_TUNE_SECONDS = 60.0
DEFAULT_PLAN_SECONDS = 10.0


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, byte counts as integers"
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=parse_count, metavar="N", help="CPU threads (default: one per core)"
    )


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Everything a plan depends on but the budget."""
    parser.add_argument(
        "--target",
        default="native",
        metavar="TARGET",
        help="[cuda[:sm_80,sm_90]+]ISA, with ISA one of avx2, avx512, avx512_bf16, amx, native"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="NAME=1x3x224x224",
        help="fix the shape of an input; may be repeated",
    )
    parser.add_argument(
        "--dim",
        type=parse_dim,
        action="append",
        default=[],
        metavar="NAME=8",
        help="fix a named dimension wherever it occurs; may be repeated",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE.json",
        help="profile of the machine to plan for; `hybridc machine show` lists them",
    )
    add_planning(parser)
    add_host_memory(parser)
    parser.add_argument(
        "--threads",
        type=parse_count,
        metavar="N",
        help="CPU threads that kernels are cut into tasks for, and that a run of the artifact uses (default:"
        f" one per core; tasks for {DEFAULT_THREADS} if the target is a processor of another kind)",
    )
    parser.add_argument(
        "--no-winograd",
        dest="winograd",
        action="store_false",
        help="leave out fast algorithms, whose rounding errors are a few times larger",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=FP32,
        help="bf16: round factors of matrix products and convolutions on the CPU, and add up in fp32; int8:"
        " compute quantized ones as integers (default: %(default)s)",
    )
    parser.add_argument(
        "--bf16-error",
        type=float,
        default=BF16_ERROR,
        metavar="FRACTION",
        help="kernels whose result bf16 would change by more, as measured for random inputs, stay in fp32"
        " (default: %(default)g)",
    )
    parser.add_argument(
        "--profile-kernels",
        action="store_true",
        help="measure each distinct kernel on this computer, and plan with these times: give --machine the"
        " profile that `hybridc machine calibrate` wrote here",
    )


def add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune",
        type=parse_seconds,
        nargs="?",
        const=DEFAULT_TUNE_SECONDS,
        metavar="SECONDS",
        help="measure the tiles that a CPU kernel could have on this machine, for about this long"
        " (default: %(const)g), and take the fastest",
    )
    parser.add_argument(
        "--tune-record",
        type=Path,
        metavar="FILE.json",
        help="take what was measured before from this file, and with --tune add to it"
        " (default with --tune: one in the user's cache)",
    )


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory",
        type=parse_budget,
        metavar="64MiB|50%",
        help="GPU bytes never to be exceeded, or a percentage of what the model needs entirely on the GPU"
        " (default: no limit)",
    )


def add_gpu_budgets(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--gpu-memory", type=parse_budgets, default=(), metavar="64MiB|50%|A,B,C", help=purpose
    )


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host-memory",
        type=parse_bytes,
        metavar="8GiB",
        help="host bytes that arena and staging of a run may take together (default: what there is)",
    )


def add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pin",
        type=parse_pin,
        action="append",
        default=[],
        metavar="NODE=cpu|gpu",
        help="where a node must run; NODE may hold * and ?; may be repeated",
    )
    parser.add_argument(
        "--plan-seconds",
        type=parse_plan_seconds,
        default=DEFAULT_PLAN_SECONDS,
        metavar="SECONDS",
        help="effort of the planner, in seconds of a nominal machine: the same plan results on every one"
        " (default: %(default)g)",
    )


def compile_options(
    arguments: argparse.Namespace,
    gpu_memory: tuple[Budget, ...] = (),
    *,
    tune_seconds: float | None = None,
    tune_record: Path | None = None,
    stop_after: str | None = None,
    dump_ir: Path | None = None,
) -> CompileOptions:
    """Options as the arguments of `add_compile_options` give them."""
    from hybridc.machine import load_machine

    return CompileOptions(
        target=parse_target(arguments.target),
        gpu_memory=gpu_memory,
        host_memory_bytes=arguments.host_memory,
        shapes=tuple(arguments.shape),
        dims=tuple(arguments.dim),
        machine=load_machine(arguments.machine) if arguments.machine else load_machine(),
        pins=tuple(arguments.pin),
        plan_seconds=arguments.plan_seconds,
        threads=arguments.threads,
        winograd=arguments.winograd,
        precision=arguments.precision,
        bf16_error=arguments.bf16_error,
        tune_seconds=tune_seconds,
        tune_record=tune_record,
        profile_kernels=arguments.profile_kernels,
        stop_after=stop_after,
        dump_ir=dump_ir,
    )
