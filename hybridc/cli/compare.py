"""Compare a model's results with ONNX Runtime at each of several GPU budgets.

One artifact has a plan for each budget. An element passes if it is at most atol + rtol times its
reference off, as in numpy.allclose. Where an output misses that, an evaluation of the model in
float64 decides: hybridc passes if it is at most 4 times as far off as ONNX Runtime. Without a GPU it
runs on an emulated one that has exactly the budget. Needs onnxruntime.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridc.cli.support.arguments import add_compile_options, add_gpu_budgets, add_json, compile_options
from hybridc.cli.support.files import existing_model, print_json
from hybridc.cli.support.hardware import nvidia_driver
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.cli.support.tolerance import (
    FLOATS,
    HALVES,
    REDUCED,
    Deviation,
    Tolerance,
    default_tolerance,
    deviation,
)
from hybridc.errors import InternalError, UsageError
from hybridc.ir import Device
from hybridc.options import INT8, format_bytes, parse_seed
from hybridc.progress import Progress, terminal_progress
from hybridc.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

    from hybridc.cli.support.bisection import FirstMiss
    from hybridc.cli.support.child import Ran
    from hybridc.cli.support.doubles import Doubles
    from hybridc.ir import Plan
    from hybridc.options import CompileOptions

HELP = "compare results with ONNX Runtime at several budgets"
EXAMPLE = "  hybridc compare resnet.onnx --target cuda+avx2 --gpu-memory 100%,50%,25%"

FURTHER = 4.0
"""How much further from float64 than ONNX Runtime hybridc may be: by luck, two orders of summing up the same
terms differ by such factors."""
_CREDIBLE = 10.0
"""An evaluation that is more times further from a result than the results from each other is itself wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What float64 says about an output that is further from ONNX Runtime's than the tolerance."""

    output: str
    elements: int
    elements_off: int
    onnxruntime_error: float | None
    """Largest absolute distance from the float64 evaluation; None if there is none."""
    hybridc_error: float | None
    evaluated_by: str
    """What evaluated in float64, or why nothing did."""
    passed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One budget's results held against the reference."""

    budget_bytes: int | None
    allocated_bytes: int
    """Most GPU memory that was really held."""
    max_abs_error: float
    max_rel_error: float
    worst_output: str
    """The output that misses, if one does, with the largest relative error."""
    elements_off: int
    """Elements of all outputs that are further off than the tolerance."""
    seconds: float
    """Of the run."""
    passed: bool
    judgements: tuple[Judgement, ...] = ()
    """Of the outputs that miss the tolerance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx", help="the model")
    add_compile_options(parser, context=False)  # that of several sizes, and one is compared
    add_gpu_budgets(parser, "GPU memory budgets, such as 64MiB,50%% (default: one run without a limit)")
    parser.add_argument(
        "--rtol",
        type=_parse_tolerance,
        metavar="X",
        help=f"error that passes relative to each element (default: {FLOATS.rtol:g}; {HALVES.rtol:g} if"
        f" outputs are 16-bit floats; {REDUCED.rtol:g} with --precision)",
    )
    parser.add_argument(
        "--atol",
        type=_parse_tolerance,
        metavar="X",
        help="absolute error that passes in addition (default: as much of each output's largest value as"
        f" --rtol's default says, at least {FLOATS.least:g}, or {HALVES.least:g} beyond float32)",
    )
    parser.add_argument(
        "--tolerance",
        type=_parse_tolerance,
        metavar="X",
        help="instead of both: error that passes relative to the largest value of each output",
    )
    parser.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="seed of the inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="if results fail, find the first node whose output is off, in further compilations",
    )
    parser.add_argument(
        "--emulate-gpu", action="store_true", help="use the emulated GPU even if there is a real one"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_model(arguments.model)
    options = compile_options(arguments)
    options.check_fixed("hybridc compare")
    emulate = options.target.has_gpu and (arguments.emulate_gpu or nvidia_driver() is None)
    if arguments.tolerance is not None and (arguments.rtol, arguments.atol) != (None, None):
        remedy = "give --tolerance, or --rtol and --atol"
        raise UsageError("HC500", "--tolerance replaces --rtol and --atol", remedy=remedy)
    from hybridc.cli.support.reference import reference_run
    from hybridc.compiler import compile_model

    if options.kv_cache == INT8:
        what = "--kv-cache int8 has other inputs and outputs than ONNX Runtime"
        raise UsageError("HC500", what, remedy="compare without it, or with --kv-cache fp16")
    feeds, expected = reference_run(arguments.model, options, arguments.seed)
    tolerance = _tolerance(
        arguments, default_tolerance(expected.values(), options.precision, options.kv_cache)
    )
    rows: list[Comparison] = []
    with scratch_folder("hybridc-compare-") as folder, terminal_progress(quiet=arguments.quiet) as progress:
        compiled = compile_model(arguments.model, folder / "model.hyb", options, progress)
        judge = _Judge(arguments.model, feeds | dict(options.values), expected, progress)
        for plan in reversed(compiled.plans):
            progress.stage("run")
            ran = _run(folder / "model.hyb", options.threads, plan, feeds, emulate)
            rows.append(_compare(tolerance, plan.budget_bytes, ran, expected, judge))
    passed = all(row.passed for row in rows)
    culprit = None if passed or not arguments.bisect else _bisected(arguments, options, rows, emulate)
    if arguments.json:
        print_json(
            {
                "model": str(arguments.model),
                "target": str(options.target),
                "rtol": tolerance.rtol,
                "atol": {name: tolerance.atol_of(output) for name, output in expected.items()},
                "tolerance": arguments.tolerance,
                "emulated_gpu": emulate,
                "passed": passed,
                "comparisons": [_finite(dataclasses.asdict(row)) for row in rows],
                "first_miss": None if culprit is None else _finite(dataclasses.asdict(culprit)),
            }
        )
    else:
        nothing = "No value between nodes misses the tolerance where it is an output."
        found = [str(culprit or nothing)] if arguments.bisect and not passed else []
        print_text("\n".join([_table(rows), *_notes(rows), *found]))
    if not passed:
        raise _failure(rows, arguments.model, tolerance, expected)
    return 0


def _bisected(
    arguments: argparse.Namespace, options: CompileOptions, rows: list[Comparison], emulate: bool
) -> FirstMiss | None:
    from hybridc.cli.support.bisection import first_miss
    from hybridc.cli.support.reference import reference_run
    from hybridc.compiler import compile_model

    def results(path: Path) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        feeds, expected = reference_run(path, options, arguments.seed)
        with (
            scratch_folder("hybridc-compare-") as folder,
            terminal_progress(quiet=arguments.quiet) as progress,
        ):
            compiled = compile_model(path, folder / "model.hyb", options, progress)
            for plan in reversed(compiled.plans):
                ran = _run(folder / "model.hyb", options.threads, plan, feeds, emulate)
                yield ran.outputs, expected

    def tolerance_of(expected: np.ndarray) -> Tolerance:
        return _tolerance(arguments, default_tolerance([expected], options.precision, options.kv_cache))

    wrong = next(row for row in rows if not row.passed).worst_output
    return first_miss(arguments.model, wrong, results, tolerance_of)


def _tolerance(arguments: argparse.Namespace, default: Tolerance) -> Tolerance:
    if arguments.tolerance is not None:
        return Tolerance(rtol=0.0, share=arguments.tolerance)
    given = {name: getattr(arguments, name) for name in ("rtol", "atol")}
    return dataclasses.replace(default, **{k: v for k, v in given.items() if v is not None})


def _run(artifact: Path, threads: int | None, plan: Plan, feeds: dict[str, np.ndarray], emulate: bool) -> Ran:
    """Run one plan in a process of its own."""
    from hybridc.cli.support.child import ChildError, run_artifact

    device_bytes = plan.arena_bytes(Device.GPU) if plan.budget_bytes is None else plan.budget_bytes
    emulated_bytes = max(device_bytes, 1) if emulate else None  # a plan may leave the GPU empty
    try:
        with scratch_folder("hybridc-run-") as folder:
            return run_artifact(artifact, feeds, folder, emulated_bytes, threads, plan.budget_bytes)
    except ChildError as error:
        raise ChildError(
            f"{error}\n  = note: in the run {_at_budget(plan.budget_bytes)}", error.exit_code
        ) from None


def _compare(
    tolerance: Tolerance,
    budget_bytes: int | None,
    ran: Ran,
    expected: dict[str, np.ndarray],
    judge: _Judge,
) -> Comparison:
    """Hold the results of a run against the reference."""
    found = [deviation(name, ran.outputs[name], array, tolerance) for name, array in expected.items()]
    judgements = tuple(judge(each, ran.outputs[each.output]) for each in found if each.elements_off)
    within = budget_bytes is None or ran.gpu_allocated_bytes <= budget_bytes
    return Comparison(
        budget_bytes=budget_bytes,
        allocated_bytes=ran.gpu_allocated_bytes,
        max_abs_error=max(d.max_abs for d in found),
        max_rel_error=max(d.max_rel for d in found),
        worst_output=max(found, key=lambda d: (d.elements_off > 0, d.max_rel)).output,
        elements_off=sum(d.elements_off for d in found),
        seconds=ran.seconds,
        passed=within and all(judgement.passed for judgement in judgements),
        judgements=judgements,
    )


class _Judge:
    """Says whether hybridc is off, or ONNX Runtime as much; evaluates in float64 when first asked."""

    def __init__(
        self, model: Path, feeds: dict[str, np.ndarray], expected: dict[str, np.ndarray], progress: Progress
    ) -> None:
        self._model, self._feeds, self._expected, self._progress = model, feeds, expected, progress

    def __call__(self, found: Deviation, output: np.ndarray) -> Judgement:
        """About an output that deviates so from ONNX Runtime's."""
        name, truth = found.output, self._doubles.outputs
        judgement = Judgement(
            name, found.elements, found.elements_off, None, None, self._doubles.by, passed=False
        )
        if truth is None:
            return judgement
        theirs = deviation(name, self._expected[name], truth[name]).max_abs
        ours = deviation(name, output, truth[name]).max_abs
        is_as_near = ours <= FURTHER * theirs and math.isfinite(ours)
        return dataclasses.replace(
            judgement,
            onnxruntime_error=theirs,
            hybridc_error=ours,
            passed=is_as_near and theirs <= _CREDIBLE * found.max_abs,
        )

    @cached_property
    def _doubles(self) -> Doubles:
        from hybridc.cli.support.doubles import double_run

        self._progress.stage("float64")
        return double_run(self._model, self._feeds, self._expected)


def _table(rows: list[Comparison]) -> str:
    from hybridc.report.table import Column, format_us, render_table

    columns = (
        Column("GPU budget", numeric=True),
        Column("allocated", numeric=True, dispensable=1),
        Column("max abs error", numeric=True, dispensable=2),
        Column("max rel error", numeric=True),
        Column("off", numeric=True),
        Column("in output", least=9),
        Column("run", numeric=True),
        Column("result"),
    )
    cells = [
        (
            "no limit" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.allocated_bytes),
            f"{row.max_abs_error:.2e}",
            f"{row.max_rel_error:.2e}",
            f"{row.elements_off:,}",
            row.worst_output,
            format_us(row.seconds * 1e6),
            ("PASS" if row.passed else "FAIL") + " (float64)" * bool(row.judgements),
        )
        for row in rows
    ]
    return "\n".join(render_table(columns, cells, output_width()))


def _notes(rows: list[Comparison]) -> list[str]:
    """What float64 said, once for all rows of which it said the same."""
    judgements = (judgement for row in rows for judgement in row.judgements)
    return list(dict.fromkeys(f"Output {j.output!r}: {_verdict(j)}." for j in judgements))


def _verdict(judgement: Judgement) -> str:
    off = f"{judgement.elements_off:,} of {judgement.elements:,} elements miss the tolerance"
    theirs, ours = judgement.onnxruntime_error, judgement.hybridc_error
    if theirs is None or ours is None:
        return f"{off}; there is no evaluation in float64: {judgement.evaluated_by}"
    told = f"{off}; onnxruntime is {theirs:.2e} off in float64, hybridc {ours:.2e}"
    by = f" (evaluated by {judgement.evaluated_by})"
    doubtful = "" if judgement.passed or ours > FURTHER * theirs else ", which is not credible"
    return told + doubtful + by


def _failure(
    rows: list[Comparison], model: Path, tolerance: Tolerance, expected: dict[str, np.ndarray]
) -> InternalError:
    row = next(row for row in rows if not row.passed)
    budget = _at_budget(row.budget_bytes)
    wrong = next((judgement for judgement in row.judgements if not judgement.passed), None)
    if wrong is not None:
        allowed = f"rtol {tolerance.rtol:g} and atol {tolerance.atol_of(expected[wrong.output]):.2g}"
        what = (
            f"{budget} output {wrong.output!r} is off by {row.max_abs_error:.2e}, more than {allowed} allow"
        )
        return InternalError("HC910", f"{what}: {_verdict(wrong)}", where=str(model))
    what = f"{budget} the GPU held {format_bytes(row.allocated_bytes)}"
    return InternalError("HC911", what, where=str(model))


def _at_budget(budget_bytes: int | None) -> str:
    return "without a limit" if budget_bytes is None else f"at a budget of {format_bytes(budget_bytes)}"


def _finite(value: Any) -> Any:
    """JSON has no infinity: an error without bound becomes null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = math.nan
    if not 0 <= tolerance < math.inf:
        raise UsageError("HC513", f"invalid tolerance {text!r}", remedy="give a number such as 1e-4")
    return tolerance
