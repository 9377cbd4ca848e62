"""Executes the integer part of a kernel for many threads side by side, to learn which addresses it accesses.

Floating-point values are never computed and memory is never read: what is loaded counts as 0, and a condition
on it as false, unless it compares a number with a constant. So addresses and loops must not depend on data,
as those of dense kernels do not, or only on whether zeros are large or small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridc.gpu_model.sass.code import Code, Instruction
from hybridc.gpu_model.sass.liveness import relevant
from hybridc.gpu_model.sass.operands import ADDRESSED, Operands, destinations, is_jump
from hybridc.gpu_model.sass.operations import OPERATIONS

Block = tuple[int, int, int]
_FINISHED = 1 << 60
_PARTS = re.compile(r"-?[^-+]+")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is called."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    constants: Mapping[int, int] = field(default_factory=dict)
    """Words of the constant bank by offset: the parameters."""

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.block[0] * self.block[1] * self.block[2]

    def block_index(self, number: int) -> Block:
        """Where the block of this number lies in the grid; x varies fastest."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction as some threads execute it; arrays have a value for each thread."""

    instruction: Instruction
    present: np.ndarray[Any, Any] | None
    """Threads that are at this instruction; None: all."""
    active: np.ndarray[Any, Any] | None
    """Those of them that its predicate lets execute it; None: all."""
    addresses: np.ndarray[Any, Any] | None
    """Bytes, if it accesses memory and addresses were asked for. That of global memory where it copies."""
    shared_addresses: np.ndarray[Any, Any] | None = None
    """Where a copy to shared memory writes."""


class Interpreter:
    """Blocks of one launch, all at the same instruction unless they diverge."""

    def __init__(self, code: Code, launch: Launch, blocks: Sequence[Block]) -> None:
        self._code = code
        self.threads = launch.threads * len(blocks)
        x, y, _ = launch.block
        number = np.tile(np.arange(launch.threads), len(blocks))
        index = np.repeat(np.array(blocks, np.int64).reshape(-1, 3), launch.threads, axis=0)
        special = {
            "SR_TID.X": number % x,
            "SR_TID.Y": number // x % y,
            "SR_TID.Z": number // (x * y),
            "SR_LANEID": number % 32,
            **{f"SR_CTAID.{axis}": index[:, k] for k, axis in enumerate("XYZ")},
        }
        sizes = {4 * k: size for k, size in enumerate((*launch.block, *launch.grid))}
        self._operands = Operands(self.threads, {**sizes, **launch.constants}, special)
        self._jumps = [is_jump(instruction) for instruction in code]
        self._actions = [
            self._action(instruction) if matters else None
            for instruction, matters in zip(code, relevant(code), strict=True)
        ]
        self._addresses = [self._address(instruction) for instruction in code]
        self._inert = self._inert_runs()

    def _action(self, instruction: Instruction) -> Callable[[], None]:
        """What computes an instruction's results."""
        make = OPERATIONS.get(instruction.opcode.removeprefix("U"), OPERATIONS.get(instruction.opcode))
        if make is None:  # loads, and arithmetic of floating-point numbers
            return self._clear([self._operands.row(name) for name in destinations(instruction)])
        return make(instruction, self._operands)

    def _inert_runs(self) -> list[int]:
        """For each instruction, how many from it on neither jump nor compute what addresses depend on."""
        runs = [0]
        for action, jumps in zip(reversed(self._actions), reversed(self._jumps), strict=True):
            runs.append(0 if jumps or action is not None else runs[-1] + 1)
        return runs[:0:-1]

    def _clear(self, rows: Sequence[np.ndarray[Any, Any]]) -> Callable[[], None]:
        def act() -> None:
            for row in rows:
                row[self._operands.where] = 0

        return act

    def _address(self, instruction: Instruction) -> tuple[Callable[[], Any], ...]:
        """What computes the addresses: of a copy to shared memory, both."""
        if instruction.opcode not in ADDRESSED:
            return ()
        places = [o for o in instruction.operands if o.endswith("]") and not o.startswith("c[")]
        wide = "E" in instruction.modifiers and len(places) == 1
        return tuple(_sum_of(place, self._operands, wide=wide) for place in places)

    def sequence(self) -> np.ndarray[Any, Any]:
        """Indices of the instructions that are executed, in order."""
        pieces: list[tuple[int, int]] = []
        for _ in self.run(cut=(0, _FINISHED), pieces=pieces):
            pass
        return np.concatenate([np.arange(*piece) for piece in pieces])

    def run(
        self,
        wants_addresses: Callable[[int, Instruction], bool] = lambda step, instruction: True,
        cut: tuple[int, int] = (0, 0),
        pieces: list[tuple[int, int]] | None = None,
    ) -> Iterator[Step]:
        """The steps in order, until all threads have left. Divergent threads take turns, lowest first.

        Addresses are computed for the steps, counted from 0, and instructions for which `wants_addresses`
        holds. Steps from the first to before the last of `cut` take place but are not given; their
        instructions are noted in `pieces`, as ranges.
        """
        places: np.ndarray[Any, Any] | None = None
        place = number = 0
        pieces = [] if pieces is None else pieces
        while True:
            given = not cut[0] <= number < cut[1]
            if places is None and not given and self._inert[place]:
                count = min(self._inert[place], cut[1] - number)
                pieces.append((place, place + count))
                place, number = place + count, number + count
                continue
            present = None
            if places is not None:
                place = int(places.min())
                if place >= _FINISHED:
                    return
                present = places == place
                if present.all():
                    places = present = None
            instruction, active = self._code[place], self._active(self._code[place], present)
            anyone = active is None or bool(active.any())
            self._operands.where = True if active is None else active
            action, addresses = self._actions[place], self._addresses[place]
            if given:
                wanted = addresses and anyone and wants_addresses(number, instruction)
                found = [address() for address in addresses] if wanted else []
                yield Step(instruction, present, active, found[-1] if found else None, *found[:-1])
            else:
                pieces.append((place, place + 1))
            number += 1
            if action is not None and anyone:
                action()
            target = None
            if self._jumps[place] and anyone:
                target = _FINISHED if instruction.target is None else instruction.target
                if instruction.opcode == "BRA" and len(instruction.operands) > 1:
                    holds = self._operands.predicate(instruction.operands[0])()
                    active = holds.copy() if active is None else active & holds
                if active is None or active.all():
                    if target >= _FINISHED:
                        return
                    place = target
                    continue
                if places is None:
                    places = np.full(self.threads, place, np.int64)
            if places is not None:
                places[places == place] += 1
                if target is not None:
                    places[active] = target
            place += 1

    def _active(
        self, instruction: Instruction, present: np.ndarray[Any, Any] | None
    ) -> np.ndarray[Any, Any] | None:
        """Threads that execute an instruction; None: all."""
        if not instruction.predicate:
            return present
        holds = self._operands.predicate(instruction.predicate)()
        if holds.all():
            return present
        return holds.copy() if present is None else present & holds


def _sum_of(place: str, operands: Operands, *, wide: bool) -> Callable[[], Any]:
    """`desc[UR4][R2.64+UR6+0x10]`: what its last brackets add up to. Registers are pairs if they say so,
    or, of a `wide` address, do not say that they are not."""
    terms = []
    for part in _PARTS.findall(place[place.rindex("[") + 1 : -1]):
        name, sign = part.lstrip("-"), -1 if part.startswith("-") else 1
        scale = 1
        if match := re.search(r"\.X(\d+)$", name):
            name, scale = name[: match.start()], int(match[1])
        pair = name.endswith(".64") or (wide and not name.endswith(".U32"))
        read = operands.pair(name.removesuffix(".64")) if pair else operands.word(name)
        terms.append((sign * scale, read))
    return lambda: sum((factor * read() for factor, read in terms), np.zeros(operands.threads, np.int64))
