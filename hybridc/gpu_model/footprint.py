"""How many bytes a launch moves between L2 and the GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridc.gpu_model import memory
from hybridc.gpu_model.sass.code import Code, Instruction
from hybridc.gpu_model.sass.interpreter import Interpreter, Launch
from hybridc.gpu_model.sass.operands import COPIES
from hybridc.gpu_model.trace import Loop, Trace

_READS = COPIES | {"LDG", "LD"}
_WRITES = frozenset({"STG", "ST", "RED", "ATOM", "ATOMG"})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between L2 and memory, of one wave of blocks."""

    read_bytes: float
    written_bytes: float


def wave_traffic(code: Code, launch: Launch, blocks: int, loop: Loop, trace: Trace) -> Traffic:
    """Traffic of the launch's first `blocks` blocks, which run at once: each sector counts once.

    They are taken to be at the same turn of the loop that was cut, and each turn to touch as many new sectors
    as those kept do on the average. What follows the loop is that of `trace`, of some of these blocks,
    times as many.
    """
    indices = [launch.block_index(number) for number in range(blocks)]
    limit = loop.first_cut if loop.end >= 0 else None
    read = _read_sectors(code, launch, indices, limit) * loop.repeats
    traced = trace.warps // trace.warps_of_block
    after = _distinct(trace, _READS, epilogue=True) if loop.end >= 0 else 0
    written = _distinct(trace, _WRITES, epilogue=False)
    factor = memory.SECTOR * blocks / traced
    return Traffic(memory.SECTOR * read + factor * after, factor * written)


def launch_bytes(waves: list[tuple[float, Traffic]], buffer_bytes: int, l2_bytes: int) -> float:
    """Traffic of all waves, given as (how often, traffic): what has been read before is read again unless
    L2 keeps it.

    The caches are empty at first. Of bytes read again, L2 has as large a share as it can hold of all that
    are read.
    """
    read = sum(count * traffic.read_bytes for count, traffic in waves)
    written = sum(count * traffic.written_bytes for count, traffic in waves)
    first = min(read, float(buffer_bytes)) if buffer_bytes else read
    kept = min(1.0, l2_bytes / first) if first else 1.0
    return first + (read - first) * (1 - kept) + written


def _read_sectors(code: Code, launch: Launch, blocks: list[tuple[int, int, int]], limit: int | None) -> int:
    """Distinct sectors that blocks read in their first steps."""

    def wanted(step: int, instruction: Instruction) -> bool:
        return instruction.opcode in _READS

    found = [np.zeros(0, np.int64)]
    for number, step in enumerate(Interpreter(code, launch, blocks).run(wanted)):
        if limit is not None and number >= limit:
            break
        if step.addresses is not None and step.instruction.opcode in _READS:
            addresses = step.addresses if step.active is None else step.addresses[step.active]
            last = addresses + step.instruction.bytes - 1
            found.append(np.unique(np.concatenate([addresses, last]) // memory.SECTOR))
    return len(np.unique(np.concatenate(found)))


def _distinct(trace: Trace, opcodes: frozenset[str], *, epilogue: bool) -> float:
    """Distinct sectors that a trace's accesses touch: all of them, or those that follow the loop."""
    within, after = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, step in enumerate(trace.steps):
        if step.instruction.opcode in opcodes and step.access is not None and step.access.sectors is not None:
            (within if number < trace.loop.first_cut else after).append(np.unique(step.access.sectors))
    counts = [int((np.unique(np.concatenate(parts)) != memory.NONE).sum()) for parts in (within, after)]
    return counts[1] if epilogue else counts[0] * trace.loop.repeats + counts[1]
