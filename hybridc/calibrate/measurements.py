"""What a compilation is to measure, as its options ask."""

from __future__ import annotations

from dataclasses import replace

from hybridc.calibrate.profile import profiler_of
from hybridc.calibrate.rounding import rounding_errors_of
from hybridc.passes.phases import ImportedNetwork
from hybridc.passes.schedule import Chooser
from hybridc.progress import Progress
from hybridc.runtime.staging import arena_limit_bytes


def with_measurements(
    network: ImportedNetwork, progress: Progress, chooser: Chooser | None = None
) -> ImportedNetwork:
    """The network with what the options ask to measure, and the limit of the host's arena.

    `chooser` measures the tiles of CPU kernels. Raises DeviceError HC401 if this processor cannot run what
    there is to measure.
    """
    options = network.job.options
    weight_bytes = [weight.nbytes for weight in network.program.weights.values()]
    job = replace(
        network.job,
        host_arena_bytes=arena_limit_bytes(weight_bytes, options.host_memory_bytes),
        rounding=rounding_errors_of(options, progress),
        chooser=chooser,
        profiler=profiler_of(options, progress),
    )
    return replace(network, job=job)
