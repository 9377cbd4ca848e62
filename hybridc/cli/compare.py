"""Compare a model's results with ONNX Runtime at each of several GPU budgets.

One artifact has a plan for each budget. Errors are relative to the largest value of their
output. Without a GPU it runs on an emulated one that has exactly the budget. Needs onnxruntime.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.cli.support.arguments import add_compile_options, add_gpu_budgets, add_json, compile_options
from hybridc.cli.support.files import existing_file, print_json
from hybridc.cli.support.hardware import nvidia_driver
from hybridc.errors import InternalError, UsageError
from hybridc.ir import Device
from hybridc.options import format_bytes, parse_seed
from hybridc.progress import terminal_progress
from hybridc.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np

    from hybridc.ir import Plan

HELP = "compare results with ONNX Runtime at several budgets"
EXAMPLE = "  hybridc compare resnet.onnx --target cuda+avx2 --gpu-memory 100%,50%,25%"

_TOLERANCE = 1e-4
_TOLERANCE_OF_HALVES = 1e-2
"""For outputs of 16-bit floats, which are themselves rounded to 1e-3 (float16) or 8e-3 (bfloat16)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One budget's results held against the reference."""

    budget_bytes: int | None
    allocated_bytes: int
    """Most GPU memory that was really held."""
    max_abs_error: float
    max_rel_error: float
    worst_output: str
    """Output with the largest relative error."""
    seconds: float
    """Of the run."""
    passed: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    add_compile_options(parser)
    add_gpu_budgets(parser, "GPU memory budgets, such as 64MiB,50%% (default: one run without a limit)")
    parser.add_argument(
        "--tolerance",
        type=_parse_tolerance,
        metavar="X",
        help=f"largest relative error that passes (default: {_TOLERANCE:g}; "
        f"{_TOLERANCE_OF_HALVES:g} if outputs are 16-bit floats)",
    )
    parser.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="seed of the inputs (default: %(default)s)"
    )
    parser.add_argument(
        "--emulate-gpu", action="store_true", help="use the emulated GPU even if there is a real one"
    )
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    existing_file(arguments.model, "the model")
    options = compile_options(arguments)
    emulate = options.target.has_gpu and (arguments.emulate_gpu or nvidia_driver() is None)
    from hybridc.cli.support.reference import reference_run
    from hybridc.compiler import compile_model

    feeds, expected = reference_run(arguments.model, options, arguments.seed)
    tolerance = _default_tolerance(expected) if arguments.tolerance is None else arguments.tolerance
    with scratch_folder("hybridc-compare-") as folder:
        with terminal_progress() as progress:
            compiled = compile_model(arguments.model, folder / "model.hyb", options, progress)
        rows = [
            _compare(tolerance, options.threads, folder / "model.hyb", plan, feeds, expected, emulate)
            for plan in reversed(compiled.plans)
        ]
    passed = all(row.passed for row in rows)
    if arguments.json:
        print_json(
            {
                "model": str(arguments.model),
                "target": str(options.target),
                "tolerance": tolerance,
                "emulated_gpu": emulate,
                "passed": passed,
                "comparisons": [_finite(dataclasses.asdict(row)) for row in rows],
            }
        )
    else:
        print(_table(rows))
    if not passed:
        raise _failure(rows, arguments.model, tolerance)
    return 0


def _default_tolerance(outputs: dict[str, np.ndarray]) -> float:
    halves = any(array.dtype.kind in "fV" and array.dtype.itemsize == 2 for array in outputs.values())
    return _TOLERANCE_OF_HALVES if halves else _TOLERANCE


def _compare(
    tolerance: float,
    threads: int | None,
    artifact: Path,
    plan: Plan,
    feeds: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    emulate: bool,
) -> Comparison:
    """Run one plan in a process of its own, and hold the results against the reference."""
    from hybridc.cli.support.child import ChildError, run_artifact
    from hybridc.cli.support.reference import deviation

    device_bytes = plan.arena_bytes(Device.GPU) if plan.budget_bytes is None else plan.budget_bytes
    emulated_bytes = max(device_bytes, 1) if emulate else None  # a plan may leave the GPU empty
    try:
        with scratch_folder("hybridc-run-") as folder:
            ran = run_artifact(artifact, feeds, folder, emulated_bytes, threads, plan.budget_bytes)
    except ChildError as error:
        raise ChildError(
            f"{error}\n  = note: in the run {_at_budget(plan.budget_bytes)}", error.exit_code
        ) from None
    deviations = [deviation(name, ran.outputs[name], reference) for name, reference in expected.items()]
    worst = max(deviations, key=lambda d: d.max_rel)
    within = plan.budget_bytes is None or ran.gpu_allocated_bytes <= plan.budget_bytes
    return Comparison(
        budget_bytes=plan.budget_bytes,
        allocated_bytes=ran.gpu_allocated_bytes,
        max_abs_error=max(d.max_abs for d in deviations),
        max_rel_error=worst.max_rel,
        worst_output=worst.output,
        seconds=ran.seconds,
        passed=within and worst.max_rel <= tolerance,
    )


def _table(rows: list[Comparison]) -> str:
    from hybridc.report.table import Column, format_us, render_table

    columns = (
        Column("GPU budget", numeric=True),
        Column("allocated", numeric=True),
        Column("max abs error", numeric=True),
        Column("max rel error", numeric=True),
        Column("in output"),
        Column("run", numeric=True),
        Column("result"),
    )
    cells = [
        (
            "no limit" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.allocated_bytes),
            f"{row.max_abs_error:.2e}",
            f"{row.max_rel_error:.2e}",
            row.worst_output,
            format_us(row.seconds * 1e6),
            "PASS" if row.passed else "FAIL",
        )
        for row in rows
    ]
    return "\n".join(render_table(columns, cells))


def _failure(rows: list[Comparison], model: Path, tolerance: float) -> InternalError:
    row = next(row for row in rows if not row.passed)
    budget = _at_budget(row.budget_bytes)
    if row.max_rel_error > tolerance:
        what = f"{budget} output {row.worst_output!r} is off by {row.max_rel_error:.2e} of its scale"
        return InternalError("HC910", f"{what}, more than {tolerance:g}", where=str(model))
    what = f"{budget} the GPU held {format_bytes(row.allocated_bytes)}"
    return InternalError("HC911", what, where=str(model))


def _at_budget(budget_bytes: int | None) -> str:
    return "without a limit" if budget_bytes is None else f"at a budget of {format_bytes(budget_bytes)}"


def _finite(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: an error without bound becomes null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _parse_tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = math.nan
    if not 0 <= tolerance < math.inf:
        raise UsageError("HC513", f"invalid tolerance {text!r}", remedy="give a number such as 1e-4")
    return tolerance
