"""What a compilation is to measure, as its options ask."""

from __future__ import annotations

from dataclasses import replace

from hybridc.calibrate.free_memory import arena_budget_bytes
from hybridc.calibrate.profile import profiler_of
from hybridc.calibrate.rounding import rounding_errors_of
from hybridc.options import Budget, CompileOptions
from hybridc.passes.phases import ImportedNetwork
from hybridc.passes.schedule import Chooser
from hybridc.progress import Progress
from hybridc.runtime.staging import arena_limit_bytes


def with_free_memory(options: CompileOptions) -> CompileOptions:
    """With bytes instead of `auto` among the budgets. Raises DeviceError HC402 without a GPU."""
    if not any(budget.is_auto for budget in options.gpu_memory):
        return options
    measured = Budget(size_bytes=arena_budget_bytes())
    budgets = tuple(measured if budget.is_auto else budget for budget in options.gpu_memory)
    return replace(options, gpu_memory=budgets)


def with_measurements(
    network: ImportedNetwork, progress: Progress, chooser: Chooser | None = None
) -> ImportedNetwork:
    """The network with what the options ask to measure, the free memory of the GPU among it, and the limit of
    the host's arena.

    `chooser` measures the tiles of CPU kernels. Raises DeviceError HC401 if this processor cannot run what
    there is to measure, HC402 if the GPU's free memory is asked for and there is no GPU.
    """
    options = network.job.options
    weight_bytes = [weight.nbytes for weight in network.program.weights.values()]
    job = replace(
        network.job,
        options=with_free_memory(options),
        host_arena_bytes=arena_limit_bytes(weight_bytes, options.host_memory_bytes),
        rounding=rounding_errors_of(options, progress, network.job.sizes),
        chooser=chooser,
        profiler=profiler_of(options, progress),
    )
    return replace(network, job=job)
