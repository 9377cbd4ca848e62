"""What both estimates take a GPU to be able to do beyond its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import architecture
from hybridc.machine import Chip, Processor

L2_CYCLES, MEMORY_CYCLES = 220.0, 470.0
"""From a miss of L1 until a sector comes from L2 or from memory. Microbenchmarks give 236 for L2 on an RTX
2070 (sjfeng1999/gpu-arch-microbenchmark) and about 200 on an A100; memory adds some 150 ns. Customary."""
L2_BYTES_PER_CYCLE = 32.0
"""What L2 gives each multiprocessor: a sector a cycle. Data sheets do not say it. Customary."""
_BANDWIDTH_SHARE = 0.85
"""Of the memory's nominal bandwidth that copies reach. Customary."""


@dataclass(frozen=True, slots=True)
class SustainedClock:
    """The clock under load as a share of the boost clock: it falls with the share of peak that is reached,
    for the power that this takes. Fitted to the eleven kernels of siboehm/SGEMM_CUDA on an RTX A6000,
    nothing else, by `fitted_clock` of benchmarks/gpu_model/ladders.py."""

    idle: float = 1.02
    fall: float = 0.34

    def share(self, cycles: float, peak_cycles: float) -> float:
        """For work that takes `cycles` and would take `peak_cycles` at peak: idle - fall x their ratio."""
        return self.idle - self.fall * min(1.0, peak_cycles / cycles)


CLOCK = SustainedClock()


@dataclass(frozen=True, slots=True)
class TensorRates:
    """Multiply-adds of matrix instructions that a partition of a multiprocessor starts in a cycle."""

    floats: float
    """fp16 with float32 sums. Data sheets of all these GPUs give tf32 half of it."""
    integers: float
    """8 bits with int32 sums."""


def tensor_rates(chip: Chip) -> TensorRates:
    """The rates of a GPU's tensor cores. One without them takes the pipes of fp16, a pair of products in each
    lane, and four of integers, as `dp4a` does. Raises UsageError HC543 for an unknown architecture."""
    lanes = architecture(chip.architecture).half2_lanes
    floats = chip.tensor_multiplies or 2.0 * lanes
    return TensorRates(floats, chip.integer_multiplies or 2.0 * floats)


def chip_of(processor: Processor) -> Chip:
    """How a GPU is built. Raises UsageError HC542 if its profile does not say it."""
    if processor.chip is None:
        what = f"the profile of {processor.name} does not say how the GPU is built"
        raise UsageError("HC542", what, remedy="add `chip`, as the profile rtx-3090 has it")
    return processor.chip


def bandwidth_us(size_bytes: float, processor: Processor) -> float:
    """Microseconds in which memory moves so many bytes."""
    return size_bytes / (processor.bandwidth_gb_s * _BANDWIDTH_SHARE * 1e3)
