"""What a trace says of a kernel's quality: sectors, bank conflicts, widths of accesses, instructions by
unit."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.gpu_model import memory
from hybridc.gpu_model.architecture import WARP
from hybridc.gpu_model.trace import Trace, TracedStep
from hybridc.gpu_model.units import Unit, is_integer, tensor_products, unit_of

_FLOPS = {
    "FFMA": 2,
    "FMUL": 1,
    "FADD": 1,
    "HFMA2": 4,
    "HMUL2": 2,
    "HADD2": 2,
    "DFMA": 2,
    "DADD": 1,
    "DMUL": 1,
}
"""Of a thread."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of one block's warps, all turns of loops included."""

    instructions: float
    flops: float
    """By floating-point pipes: a multiply-add counts as two."""
    tensor_flops: float
    tensor_integer_operations: float
    """As `tensor_flops`, of 8-bit integers."""
    shared_loads: float
    multiply_adds: float
    """Instructions, not lanes."""
    sectors: float
    least_sectors: float
    """Of global memory, asked of L1."""
    wavefronts: float
    least_wavefronts: float
    """Of shared memory."""
    load_bytes: float
    wide_load_bytes: float
    """Of global loads, and of those by 128 bits a thread."""
    local_accesses: float

    @property
    def tensor_operations(self) -> float:
        """Of tensor cores, on numbers of any type."""
        return self.tensor_flops + self.tensor_integer_operations

    @property
    def sector_ratio(self) -> float:
        """Sectors asked for over those that would do; 1 is best."""
        return self.sectors / self.least_sectors if self.least_sectors else 1.0

    @property
    def bank_conflict_factor(self) -> float:
        """Wavefronts over those that would do; 1 is best."""
        return self.wavefronts / self.least_wavefronts if self.least_wavefronts else 1.0

    @property
    def wide_load_share(self) -> float:
        """Of the bytes loaded from global memory, those by 128 bits a thread."""
        return self.wide_load_bytes / self.load_bytes if self.load_bytes else 1.0


def count(trace: Trace) -> Counters:
    """Counters of a trace, per block."""
    totals = dict.fromkeys(Counters.__slots__, 0.0)
    for number, step in enumerate(trace.steps):
        weight = trace.weight(number)
        for name, value in _of_step(step).items():
            totals[name] += weight * value
    blocks = trace.warps / trace.warps_of_block
    return Counters(**{name: value / blocks for name, value in totals.items()})


def _of_step(step: TracedStep) -> dict[str, float]:
    instruction, access, warps = step.instruction, step.access, float(step.warps.sum())
    values = {
        "instructions": warps,
        "flops": warps * WARP * _FLOPS.get(instruction.opcode, 0),
        "multiply_adds": warps * (instruction.opcode in ("FFMA", "HFMA2")),
        "shared_loads": warps * (instruction.opcode in ("LDS", "LDSM")),
        "local_accesses": warps * (instruction.opcode in ("LDL", "STL")),
    }
    if unit_of(instruction) is Unit.TENSOR:
        name = "tensor_integer_operations" if is_integer(instruction) else "tensor_flops"
        values[name] = warps * 2 * tensor_products(instruction)
    if access is None:
        return values
    if access.sectors is not None and access.least_sectors is not None and not values["local_accesses"]:
        values["sectors"] = float(memory.sector_counts(access.sectors).sum())
        values["least_sectors"] = float(access.least_sectors.sum())
        if instruction.opcode in ("LDG", "LD", "LDGSTS"):
            moved = values["least_sectors"] * memory.SECTOR
            values |= {"load_bytes": moved, "wide_load_bytes": moved * (instruction.bytes == 16)}
    if access.wavefronts is not None and access.least_wavefronts is not None:
        values["wavefronts"] = float(access.wavefronts.sum())
        values["least_wavefronts"] = float(access.least_wavefronts.sum())
    return values
