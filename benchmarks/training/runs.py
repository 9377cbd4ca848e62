"""Parts of `training.py` that run training steps: gradients and loss curves against PyTorch, and speed.

torch runs the same ONNX model through `tests/support/torch_reference.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401  makes tests.support importable
import numpy as np
import onnx
import torch

from hybridc.machine import load_machine
from hybridc.options import CompileOptions, parse_budgets
from hybridc.passes.training.spec import TrainingSpec, parse_loss, parse_optimizer
from hybridc.targets import native_isa, parse_target
from hybridc.training.compile import compile_training
from hybridc.training.session import TrainingSession
from tests.support.torch_reference import TorchReference
from tests.support.training_cases import (
    CASES,
    DISTINCT_BATCHES,
    TWO_OUTPUTS,
    Case,
    batches,
    compiled_gradients,
    relative_errors,
    smooth_feeds,
    torch_gradients,
)
from training.digits import digits_worker
from training.steps import build

SCRIPT = Path(__file__).parent.with_suffix(".py")
"""`training.py`, which runs a worker in a process of its own."""
LARGEST_ERROR = 1e-4
CURVE_TOLERANCE = 1e-3
STEPS = 50
BUDGETS = (100, 50, 25, 10)
LEAST_SPEED = {"cifar_quick": 1.0, "resnet18": 1.0, "atacworks": 2.0}
DIGITS_ACCURACY, DIGITS_SECONDS = 0.98, 60.0
ENGINES = ("hybridc", "torch")
ARTIFACTS = {"hybridc": "step.hyb", "hybridc_bf16": "step_bf16.hyb"}
"""Of engines that are ours, in a folder."""
ROUNDS, ROUNDS_SECONDS = 3, 45.0
"""Engines take turns so often; no further turn begins when the time is over."""
WORKER_SECONDS = 6.0
"""From which on a turn takes no further step."""

CURVES: dict[str, Case] = {
    "cifar_quick": Case({"batch": 16, "size": 16, "width": 8}),
    "resnet18": Case({"batch": 8, "size": 32, "width": 8, "classes": 10}),
    "encoder": Case({"batch": 8, "tokens": 8, "layers": 1, "hidden": 32, "heads": 2, "vocabulary": 50}),
}
SPEED: dict[str, Case] = {
    "cifar_quick": Case({"batch": 100}),
    "resnet18": Case({"batch": 32}),
    "atacworks": Case({"batch": 4}, TWO_OUTPUTS),
    "alexnet": Case({"batch": 16}),
}

# ----------------------------------------------------------------------------------------- gradients


def gradients(names: Sequence[str], target: str) -> Iterator[dict[str, Any]]:
    """All parameters' gradients of one step, on a batch on which no ReLU is a matter of rounding."""
    for name in names:
        case = CASES[name]
        model = build(name, **case.arguments)
        feeds = smooth_feeds(model, case)
        yield {"model": name, "target": target} | compared_gradients(model, case, feeds, target)


def compared_gradients(
    model: onnx.ModelProto, case: Case, feeds: dict[str, np.ndarray], target: str
) -> dict[str, Any]:
    loss, ours = compiled_gradients(model, case, feeds, target)
    true_loss, truth = torch_gradients(model, case, feeds, torch.float64)
    _, single = torch_gradients(model, case, feeds, torch.float32)
    errors, torch_errors = relative_errors(ours, truth), relative_errors(single, truth)
    worst = max(errors, key=lambda n: errors[n])
    return {
        "parameters": len(truth),
        "loss_error": abs(loss / true_loss - 1),
        "error": errors[worst],
        "worst": worst,
        "torch_float32_error": max(torch_errors.values()),
    }


def gradients_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["error"] <= LARGEST_ERROR for row in rows)


# -------------------------------------------------------------------------------------------- curves


def curves(names: Sequence[str], target: str) -> Iterator[dict[str, Any]]:
    """The loss over steps, on emulated GPUs of several sizes, each in a process of its own."""
    for name in names:
        case = CURVES[name]
        model = build(name, **case.arguments)
        expected = torch_curve(name, model, case)
        with tempfile.TemporaryDirectory() as folder:
            budgets = compile_for_curves(name, model, case, Path(folder))
            save_batches(model, case, Path(folder))
            curves = {share: run_curve(Path(folder), size) for share, size in budgets.items()}
        for share, curve in curves.items():
            first = curves[BUDGETS[0]]
            yield {
                "model": name,
                "percent": share,
                "budget_bytes": budgets[share],
                "peak_bytes": curve["peak_bytes"],
                "error": max(abs(a / b - 1) for a, b in zip(curve["losses"], expected, strict=True)),
                "from_100_percent": max(
                    abs(a / b - 1) for a, b in zip(curve["losses"], first["losses"], strict=True)
                ),
                "first_loss": expected[0],
                "last_loss": expected[-1],
                "seconds": curve["seconds"],
            }


def curves_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(
        max(row["error"], row["from_100_percent"]) <= CURVE_TOLERANCE
        and row["peak_bytes"] <= row["budget_bytes"]
        for row in rows
    )


CURVE_LR, CURVE_MOMENTUM = 0.005, 0.9
CURVE_RATES = {"resnet18": 0.0002}
"""The small ResNet multiplies rounding: parameters changed by 3e-6 of themselves move PyTorch's float64 curve
by up to 5 % at a rate of 0.005, and by 3e-5 at this one."""


def curve_spec(name: str) -> str:
    return f"sgd:lr={CURVE_RATES.get(name, CURVE_LR)},momentum={CURVE_MOMENTUM}"


def compile_for_curves(name: str, model: onnx.ModelProto, case: Case, folder: Path) -> dict[int, int]:
    """One artifact with a plan for each budget; returns the budgets in bytes by percent."""
    spec = TrainingSpec(parse_loss(case.loss), parse_optimizer(curve_spec(name)))
    machine = load_machine("k40")
    slow = replace(
        machine.cpu, peak_gflops=1.0, bandwidth_gb_s=1.0
    )  # else small kernels never run on the GPU
    options = CompileOptions(
        target=parse_target("cuda+avx2"),
        gpu_memory=parse_budgets(",".join(f"{share}%" for share in BUDGETS)),
        machine=replace(machine, cpu=slow),
        plan_seconds=2.0,
    )
    made = compile_training(model, folder / "step.hyb", options, spec)
    sizes = sorted((plan.budget_bytes or 0 for plan in made.step.plans), reverse=True)
    return dict(zip(BUDGETS, sizes, strict=True))


def save_batches(model: onnx.ModelProto, case: Case, folder: Path) -> None:
    for i, batch in enumerate(batches(model, case)):
        np.savez(folder / f"batch{i}.npz", allow_pickle=False, **batch)


def torch_curve(name: str, model: onnx.ModelProto, case: Case) -> list[float]:
    reference, rate = TorchReference(model), CURVE_RATES.get(name, CURVE_LR)
    optimizer = torch.optim.SGD(reference.parameters.values(), lr=rate, momentum=CURVE_MOMENTUM)
    losses, given = [], batches(model, case)
    for step in range(STEPS):
        feeds = given[step % DISTINCT_BATCHES]
        loss = case.torch_loss(reference({i.name: feeds[i.name] for i in model.graph.input}), feeds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_curve(folder: Path, gpu_bytes: int) -> dict[str, Any]:
    return run_worker("curve", str(folder), str(gpu_bytes))


def curve_worker(folder: str, gpu_bytes: str) -> dict[str, Any]:
    from hybridc import emulator

    emulator.start(int(gpu_bytes))
    given = [dict(np.load(Path(folder) / f"batch{i}.npz")) for i in range(DISTINCT_BATCHES)]
    start = time.perf_counter()
    with TrainingSession(Path(folder) / "step.hyb", gpu_memory_bytes=int(gpu_bytes)) as session:
        names = [port.name for port in session.inputs]
        losses = [
            session.step({n: feeds[n] for n in names}, {n: v for n, v in feeds.items() if n not in names})
            for feeds in (given[step % DISTINCT_BATCHES] for step in range(STEPS))
        ]
    seconds = time.perf_counter() - start
    return {"losses": losses, "peak_bytes": emulator.statistics().peak_bytes, "seconds": seconds}


# --------------------------------------------------------------------------------------------- speed


def speed(names: Sequence[str], target: str) -> Iterator[dict[str, Any]]:
    """Digits to an accuracy, then times of a step against torch's, in processes that alternate."""
    if not names or "digits" in names:
        yield {"model": "digits"} | run_worker("digits", target)
    for name in names or list(SPEED):
        if name == "digits":
            continue
        case = SPEED[name]
        model = build(name, **case.arguments)
        with tempfile.TemporaryDirectory() as folder:
            spec = TrainingSpec(parse_loss(case.loss), parse_optimizer(curve_spec(name)))
            options = CompileOptions(target=parse_target(target))
            compile_training(model, Path(folder) / "step.hyb", options, spec)
            onnx.save_model(model, Path(folder) / "model.onnx")
            save_batches(model, case, Path(folder))
            times = step_times(name, folder)
        ours, theirs = (statistics.median(times[engine]) for engine in ENGINES)
        yield {
            "model": name,
            "target": target,
            "batch": case.arguments["batch"],
            "hybridc_ms": ours,
            "torch_ms": theirs,
            "speed": theirs / ours,
            "steps": {engine: len(times[engine]) for engine in ENGINES},
        }


def step_times(name: str, folder: str, engines: Sequence[str] = ENGINES) -> dict[str, list[float]]:
    """Milliseconds of steps by engine, in rounds."""
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    start = time.perf_counter()
    for number in range(ROUNDS):
        if number and time.perf_counter() - start > ROUNDS_SECONDS:
            break
        for engine in engines:
            times[engine] += run_worker("time", name, engine, folder)["times_ms"]
    return times


def speed_passed(rows: Sequence[dict[str, Any]]) -> bool:
    digits = [row for row in rows if row["model"] == "digits"]
    return all(
        row["accuracy"] >= DIGITS_ACCURACY and row["seconds"] <= DIGITS_SECONDS for row in digits
    ) and all(row["speed"] >= LEAST_SPEED[row["model"]] for row in rows if row["model"] in LEAST_SPEED)


def time_worker(name: str, engine: str, folder: str) -> dict[str, Any]:
    """Milliseconds of ten steps behind three that warm up; of fewer, at least two, where they take long.

    With `torch_bf16` torch's own autocast chooses what is computed in bf16.
    """
    case, feeds = SPEED[name], dict(np.load(Path(folder) / "batch0.npz"))
    model = onnx.load(Path(folder) / "model.onnx")
    inputs = {i.name: feeds.pop(i.name) for i in model.graph.input}
    if engine in ARTIFACTS:
        session = TrainingSession(Path(folder) / ARTIFACTS[engine], threads=2)

        def step() -> None:
            session.step(inputs, feeds)
    else:
        torch.set_num_threads(2)
        reference = TorchReference(model, dtype=torch.float32)
        optimizer = torch.optim.SGD(reference.parameters.values(), lr=CURVE_LR, momentum=CURVE_MOMENTUM)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=engine == "torch_bf16"):
                outputs = reference(inputs)
            outputs = {name: output.float() for name, output in outputs.items()}
            case.torch_loss(outputs, feeds).backward()
            optimizer.step()

    start = time.perf_counter()
    times: list[float] = []
    while len(times) < 13 and (len(times) < 3 or time.perf_counter() - start < WORKER_SECONDS):
        before = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - before))
    return {"times_ms": times[min(3, len(times) - 2) :]}


# ------------------------------------------------------------------------------------------- workers

WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "curve": curve_worker,
    "time": time_worker,
    "digits": digits_worker,
}


def run_worker(kind: str, *arguments: str) -> dict[str, Any]:
    """One of `WORKERS` in a process of its own: an emulated GPU has one size, threads of engines spin."""
    command = [sys.executable, str(SCRIPT), "--worker", kind, *arguments]
    environment = os.environ | {"TVM_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def default_target() -> str:
    return native_isa().name
