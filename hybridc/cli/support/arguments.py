"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hybridc.cli.support.files import named_value, read_array
from hybridc.errors import UsageError
from hybridc.options import (
    DEFAULT_PLAN_SECONDS,
    FP32,
    KV_CACHES,
    PRECISIONS,
    ROUNDING_ERROR,
    CompileOptions,
    Size,
    parse_bound,
    parse_budget,
    parse_budgets,
    parse_bytes,
    parse_count,
    parse_dim,
    parse_effort,
    parse_emulated_gpu,
    parse_pin,
    parse_seconds,
    parse_shape,
)
from hybridc.targets import DEFAULT_THREADS, parse_target

DEFAULT_TUNE_SECONDS = 60.0
BUDGET_HELP = (
    "GPU memory that is never exceeded, a percentage of what the whole model needs there, or auto: what the"
    " GPU of this computer has free, less 128 MiB"
)


class Arguments(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **options: Any) -> object: ...


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, byte counts as integers"
    )


def add_quiet(parser: Arguments) -> None:
    parser.add_argument("--quiet", action="store_true", help="do not report progress on standard error")


def add_threads(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--threads",
        type=parse_count,
        default=default,
        metavar="N",
        help="CPU threads (default: one per core)",
    )


def add_host_memory(parser: Arguments, default: str | None = None) -> None:
    parser.add_argument(
        "--host-memory",
        type=parse_bytes,
        default=default,
        metavar="8GiB",
        help="host memory that a run may use for tensors (default: no limit)",
    )


def add_emulated_gpu(parser: argparse.ArgumentParser, warning: str = "") -> None:
    parser.add_argument(
        "--emulate-gpu",
        type=parse_emulated_gpu,
        metavar="64MiB[:sm_75]",
        help="run on an emulated GPU with this much memory, of this architecture (default: sm_90)" + warning,
    )


def add_plan_memory(parser: argparse.ArgumentParser) -> None:
    """Which of an artifact's plans is taken."""
    parser.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        metavar="1GiB",
        help="use the plan with the largest budget up to this (default: up to the GPU's free memory)",
    )


def add_drawn_sizes(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--dim",
        type=parse_dim,
        action="append",
        default=[],
        metavar="NAME=8",
        help=f"size of an open dimension {purpose} (default: the largest); may be repeated",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        type=Path,
        action="append",
        metavar="PUBLIC.pem",
        help="refuse what the owner of this ed25519 key has not signed with `hybridc sign`; of several keys,"
        " one that they own is enough",
    )


def add_compile_options(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """Everything a plan depends on but the budget, under the names of `hybridc.keywords`; without `context`
    but that of a decoder, too.

    An option that is not given is not stored: `CompileOptions` has the defaults.
    """
    add_target(parser)
    add_model_options(parser, context=context)
    _add_planning(parser.add_argument_group("planning"))
    _add_kernels(parser.add_argument_group("CPU kernels"))
    group = parser.add_argument_group("cache and progress")
    group.add_argument(
        "--no-cache",
        dest="cache",
        default=argparse.SUPPRESS,
        action="store_false",
        help="neither use what earlier compilations left in the user's cache nor add to it",
    )
    add_quiet(group)


def add_no_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-weights",
        dest="weights",
        default=argparse.SUPPRESS,
        action="store_false",
        help="read no weights that are external data of the model: the files need not be there",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default=argparse.SUPPRESS,
        metavar="TARGET",
        help="ISA for the CPU alone, cuda+ISA for GPU and CPU, cuda:sm_75,sm_90+ISA for these GPUs; ISA is"
        " avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx or native (default: native)",
    )


def add_model_options(parser: argparse.ArgumentParser, *, context: bool = True) -> None:
    """What fixes shapes and inputs of a model."""
    group = parser.add_argument_group("open dimensions and inputs of the model")
    add = partial(group.add_argument, default=argparse.SUPPRESS, action="append")
    add(
        "--shape",
        dest="shapes",
        type=parse_shape,
        metavar="NAME=1x3x224x224",
        help="shape of an input, with _ for a dimension that the model fixes and 1..8 for one that stays"
        " open, or scalar; may be repeated",
    )
    add(
        "--dim",
        dest="dims",
        type=parse_dim,
        metavar="NAME=8",
        help="size of a named dimension; 1..32 for one that stays open, 1..32:8,32 with bounds of buckets, or"
        " 64,128 for the sizes that there are, or the sum of others as in past+1; may be repeated",
    )
    add(
        "--value",
        dest="values",
        type=named_value,
        metavar="NAME=16000|FILE.npy",
        help="make an input a constant, such as axes or a shape: a number, several as in 1,2,3, or a file;"
        " may be repeated",
    )
    add(
        "--bound",
        dest="bounds",
        type=parse_bound,
        metavar="LOOP=64",
        help="the most trips of a Loop node, of which only a run knows how many it makes; may be repeated",
    )
    if context:
        group.add_argument(
            "--context",
            type=parse_count,
            default=argparse.SUPPRESS,
            metavar="N",
            help="positions that a decoder's cache has room for: sizes of its dimensions follow, of one"
            " sequence and 1, 32 and 256 new tokens a run, unless --dim gives them",
        )


def _add_planning(group: Arguments) -> None:
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add(
        "--machine",
        metavar="NAME|FILE.json",
        help="machine to plan for; `hybridc machine show` lists profiles",
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
        help=f"effort: every machine finds the same plan (default: {DEFAULT_PLAN_SECONDS:g})",
    )
    add(
        "--plan-timeout",
        type=parse_effort,
        metavar="SECONDS",
        help="take the best plan so far after this time, which a faster machine uses better (default: none)",
    )
    add(
        "--robust",
        action="store_true",
        help="take the plan that is fastest on average on machines drawn around the profile; planning takes"
        " twice as long",
    )
    add(
        "--profile-kernels",
        action="store_true",
        help="measure each kernel here, and plan with these times; give --machine the profile that"
        " `hybridc machine calibrate` wrote here",
    )
    add_host_memory(group, argparse.SUPPRESS)


def _add_kernels(group: Arguments) -> None:
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add(
        "--threads",
        type=parse_count,
        metavar="N",
        help="threads that kernels are scheduled for and a run uses (default: one per core;"
        f" {DEFAULT_THREADS} if this processor cannot run the target)",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        help="fp16 stores tensors in 16 bits on both devices, bf16 rounds operands of products on the CPU,"
        " and of training steps on both,"
        " tf32 those on the GPU's tensor cores; fp32 multiplies integers of quantized models, and int8"
        " also notes why a product stays in floats"
        f" (default: {FP32})",
    )
    add(
        "--kv-cache",
        choices=KV_CACHES,
        help="store the keys and values of a decoder in 16 bits, or in 8 with a scale for each row (default:"
        " as in the model)",
    )
    add(
        "--last-logits",
        action="store_true",
        help="of a decoder compute the logits of one token of each sequence alone, as generating text needs",
    )
    add(
        "--rounding-error",
        type=float,
        metavar="FRACTION",
        help="keep kernels in fp32 whose results fp16, bf16 or tf32 would change by more than this, measured"
        f" on random inputs (default: {ROUNDING_ERROR:g})",
    )
    older = {"dest": "rounding_error", "type": float, "help": argparse.SUPPRESS}
    add("--bf16-error", **older)  # deprecated
    add(
        "--no-fast-algorithms",
        dest="fast_algorithms",
        action="store_false",
        help="no Winograd, Strassen or FFT kernels, whose rounding errors are a few times larger",
    )
    add(
        "--no-int8-activations",
        dest="int8_activations",
        action="store_false",
        help="multiply float32 activations where accuracy_level 4 of MatMulNBits allows 8 bits",
    )
    add("--no-winograd", dest="fast_algorithms", action="store_false", help=argparse.SUPPRESS)  # deprecated


def add_tuning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measured tiles of CPU kernels")
    group.add_argument(
        "--tune",
        dest="tune_seconds",
        default=argparse.SUPPRESS,
        type=parse_seconds,
        nargs="?",
        const=DEFAULT_TUNE_SECONDS,
        metavar="SECONDS",
        help="measure tiles on this machine for about this long (%(const)g), and use the fastest",
    )
    group.add_argument(
        "--tune-record",
        default=argparse.SUPPRESS,
        type=Path,
        metavar="FILE.json",
        help="measured tiles to use; --tune adds to them (default with --tune: a file in the user's cache)",
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
        metavar="64MiB|50%|A,B",
        help=purpose,
    )


def compile_options(arguments: argparse.Namespace, **more: Any) -> CompileOptions:
    """The options that the command line gives; `more` are fields of `CompileOptions`."""
    from hybridc.machine import load_machine

    given = given_options(arguments)
    for name, read in (("target", parse_target), ("machine", load_machine)):
        if name in given:
            given[name] = read(given[name])
    if "values" in given:
        given["values"] = tuple(
            (name, read_array(value) if isinstance(value, Path) else value) for name, value in given["values"]
        )
    if "host_memory" in given:
        given["host_memory_bytes"] = given.pop("host_memory")
    return CompileOptions(**given | more)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a compilation that the command line gives, under the names of `hybridc.keywords`."""
    from hybridc.keywords import CompileKeywords, PlanOnlyKeywords

    known = CompileKeywords.__annotations__.keys() | PlanOnlyKeywords.__annotations__.keys()
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in known
    }


def check_sizes(names: Sequence[str], sizes: Mapping[str, Size]) -> None:
    """Raise UsageError HC512 unless each is a single size of one of these open dimensions."""
    for name, size in sizes.items():
        if name not in names or not isinstance(size, int):
            unknown = f"the artifact has no open dimension {name!r}"
            what = unknown if name not in names else f"{size} is not a single size"
            listed = f"open dimensions are {', '.join(names)}" if names else "all its sizes are fixed"
            raise UsageError("HC512", what, remedy=listed)


def named_count(text: str) -> tuple[str, int]:
    """Read `NAME=20` of `--runs`. Raises UsageError HC500."""
    name, _, count = text.rpartition("=")
    if not name:
        raise UsageError("HC500", f"invalid --runs {text!r}", remedy="write --runs NAME=20")
    return name, parse_count(count)


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids. Raises UsageError HC513."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        raise UsageError("HC513", f"invalid token ids {text!r}", remedy="write for example 1,17,204")
    return tuple(map(int, text.split(",")))
