"""Estimated time of a kernel on a GPU, from its machine code.

The blocks that one multiprocessor runs at once are executed as far as addresses go, and simulated; the grid
is so many waves of such blocks and one of what remains. Memory's bandwidth is a limit beside that.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.errors import UsageError
from hybridc.gpu_model.architecture import PARTITIONS, WARP, architecture
from hybridc.gpu_model.chip import (
    CLOCK,
    L2_BYTES_PER_CYCLE,
    L2_CYCLES,
    MEMORY_CYCLES,
    bandwidth_us,
    chip_of,
    tensor_rates,
)
from hybridc.gpu_model.counters import Counters, count
from hybridc.gpu_model.footprint import Traffic, launch_bytes, wave_traffic
from hybridc.gpu_model.kernel import Call
from hybridc.gpu_model.simulate import Pace, Speeds, simulate
from hybridc.gpu_model.trace import Loop, main_loop, trace_blocks
from hybridc.gpu_model.units import Unit, costs_of
from hybridc.machine import Chip, Processor


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a launch."""

    us: float
    """On the GPU, without the cost of a launch."""
    cycles: float
    """Of the multiprocessor that works longest, without limits of memory."""
    peak_cycles: float
    """Those that its share of the floating-point operations would take at peak."""
    launch_us: float
    bound_by: str
    """What would have to be faster: a unit, L2, memory, or `latency` where nothing is busy most of the
    time."""
    busy: dict[str, float]
    """Shares of the time that units, L2 and memory are busy."""
    share_of_peak: float
    """Floating-point operations over those of the peak, of tensor cores if there are any on them."""
    blocks_per_multiprocessor: int
    limited_by: str
    occupancy: float
    """Share of a multiprocessor's warps that are resident."""
    waves: float
    memory_bytes: float
    """Between L2 and memory."""
    counters: Counters


@dataclass(frozen=True, slots=True)
class _Wave:
    """So many waves alike."""

    repeats: int
    pace: Pace
    traffic: Traffic


def estimate(call: Call, processor: Processor) -> Estimate:
    """The time of one launch with cold caches.

    Raises UsageError HC542 for a processor whose profile has no `chip`, HC543 for an unknown architecture,
    HC546 for a block that no multiprocessor has room for; DeviceError HC403 without g++.
    """
    chip = chip_of(processor)
    model = architecture(chip.architecture)
    registers, launch = call.kernel.resources.registers, call.launch
    resident = model.occupancy(registers, call.shared_bytes, launch.threads)
    if not resident:
        what = f"{launch.threads} threads of {registers} registers and {call.shared_bytes} shared bytes"
        raise UsageError("HC546", f"a block of {what} does not fit a multiprocessor of {model.name}")
    loop = main_loop(call.kernel.code, launch)
    full, rest = divmod(launch.blocks, chip.multiprocessors * resident)
    waves, counters = [], None
    for repeats, blocks in ((full, resident), (min(1, rest), -(-rest // chip.multiprocessors))):
        if repeats:
            wave, found = _wave(call, chip, loop, repeats, blocks)
            waves.append(wave)
            counters = counters or found
    assert counters is not None
    return _combined(call, processor, chip, waves, counters, resident)


def _wave(call: Call, chip: Chip, loop: Loop, repeats: int, blocks: int) -> tuple[_Wave, Counters]:
    """A wave of `blocks` blocks on each multiprocessor, of which the first one's are simulated."""
    launch, code, count_of = call.launch, call.kernel.code, chip.multiprocessors
    model = architecture(chip.architecture)
    in_wave = min(launch.blocks, blocks * count_of)
    # blocks are handed out to one multiprocessor after the other
    indices = [launch.block_index(number) for number in range(0, in_wave, count_of)]
    trace = trace_blocks(code, launch, indices, loop, model)
    traffic = wave_traffic(code, launch, in_wave, loop, trace)
    counters = count(trace)
    asked = counters.sectors * in_wave * 32
    from_memory = min(1.0, traffic.read_bytes / asked) if asked else 1.0
    speeds = Speeds(
        model.fp32_pipes,
        model.l1_bytes(call.shared_bytes, blocks),
        L2_CYCLES + from_memory * (MEMORY_CYCLES - L2_CYCLES),
        L2_BYTES_PER_CYCLE,
    )
    pace = simulate(trace, costs_of(code, model, tensor_rates(chip)), speeds)
    return _Wave(repeats, pace, traffic), counters


def _combined(
    call: Call,
    processor: Processor,
    chip: Chip,
    waves: list[_Wave],
    counters: Counters,
    resident: int,
) -> Estimate:
    model, blocks = architecture(chip.architecture), call.launch.blocks
    cycles = sum(wave.repeats * wave.pace.cycles for wave in waves)
    peak_cycles = _peak_cycles(counters, chip) * blocks / chip.multiprocessors
    ghz = chip.clock_ghz * CLOCK.share(cycles, peak_cycles)
    core_us = cycles / ghz / 1e3
    traffic = [(float(wave.repeats), wave.traffic) for wave in waves]
    memory_bytes = launch_bytes(traffic, call.buffer_bytes, chip.l2_bytes)
    memory_us = bandwidth_us(memory_bytes, processor)
    us = max(core_us, memory_us)
    busy = _busy(waves, cycles, core_us / us) | {"memory": memory_us / us}
    return Estimate(
        us=us,
        cycles=cycles,
        peak_cycles=peak_cycles,
        launch_us=processor.launch_us,
        bound_by=max(busy, key=lambda name: busy[name]) if max(busy.values()) > 0.5 else "latency",
        busy=busy,
        share_of_peak=peak_cycles / chip.clock_ghz / 1e3 / us,
        blocks_per_multiprocessor=resident,
        limited_by=model.limited_by(call.kernel.resources.registers, call.shared_bytes, call.launch.threads),
        occupancy=resident * -(-call.launch.threads // WARP) / model.max_warps,
        waves=blocks / (chip.multiprocessors * resident),
        memory_bytes=memory_bytes,
        counters=counters,
    )


def _busy(waves: list[_Wave], cycles: float, share: float) -> dict[str, float]:
    """Average over the waves; the load/store unit's three kinds of work are one."""
    totals: dict[str, float] = {}
    for wave in waves:
        weight = share * wave.repeats * wave.pace.cycles / cycles
        for unit, busy in wave.pace.busy.items():
            one = unit in (Unit.SHARED, Unit.GLOBAL, Unit.COPY)
            name = "load/store" if one else unit.name.lower()
            totals[name] = totals.get(name, 0.0) + weight * busy
        totals["l2"] = totals.get("l2", 0.0) + weight * wave.pace.l2_busy
    return totals


def _peak_cycles(counters: Counters, chip: Chip) -> float:
    """Cycles of a multiprocessor that a block's arithmetic takes at least."""
    model = architecture(chip.architecture)
    rates = tensor_rates(chip)
    tensor = counters.tensor_flops / rates.floats + counters.tensor_integer_operations / rates.integers
    plain = 2 * PARTITIONS * 16 * model.fp32_pipes
    return counters.flops / plain + tensor / (2 * PARTITIONS)
