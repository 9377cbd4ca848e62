"""Show how the predicted time of a run depends on the GPU memory it may use, or on a decoder's context.

Plans a model for several budgets, or a decoder for several contexts. Needs no GPU, and generates no code.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from hybridc.cli.support.arguments import add_compile_options, add_json, add_no_weights, compile_options
from hybridc.cli.support.files import existing_model, print_json, write_text
from hybridc.cli.support.imports import lasting_imports
from hybridc.cli.support.terminal import print_text
from hybridc.errors import UsageError
from hybridc.options import Budget, parse_budget, parse_budgets, parse_count
from hybridc.progress import terminal_progress

HELP = "show predicted time against GPU memory"
EXAMPLE = """\
  hybridc sweep net.onnx --target cuda+avx2 --gpu-memory 10%..100% -o net.svg
  hybridc sweep lm.onnx --target cuda+avx2 --gpu-memory 3GiB --context 512,2048"""
_SUFFIXES = (".svg", ".json")
_POINTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    add_compile_options(parser, context=False)
    add_no_weights(parser)
    parser.add_argument(
        "--gpu-memory",
        type=_parse_sweep,
        default=None,
        metavar="LEAST..MOST|A,B",
        help="range of budgets, in bytes or in percent of what the whole model needs on the GPU, or a list"
        " (default: 10%%..100%%); with --context a list, or one",
    )
    parser.add_argument(
        "--points",
        type=parse_count,
        metavar="N",
        help=f"number of budgets in a range (default: {_POINTS})",
    )
    parser.add_argument(
        "--context",
        dest="contexts",
        type=_parse_contexts,
        metavar="512,2048",
        help="of a decoder: compare these numbers of positions that its cache has room for, within each of a"
        " list of budgets",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.svg|FILE.json", help="write the curve to a file"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_model(arguments.model)
    _check_output(arguments.output)
    if arguments.contexts is not None:
        return _compare_contexts(arguments)
    wanted = arguments.gpu_memory or _parse_range("10%..100%")
    options = compile_options(arguments, gpu_memory=_budgets(wanted, arguments.points))
    options.check_fixed("hybridc sweep")
    with lasting_imports():
        from hybridc.compiler import plan_model
        from hybridc.report.curve import curve_to_json, curve_to_svg, points_of, render_curve

    with terminal_progress(quiet=arguments.quiet) as progress:
        planned = plan_model(arguments.model, options, progress)
    points = points_of(planned.graphs, planned.plans, planned.machine, planned.pins)
    title = f"{arguments.model.name} for {options.target.of_each[-1]} on {options.machine.name}"
    if arguments.output is not None:
        drawn = arguments.output.suffix == ".svg"
        text = curve_to_svg(points, title) if drawn else json.dumps(curve_to_json(points), indent=2) + "\n"
        write_text(arguments.output, text)
    if arguments.json:
        print_json(curve_to_json(points))
    else:
        print_text(render_curve(points, planned.all_gpu_peak_bytes, title))
    return 0


def _compare_contexts(arguments: argparse.Namespace) -> int:
    if arguments.output is not None and arguments.output.suffix != ".json":
        what, remedy = "contexts are written as JSON alone", "name a file that ends in .json"
        raise UsageError("HC537", what, where=str(arguments.output), remedy=remedy)
    if isinstance(arguments.gpu_memory, _Range) or arguments.points is not None:
        remedy = "give a list of budgets, or one: --gpu-memory 3.5GiB"
        raise UsageError("HC500", "--context takes no range of budgets", remedy=remedy)
    options = compile_options(arguments, gpu_memory=arguments.gpu_memory or ())
    if options.target.has_gpu and not options.gpu_memory:
        remedy = "for example --gpu-memory 3.5GiB"
        raise UsageError("HC500", "--context requires --gpu-memory where the target has a GPU", remedy=remedy)
    with lasting_imports():
        from hybridc.compiler import plan_model
        from hybridc.frontend.inputs.cache_lengths import decoder_dimensions
        from hybridc.passes.import_model import loaded_file
        from hybridc.report.contexts import context_row, contexts_to_json, render_contexts

    given = dict(options.dims)
    dimensions = decoder_dimensions(loaded_file(arguments.model, options))
    new = given.get(dimensions.new, 1)
    if not isinstance(new, int):
        what = f"a context is planned for one number of new tokens, not for {new}"
        raise UsageError("HC512", what, remedy=f"give one size, for example --dim {dimensions.new}=1")
    rows = []
    with terminal_progress(quiet=arguments.quiet) as progress:
        for context in arguments.contexts:
            dims = {**given, **dimensions.sizes(context, 1, given)}
            planned = plan_model(arguments.model, replace(options, dims=tuple(dims.items())), progress)
            pairs = zip(planned.graphs, planned.plans, strict=True)
            of_all = planned.machine, planned.whole
            rows += [context_row(context, graph, plan, *of_all) for graph, plan in pairs]
    found = [row for row in rows if row is not None]
    data = contexts_to_json(found)
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(data, indent=2) + "\n")
    if arguments.json:
        print_json(data)
    else:
        title = f"{arguments.model.name} for {options.target.of_each[-1]} on {options.machine.name}"
        print_text(render_contexts(found, title))
    return 0


def _parse_contexts(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_count(part) for part in text.split(",")}))


@dataclass(frozen=True, slots=True)
class _Range:
    """From one budget to another, both in bytes or both in percent."""

    low: Budget
    high: Budget


def _parse_sweep(text: str) -> _Range | tuple[Budget, ...]:
    return _parse_range(text) if ".." in text else parse_budgets(text)


def _parse_range(text: str) -> _Range:
    low, _, high = text.partition("..")
    ends = parse_budget(low), parse_budget(high)
    if any(end.is_auto for end in ends):
        what = f"{text!r}: a range cannot end at what is measured"
        raise UsageError("HC510", what, remedy="write for example 10%..100%, or auto by itself")
    if (ends[0].percent is None) != (ends[1].percent is None):
        what = f"{text!r} mixes bytes and percent"
        raise UsageError("HC510", what, remedy="write for example 10%..100% or 64MiB..1GiB")
    if _amount(ends[0]) > _amount(ends[1]):
        raise UsageError("HC510", f"the range {text!r} is reversed", remedy=f"write {high}..{low}")
    return _Range(*ends)


def _amount(budget: Budget) -> float:
    amount = budget.percent if budget.size_bytes is None else budget.size_bytes
    assert amount is not None
    return amount


def _budgets(wanted: _Range | tuple[Budget, ...], points: int | None) -> tuple[Budget, ...]:
    """Those of a list; or `points` of a range, in even steps: a single one is the larger end."""
    if not isinstance(wanted, _Range):
        if points is not None:
            what = "--points requires a range of budgets, but --gpu-memory is a list"
            raise UsageError("HC500", what, remedy="remove --points, or give a range: 10%..100%")
        if len(wanted) == 1:
            remedy = "write 10%..100%, or a list: 25%,50%"
            raise UsageError("HC510", f"a single budget, {wanted[0]}, makes no curve", remedy=remedy)
        return wanted
    count, first, last = points or _POINTS, _amount(wanted.low), _amount(wanted.high)
    amounts = [last - (last - first) * i / max(count - 1, 1) for i in reversed(range(count))]
    if wanted.low.percent is None:
        return tuple(Budget(size_bytes=round(amount)) for amount in amounts)
    return tuple(Budget(percent=round(amount, 6)) for amount in amounts)


def _check_output(path: Path | None) -> None:
    if path is not None and path.suffix not in _SUFFIXES:
        raise UsageError(
            "HC537",
            f"the file name of a curve must end in {' or '.join(_SUFFIXES)}",
            where=str(path),
            remedy=f"for example {path.with_suffix('.svg').name}",
        )
