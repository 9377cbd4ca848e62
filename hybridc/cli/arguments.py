"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridc.options import (
    Budget,
    CompileOptions,
    parse_budget,
    parse_count,
    parse_dim,
    parse_shape,
)
from hybridc.targets import parse_target


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
    add_threads(parser)


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory",
        type=parse_budget,
        metavar="64MiB|50%",
        help="GPU bytes never to be exceeded, or a percentage of what the model needs entirely on the GPU"
        " (default: no limit)",
    )


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Budgets separated by commas."""
    return tuple(parse_budget(part) for part in text.split(","))


def compile_options(
    arguments: argparse.Namespace,
    gpu_memory: Budget | None,
    *,
    stop_after: str | None = None,
    dump_ir: Path | None = None,
) -> CompileOptions:
    """Options as the arguments of `add_compile_options` give them."""
    from hybridc.machine import load_machine

    return CompileOptions(
        target=parse_target(arguments.target),
        gpu_memory=gpu_memory,
        shapes=tuple(arguments.shape),
        dims=tuple(arguments.dim),
        machine=load_machine(arguments.machine) if arguments.machine else load_machine(),
        threads=arguments.threads,
        stop_after=stop_after,
        dump_ir=dump_ir,
    )
