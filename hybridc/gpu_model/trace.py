"""What the blocks resident on a multiprocessor execute, and what each access to memory costs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybridc.gpu_model import memory
from hybridc.gpu_model.architecture import WARP, Architecture
from hybridc.gpu_model.sass.code import Code, Instruction
from hybridc.gpu_model.sass.interpreter import Block, Interpreter, Launch, Step
from hybridc.gpu_model.units import Unit, lsu_cycles, unit_of

Array = np.ndarray[Any, Any]

_LONG_LOOP = 4
"""Turns from which a loop counts as one."""
_STEPS = 30_000
"""Of all turns that are kept."""
_LEAST_STEPS = 900
_TURNS = (4, 9)
"""Fewest and most turns to keep of a loop whose turns are neither very long nor very short."""
_LOCAL = 1 << 50
"""Addresses of local memory begin here, those of each warp a good way apart."""
_LOCAL_WARP = 1 << 40


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop that takes most steps, of whose turns only the first few are traced."""

    end: int
    """Index of the instruction that jumps back; -1: there is none, and everything is traced."""
    turns: int
    kept: int
    begin: int
    """Step at which the first turn begins."""
    first_cut: int
    """Steps from this one on are left out"""
    last_cut: int
    """up to before this one."""

    @property
    def repeats(self) -> float:
        """How often the kept turns happen in all."""
        return self.turns / self.kept


@dataclass(frozen=True, slots=True)
class Access:
    """One access by each warp."""

    lsu_cycles: Array
    """Of the load/store unit."""
    sectors: Array | None
    """Of global or local memory, as `memory.sectors_of` gives them."""
    least_sectors: Array | None
    """If the same distinct bytes lay side by side."""
    wavefronts: Array | None = None
    least_wavefronts: Array | None = None
    """Of shared memory, as they are and as they could be."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    instruction: Instruction
    warps: Array
    """Which warps are there."""
    access: Access | None


@dataclass(frozen=True, slots=True)
class Trace:
    code: Code
    warps_of_block: int
    warps: int
    loop: Loop
    steps: tuple[TracedStep, ...]

    def weight(self, number: int) -> float:
        """How often a step of this number takes place, those that were cut included."""
        return self.loop.repeats if self.loop.begin <= number < self.loop.first_cut else 1.0

    def of_main_loop(self) -> Trace:
        """Its kept turns alone; all where no loop turns often enough."""
        if self.loop.end < 0:
            return self
        loop = replace(self.loop, begin=0, first_cut=self.loop.first_cut - self.loop.begin)
        return replace(self, loop=loop, steps=self.steps[self.loop.begin : self.loop.first_cut])


def main_loop(code: Code, launch: Launch) -> Loop:
    """The outermost of the loops that take most of the first block's steps, and how to cut it."""
    sequence = Interpreter(code, launch, [(0, 0, 0)]).sequence()
    (backwards,) = np.nonzero(np.append(sequence[1:], len(code)) <= sequence)
    by_end: dict[int, list[int]] = {}
    for position in backwards:
        by_end.setdefault(int(sequence[position]), []).append(int(position))
    loops = {end: places for end, places in by_end.items() if len(places) >= _LONG_LOOP}
    whole = Loop(-1, 1, 1, 0, len(sequence), len(sequence))
    if not loops:
        return whole
    longest = max(places[-1] - places[0] for places in loops.values())
    outer = (e for e, places in loops.items() if places[-1] - places[0] >= 0.75 * longest)
    end = min(outer, key=lambda e: len(loops[e]))
    places = loops[end]
    body = max(1, (places[-1] - places[0]) // (len(places) - 1))
    kept = max(min(_TURNS[1], max(_TURNS[0], _STEPS // body)), -(-_LEAST_STEPS // body))
    if len(places) <= kept + 2:
        return whole
    begin = max(0, places[0] - body + 1)
    return Loop(end, len(places) + 1, kept, begin, places[kept - 1] + 1, places[-1] + 1)


def trace_blocks(
    code: Code, launch: Launch, blocks: Sequence[Block], loop: Loop, architecture: Architecture
) -> Trace:
    """Execute some blocks, and price their accesses on a multiprocessor."""
    tracer = _Tracer(code, launch, blocks, loop, architecture)
    return Trace(code, tracer.warps_of_block, tracer.warps, loop, tuple(tracer.steps()))


class _Tracer:
    def __init__(
        self, code: Code, launch: Launch, blocks: Sequence[Block], loop: Loop, architecture: Architecture
    ) -> None:
        self._threads = launch.threads
        self._loop = loop
        self._least_cycles = float(lsu_cycles(architecture))
        self.warps_of_block = -(-launch.threads // WARP)
        self.warps = self.warps_of_block * len(blocks)
        self._interpreter = Interpreter(code, launch, blocks)
        everyone = np.ones(self._threads * len(blocks), bool)
        self._everyone = self._by_warp(everyone, "constant")
        self._shared: dict[tuple[int, bytes], Access] = {}

    def steps(self) -> list[TracedStep]:
        steps = []
        for step in self._interpreter.run(cut=(self._loop.first_cut, self._loop.last_cut)):
            present = self._everyone if step.present is None else self._by_warp(step.present, "constant")
            warps = np.asarray(present.any(axis=1))
            steps.append(TracedStep(step.instruction, warps, self._access(step)))
        return steps

    def _by_warp(self, values: Array, mode: str) -> Array:
        """Values of threads as rows of 32: the last warp of a block is filled up."""
        missing = self.warps_of_block * WARP - self._threads
        rows = values.reshape(-1, self._threads)
        if missing:
            rows = np.pad(rows, ((0, 0), (0, missing)), mode)  # type: ignore[call-overload]
        return rows.reshape(-1, WARP)

    def _access(self, step: Step) -> Access | None:
        unit = unit_of(step.instruction)
        if step.addresses is None or unit not in (Unit.SHARED, Unit.GLOBAL, Unit.COPY):
            return None
        mask = self._everyone if step.active is None else self._by_warp(step.active, "constant")
        if unit is Unit.SHARED:
            return self._shared_access(step.instruction, step.addresses, mask)
        addresses = self._by_warp(step.addresses, "edge")
        if step.instruction.opcode in ("LDL", "STL"):
            # a word of each thread lies beside those of the others of its warp
            rows = np.arange(self.warps)[:, None] * _LOCAL_WARP + _LOCAL
            words = rows + addresses // 4 * 4 * WARP + np.arange(WARP) * 4
            pieces = [words + 4 * WARP * k for k in range(max(1, step.instruction.bytes // 4))]
            sectors = memory.sectors_of(np.hstack(pieces), 4, np.hstack([mask] * len(pieces)))
        else:
            sectors = memory.sectors_of(addresses, step.instruction.bytes, mask)
        wide = np.where(mask.any(axis=1), step.instruction.bytes / 4, 1)
        cycles = np.maximum(memory.lines_of(sectors), wide)
        least = memory.least_sectors(addresses, step.instruction.bytes, mask)
        if step.shared_addresses is None:
            return Access(np.maximum(cycles, self._least_cycles), sectors, least)
        written = self._shared_access(step.instruction, step.shared_addresses, mask)
        total = np.maximum(cycles, self._least_cycles) + written.lsu_cycles
        return Access(total, sectors, least, written.wavefronts, written.least_wavefronts)

    def _shared_access(self, instruction: Instruction, threads: Array, mask: Array) -> Access:
        """Bank conflicts of an instruction are the same in each turn of a loop."""
        key = instruction.index, mask.tobytes()
        if key not in self._shared:
            addresses = self._by_warp(threads, "edge")
            if instruction.opcode == "LDSM":  # lanes from 8 x the number of matrices on name no row
                count = next((int(m) for m in instruction.modifiers if m in ("2", "4")), 1)
                mask = mask & (np.arange(WARP) < 8 * count)
            arguments = addresses, instruction.bytes, mask
            fronts, least = memory.wavefronts(*arguments), memory.least_wavefronts(*arguments)
            cycles = np.maximum(fronts, self._least_cycles)
            self._shared[key] = Access(cycles, None, None, fronts, least)
        return self._shared[key]
