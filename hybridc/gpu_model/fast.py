"""Estimated time of a kernel in closed form, from counts: microseconds to compute, for choices among many
kernels.

Which counts there are says `Work`; `tir.py` reads them off TVM's loops, `work.py` off machine code.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.gpu_model.architecture import PARTITIONS, WARP, Architecture, architecture
from hybridc.gpu_model.chip import L2_BYTES_PER_CYCLE, MEMORY_CYCLES, bandwidth_us, chip_of, tensor_rates
from hybridc.machine import Chip, Processor

ROUND_CYCLES = 200.0
"""Of each turn of the main loop that nothing overlaps if only one block is resident: latencies of memory and
barriers. Fitted to the kernels of siboehm/SGEMM_CUDA on an RTX A6000."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch does; counts are of one block unless said otherwise."""

    blocks: int
    threads: int
    """Of a block."""
    registers: int
    """Of a thread."""
    shared_bytes: int
    instructions: float
    """Of all its warps, whatever they do."""
    fp32: float
    """Warps' instructions on the pipes of 32-bit floating point."""
    special: float
    """Warps' transcendental functions."""
    tensor_multiplies: float
    """Multiply-adds on tensor cores of 16-bit floats, or other floats by the time that they take."""
    lsu_cycles: float
    """Of the load/store unit, bank conflicts and uncoalesced accesses included."""
    l2_sectors: float
    rounds: float
    """How often a warp waits for global memory, one time after the other."""
    memory_bytes: float
    """Of the launch, between L2 and memory."""
    integer_multiplies: float = 0.0
    """Multiply-adds on tensor cores of 8-bit integers."""


@dataclass(frozen=True, slots=True)
class FastEstimate:
    us: float
    """On the GPU, without the cost of a launch."""
    bound_by: str
    """`memory`, `compute`, `load/store`, `l2` or `latency`."""
    blocks_per_multiprocessor: int
    waves: float


def estimate_fast(work: Work, processor: Processor) -> FastEstimate:
    """The time of one launch with cold caches. An infinite time where a block does not fit.

    Arithmetic and accesses to shared memory and L1 are taken not to overlap, but at the boost clock: a
    kernel in which they do overlap draws more power, and the clock falls. Raises UsageError HC542 for a
    processor whose profile has no `chip`, HC543 for an unknown architecture.
    """
    chip = chip_of(processor)
    model = architecture(chip.architecture)
    resident = model.occupancy(work.registers, work.shared_bytes, work.threads)
    if not resident:
        return FastEstimate(float("inf"), "registers or shared memory", 0, float("inf"))
    full, rest = divmod(work.blocks, chip.multiprocessors * resident)
    waves = [(full, resident), (min(1, rest), -(-rest // chip.multiprocessors))]
    parts: dict[str, float] = {}
    for repeats, blocks in waves:
        for name, cycles in _wave_cycles(work, model, chip, blocks).items():
            parts[name] = parts.get(name, 0.0) + repeats * cycles
    cycles = max(parts["compute"] + parts["load/store"], parts["issue"], parts["l2"]) + parts["overhead"]
    cycles = max(cycles, parts["latency"])
    core_us = cycles / chip.clock_ghz / 1e3
    memory_us = bandwidth_us(work.memory_bytes, processor)
    parts = {name: parts[name] for name in ("compute", "load/store", "l2", "latency")}
    bound = "memory" if memory_us > core_us else max(parts, key=lambda name: parts[name])
    return FastEstimate(
        max(core_us, memory_us), bound, resident, work.blocks / (chip.multiprocessors * resident)
    )


def _wave_cycles(work: Work, model: Architecture, chip: Chip, blocks: int) -> dict[str, float]:
    """Cycles that a multiprocessor needs for so many blocks at once, part by part."""
    fp32 = work.fp32 * WARP / (16 * model.fp32_pipes * PARTITIONS)
    special = work.special * WARP / (4 * PARTITIONS)
    rates = tensor_rates(chip)
    tensor = work.tensor_multiplies / rates.floats + work.integer_multiplies / rates.integers
    return {
        "compute": blocks * (max(fp32, special) + tensor / PARTITIONS),
        "load/store": blocks * work.lsu_cycles,
        "issue": blocks * work.instructions / PARTITIONS,
        "l2": blocks * work.l2_sectors * 32 / L2_BYTES_PER_CYCLE,
        "overhead": work.rounds * ROUND_CYCLES / max(blocks, 1),
        "latency": work.rounds * MEMORY_CYCLES,
    }
