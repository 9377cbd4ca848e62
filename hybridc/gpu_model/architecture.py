"""Multiprocessors of NVIDIA GPUs: how much of a kernel fits one, and how fast it works.

Limits are those of the CUDA C++ programming guide 13, "Compute Capabilities", table of technical
specifications; rates those of its table of arithmetic throughput.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.errors import UsageError

WARP = 32
PARTITIONS = 4
"""Of a multiprocessor: each has its scheduler, a quarter of the registers and of the arithmetic units."""
_WARP_REGISTERS = 256
"""Registers are given to warps in pieces of so many."""
_SHARED_PIECE = 128


@dataclass(frozen=True, slots=True)
class Architecture:
    """A multiprocessor. Rates are lanes of one partition that work in a cycle, unless said otherwise."""

    name: str
    max_warps: int
    max_blocks: int
    shared_bytes: int
    """Largest shared memory of all resident blocks."""
    unified_bytes: int
    """Shared memory and L1 together."""
    carveouts: tuple[int, ...]
    """KiB of it that can be set aside for shared memory."""
    system_shared_bytes: int
    """What CUDA takes of shared memory for each block."""
    fp32_pipes: int
    """Of 16 lanes each."""
    half2_lanes: int
    """Pairs of fp16 multiply-adds."""
    fp64_lanes: float
    load_store_lanes: int
    """Of the whole multiprocessor: addresses that are worked on in a cycle."""
    registers: int = 65536

    def l1_bytes(self, shared_bytes: int, blocks: int) -> int:
        """What is left for L1 when as much is set aside as the resident blocks take."""
        taken = (shared_bytes + self.system_shared_bytes) * blocks
        carveout = next((kib * 1024 for kib in self.carveouts if kib * 1024 >= taken), self.shared_bytes)
        return self.unified_bytes - carveout

    def occupancy(self, registers: int, shared_bytes: int, threads: int) -> int:
        """Blocks resident on a multiprocessor at once; 0: not even one.

        `registers` are those of a thread, `shared_bytes` those of a block of so many `threads`.
        """
        warps = -(-threads // WARP)
        pieces = max(1, -(-registers * WARP // _WARP_REGISTERS))
        # each partition gives registers to whole warps of its own
        warps_by_registers = self.registers // PARTITIONS // (pieces * _WARP_REGISTERS) * PARTITIONS
        taken = -(-(shared_bytes + self.system_shared_bytes) // _SHARED_PIECE) * _SHARED_PIECE
        by_shared = self.shared_bytes // taken if taken else self.max_blocks
        return min(self.max_blocks, self.max_warps // warps, warps_by_registers // warps, by_shared)

    def limited_by(self, registers: int, shared_bytes: int, threads: int) -> str:
        """What keeps more blocks from being resident: registers, shared memory, warps or blocks."""
        least = {
            "warps": self.max_warps // -(-threads // WARP),
            "blocks": self.max_blocks,
            "registers": self.occupancy(registers, 0, threads),
            "shared memory": self.occupancy(1, shared_bytes, threads),
        }
        return min(least, key=lambda name: least[name])


_KIB = 1024
_SMALL = (0, 8, 16, 32, 64, 100)
_A100 = (0, 8, 16, 32, 64, 100, 132, 164)
_H100 = (*_A100, 196, 228)
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_75", 32, 16, 64 * _KIB, 96 * _KIB, (32, 64), 0, 1, 16, 0.5, 16),
        Architecture("sm_80", 64, 32, 164 * _KIB, 192 * _KIB, _A100, _KIB, 1, 32, 8, 32),
        Architecture("sm_86", 48, 16, 100 * _KIB, 128 * _KIB, _SMALL, _KIB, 2, 16, 0.5, 16),
        Architecture("sm_89", 48, 24, 100 * _KIB, 128 * _KIB, _SMALL, _KIB, 2, 16, 0.5, 16),
        Architecture("sm_90", 64, 32, 228 * _KIB, 256 * _KIB, _H100, _KIB, 2, 32, 16, 32),
    )
}
"""Load/store lanes are those of the white papers: 16 of Turing, GA10x and Ada, 32 of A100 and H100."""


def architecture(name: str) -> Architecture:
    """By name, such as `sm_86`. Raises UsageError HC543 for one that the model does not know."""
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError("HC543", f"the model does not know the architecture {name!r}", remedy=f"use {known}")
    return ARCHITECTURES[name]
