"""Parts of `training.py` that plan training steps: the largest batch and depth, and ResNet-1517."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from hybridc import models
from hybridc.compiler import compile_model
from hybridc.machine import load_machine
from hybridc.options import Budget, CompileOptions
from hybridc.passes.planner.search.partition import all_gpu_peak_bytes
from hybridc.targets import parse_target
from training.steps import Step, build, cut_up, programs_of, smallest_on_gpu, step_of

SMALL_DEVICE_BYTES = 512 << 20
FACTOR = 8
"""How many times the batch, or the blocks, that fit without offloading, recomputation or the CPU."""
FIRST = {"batch": 2, "blocks": 16}
"""Sizes to begin with."""


def batch(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The largest batch of ResNet-50, and depth of a bottleneck ResNet, that a small device can train.

    Without offloading, recomputation or kernels on the CPU: the largest that fits. With a plan: whether
    `FACTOR` times as much fits with every kernel on the GPU.
    """
    makers: dict[str, Callable[[int], onnx.ModelProto]] = {
        "batch": lambda n: build("resnet50", batch=n),
        "blocks": lambda n: build(f"resnet{3 * n + 2}", batch=1),
    }
    for what in names:
        make = makers[what]

        def plain_bytes(size: int, make: Callable[[int], onnx.ModelProto] = make) -> int:
            return _plain_bytes(step_of("", make(size), machine))

        plain = largest(FIRST[what], plain_bytes)
        planned = _planned_bytes(step_of("", make(FACTOR * plain), machine))
        yield {
            "model": what,
            "plain": plain,
            "planned": FACTOR * plain,
            "planned_bytes": planned,
            "device_bytes": SMALL_DEVICE_BYTES,
            "fits": planned <= SMALL_DEVICE_BYTES,
        }


def largest(first: int, needed_bytes: Callable[[int], int]) -> int:
    """The largest size that fits the small device, where bytes grow with the size almost linearly.

    Interpolates between sizes that fit and sizes that do not; 0 if not even the first fits.
    """
    known = {size: needed_bytes(size) for size in (first, 2 * first)}
    while True:
        (low, low_bytes), (high, high_bytes) = sorted(known.items())[-2:]
        slope = (high_bytes - low_bytes) / (high - low)
        guess = int(low + (SMALL_DEVICE_BYTES - low_bytes) / slope)
        fitting = max((size for size, needed in known.items() if needed <= SMALL_DEVICE_BYTES), default=0)
        failing = min((size for size, needed in known.items() if needed > SMALL_DEVICE_BYTES), default=2**30)
        if failing - fitting == 1:
            return fitting
        guess = min(max(guess, fitting + 1), failing - 1)
        known[guess] = needed_bytes(guess)


def _plain_bytes(step: Step) -> int:
    """Everything on the GPU, nothing copied twice."""
    return all_gpu_peak_bytes(step.graph, step.machine)


def _planned_bytes(step: Step) -> int:
    """Every kernel still on the GPU, cut up if it must be."""
    whole = smallest_on_gpu(step, step.graph)
    if whole <= SMALL_DEVICE_BYTES:
        return whole
    return smallest_on_gpu(step, cut_up(step, SMALL_DEVICE_BYTES // 2))


def batch_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["fits"] for row in rows)


MOST_DEEP_SECONDS = 180.0


def deep(names: Sequence[str], machine: str, seconds: float) -> Iterator[dict[str, Any]]:
    """ResNet-1517 at full width, from the model's file to the library of its step."""
    with tempfile.TemporaryDirectory() as folder:
        path = models.export("resnet", Path(folder) / "resnet1517.onnx", depth=1517, batch=16)
        start = time.perf_counter()
        options = CompileOptions(
            target=parse_target("cuda+avx2"),
            gpu_memory=(Budget(size_bytes=12 << 30),),
            machine=load_machine(machine),
            plan_seconds=seconds,
            cache=False,
        )
        programs = programs_of(path)
        imported = time.perf_counter()
        done = compile_model(programs.step, Path(folder) / "step.hyb", options)
        assert done.plan is not None
        yield {
            "model": "resnet1517",
            "kernels": len(done.graphs[-1].kernels),
            "differentiate_seconds": imported - start,
            **{f"{part}_seconds": value for part, value in done.seconds.items()},
            "seconds": time.perf_counter() - start,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def deep_passed(rows: Sequence[dict[str, Any]]) -> bool:
    return all(row["seconds"] <= MOST_DEEP_SECONDS for row in rows)
