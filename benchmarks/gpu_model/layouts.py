"""What channels-last activations gain on a GPU: a network with planes, and with the layouts that are chosen.

Layouts are chosen by the closed form of the model. What they gain is estimated from machine code.
"""

from __future__ import annotations

from typing import Any

from gpu_model.suite import SuiteKernel, kernels_of_model, model_of, target_of
from hybridc.gpu_model.estimate import estimate
from hybridc.gpu_model.fast import estimate_fast
from hybridc.gpu_model.tir import work_of_function
from hybridc.machine import Processor
from hybridc.schedules.channels_last import CHANNELS_LAST
from hybridc.schedules.cuda.core.launch import cuda_target, lowered_for_gpu


def layout_row(network: str, processor: Processor) -> dict[str, Any]:
    """The times of all kernels of a network, in microseconds and without launches, in both forms."""
    precision = network.partition("@")[2]
    forms = {
        name: kernels_of_model(model_of(network), processor, precision, layouts=layouts)
        for name, layouts in (("planes", False), ("chosen", True))
    }
    chosen = forms["chosen"]
    return {
        "network": network,
        "gpu": processor.name,
        "kernels": sum(made.calls for made in chosen),
        "channels_last": sum(made.calls for made in chosen if CHANNELS_LAST in (made.function.attrs or {})),
        **{f"{name}_us": round(_estimated_us(kernels, processor), 1) for name, kernels in forms.items()},
        **{f"{name}_fast_us": round(_fast_us(kernels, processor), 1) for name, kernels in forms.items()},
    }


def _estimated_us(kernels: list[SuiteKernel], processor: Processor) -> float:
    return sum(
        made.calls * sum(estimate(launch, processor).us for launch in made.launches) for made in kernels
    )


def _fast_us(kernels: list[SuiteKernel], processor: Processor) -> float:
    target = cuda_target(target_of(processor))
    return sum(
        made.calls * estimate_fast(work, processor).us
        for made in kernels
        for work in work_of_function(lowered_for_gpu(made.function, target))
    )
