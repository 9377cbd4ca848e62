"""Times of scheduled GPU functions by the model of GPU times, for the planner to weigh.

A data sheet's peak is what no kernel reaches. Where nobody has measured what the family of a kernel reaches,
the loops of its schedule say how much it computes, loads and waits (`hybridc/gpu_model/`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import tvm

from hybridc.compile_cache import Cache, content_of, remembered
from hybridc.gpu_model.architecture import ARCHITECTURES
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.ir import Device
from hybridc.machine import Machine, Processor
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.rule import Scheduled
from hybridc.targets import Target


def estimated_us(
    scheduled: Mapping[tuple[str, Device], Scheduled], machine: Machine, target: Target, cache: Cache
) -> dict[tuple[str, Device], float]:
    """Microseconds of a call, launches included, of the GPU functions that can be estimated.

    Left out are all where the profile does not say how the GPU is built, or the model does not know its
    architecture, and those without a time: TVM cannot lower them, or a block does not fit the GPU.
    """
    gpu = machine.gpu
    if gpu.chip is None or gpu.chip.architecture not in ARCHITECTURES:
        return {}
    times = {
        key: _remembered_us(made, gpu, target, cache)
        for key, made in scheduled.items()
        if key[1] is Device.GPU
    }
    return {key: us for key, us in times.items() if math.isfinite(us)}


def _remembered_us(made: Scheduled, gpu: Processor, target: Target, cache: Cache) -> float:
    def parts() -> Iterator[str]:
        yield from ("gpu time", content_of(gpu), repr(target), tvm.ir.save_json(made.function))

    return remembered(cache, lambda: _us(made, gpu, target), parts())


def _us(made: Scheduled, gpu: Processor, target: Target) -> float:
    """Infinite where there is no time."""
    works = attempt(
        "the model of GPU times",
        lambda: work_of_function(lowered_for_gpu(made.function, cuda_target(target))),
    )
    if not works:
        return math.inf
    launches_us = gpu.launch_us + (len(works) - 1) * gpu.next_launch_us
    return launches_us + sum(estimate_fast(work, gpu).us for work in works)
