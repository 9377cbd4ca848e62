"""A part of `training.py`: steps of bf16 products against float32 ones, and against PyTorch's in bf16.

torch runs under its own autocast, whose products are oneDNN's in bf16; parameters are float32 with either.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hybridc.options import BF16, FP32, CompileOptions
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.targets import parse_target
from hybridc.training.compile import CompiledTraining, compile_training
from hybridc.training.session import TrainingSession
from tests.support.training_cases import DISTINCT_BATCHES, Case
from training import runs
from training.steps import build

NETWORKS: dict[str, Case] = {name: runs.SPEED[name] for name in ("cifar_quick", "atacworks")}
DIGITS = "digits"
ENGINES = ("hybridc", "hybridc_bf16", "torch_bf16")
LOSS_TOLERANCE = 0.01
LEAST_SPEED = {"atacworks": {"hybridc": 1.3, "torch_bf16": 3.0}}
"""Of a bf16 step, as a multiple of those of the others."""


def bf16(names: Sequence[str], targets: str) -> Iterator[dict[str, Any]]:
    """Times of a step in processes that alternate; losses after the same steps, from the same parameters.

    For each of the targets, which commas separate.
    """
    for target, name in itertools.product(targets.split(","), names):
        if name == DIGITS:
            yield {"model": name, "target": target} | _digits(target)
            continue
        case = NETWORKS[name]
        model = build(name, **case.arguments)
        with tempfile.TemporaryDirectory() as folder:
            made = compile_both(model, case, name, target, Path(folder))
            onnx.save_model(model, Path(folder) / "model.onnx")
            runs.save_batches(model, case, Path(folder))
            times = runs.step_times(name, folder, ENGINES)
            losses = {
                precision: runs.run_worker("losses", folder, engine)["losses"]
                for precision, engine in ((FP32, "hybridc"), (BF16, "hybridc_bf16"))
            }
        median = {engine: statistics.median(times[engine]) for engine in ENGINES}
        ours = median["hybridc_bf16"]
        kernels = made.step.graphs[-1].kernels
        yield {
            "model": name,
            "target": target,
            "batch": case.arguments["batch"],
            "ms": median,
            "speed": {engine: median[engine] / ours for engine in ENGINES if engine != "hybridc_bf16"},
            "steps": {engine: len(times[engine]) for engine in ENGINES},
            "bf16_kernels": sum(kernel.precision == BF16 for kernel in kernels),
            "fp32_products": sorted({k.precision_note for k in kernels if k.precision_note}),
            "loss": {precision: float(np.mean(found)) for precision, found in losses.items()},
        } | _compared(*(float(np.mean(losses[p])) for p in (FP32, BF16)))


def _digits(target: str) -> dict[str, Any]:
    found = {p: runs.run_worker("digits", target, p) for p in (FP32, BF16)}
    return {
        "accuracy": {p: row["accuracy"] for p, row in found.items()},
        "loss": {p: row["loss"] for p, row in found.items()},
    } | _compared(*(found[p]["loss"] for p in (FP32, BF16)))


def _compared(fp32: float, bf16: float) -> dict[str, float]:
    return {"loss_error": abs(bf16 / fp32 - 1)}


def compile_both(
    model: onnx.ModelProto, case: Case, name: str, target: str, folder: Path
) -> CompiledTraining:
    """In both precisions, for the engines of `runs.py`; returns the one in bf16."""
    spec = TrainingSpec(parse_loss(case.loss), parse_optimizer(runs.curve_spec(name)))
    for engine, precision in (("hybridc", FP32), ("hybridc_bf16", BF16)):
        options = CompileOptions(target=parse_target(target), precision=precision)
        made = compile_training(model, folder / runs.ARTIFACTS[engine], options, spec)
    return made


def losses_worker(folder: str, engine: str) -> dict[str, Any]:
    """The losses of the last round through the batches, one of each, after `runs.STEPS` steps."""
    given = [dict(np.load(Path(folder) / f"batch{i}.npz")) for i in range(DISTINCT_BATCHES)]
    with TrainingSession(Path(folder) / runs.ARTIFACTS[engine], threads=2) as session:
        names = [port.name for port in session.inputs]
        losses = [
            session.step({n: feeds[n] for n in names}, {n: v for n, v in feeds.items() if n not in names})
            for feeds in (given[step % DISTINCT_BATCHES] for step in range(runs.STEPS))
        ]
    return {"losses": losses[-DISTINCT_BATCHES:]}


def bf16_passed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether losses, accuracies and speeds are good enough."""
    return all(
        row["loss_error"] <= LOSS_TOLERANCE
        and row.get("accuracy", {}).get(BF16, 1.0) >= runs.DIGITS_ACCURACY
        and all(row["speed"][e] >= least for e, least in LEAST_SPEED.get(row["model"], {}).items())
        for row in rows
    )


runs.WORKERS["losses"] = losses_worker
