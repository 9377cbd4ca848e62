"""Operands of SASS: their values for some threads, and which ones an instruction reads and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hybridc.gpu_model.sass.code import Instruction
from hybridc.gpu_model.sass.integers import MASK, Words

Read = Callable[[], Any]

_ENDS = frozenset({"EXIT", "RET"})
_JUMPS = frozenset({"BRA", "CALL"})
LOADS = frozenset({"LDG", "LDS", "LDL", "LDSM", "LD"})
STORES = frozenset({"STG", "STS", "STL", "ST", "RED", "ATOM", "ATOMG", "ATOMS"})
COPIES = frozenset({"LDGSTS"})
"""From global to shared memory."""
ADDRESSED = LOADS | STORES | COPIES
_WITHOUT_RESULT = STORES - {"ATOM", "ATOMG", "ATOMS"} | COPIES | _ENDS | _JUMPS
_REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?")
_PREDICATE = re.compile(r"^!?U?P(\d|T)$")
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_FIRST_PREDICATES = frozenset({"IADD3", "LEA", "IMAD", "LOP3", "PLOP3", "ISETP", "FSETP", "DSETP", "HSETP2"})
"""May begin with several results, among them carries and conditions."""


def is_jump(instruction: Instruction) -> bool:
    """Whether another instruction than the next may follow. Calls of functions, of which only unlikely
    cases of divisions are left, are passed over; one within a kernel is a jump."""
    known = instruction.target is not None
    return instruction.opcode in _ENDS or (instruction.opcode in _JUMPS and known)


def is_predicate(operand: str) -> bool:
    return _PREDICATE.match(operand) is not None


class Operands:
    """Values of registers (`R5`, `UR4`), predicates (`P0`, `UP1`) and constants for some threads."""

    def __init__(self, threads: int, constants: Mapping[int, int], special: Mapping[str, Words]) -> None:
        self.threads = threads
        self.where: Any = True
        """Threads whose results are kept."""
        self._constants = constants
        self._special = special
        self._rows: dict[str, Words] = {}
        self._kept: dict[tuple[str, int], Words | None] = {}

    def row(self, name: str) -> Words:
        """Where the values of a register or predicate are kept; 0 to begin with."""
        if name not in self._rows:
            dtype = bool if "P" in name else np.int64
            self._rows[name] = np.zeros(self.threads, dtype)
        return self._rows[name]

    def word(self, operand: str) -> Read:
        """A register, constant, immediate or special register, with its sign."""
        negative, inverted = operand.startswith("-"), operand.startswith("~")
        name = operand.replace(".reuse", "").lstrip("-~|").rstrip("|")
        name = re.sub(r"\.(H[01]_H[01]|H[01]|B[0-3]|U32|S32)$", "", name)
        if re.fullmatch(r"U?R\d+", name):
            row = self.row(name)
            read: Read = lambda: row  # noqa: E731 - the commonest case, called millions of times
        else:
            value = self._immediate(name)
            read = lambda: value  # noqa: E731
        if negative:
            return lambda: -read() & MASK
        return (lambda: ~read() & MASK) if inverted else read

    def _immediate(self, name: str) -> Words:
        if constant := _CONSTANT.match(name):
            return np.int64(self._constants.get(int(constant[1], 16), 0))
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", name):
            return np.int64(int(name, 0) & MASK)
        if re.fullmatch(r"\d*\.\d+(e[+-]?\d+)?|\d+e[+-]?\d+", name):
            return np.int64(np.float32(float(name)).view(np.uint32))
        return self._special.get(name, np.int64(0))

    def pair(self, operand: str) -> Read:
        """Two words that follow each other, as one number of 64 bits."""
        name = operand.replace(".reuse", "")
        if match := re.fullmatch(r"(U?R)(\d+)", name):
            second = f"{match[1]}{int(match[2]) + 1}"
        elif match := _CONSTANT.match(name):
            second = f"c[0x0][{int(match[1], 16) + 4:#x}]"
        else:
            return self.word(operand)
        low, high = self.word(name), self.word(second)
        return lambda: low() | high() << 32

    def predicate(self, operand: str) -> Callable[[], Words]:
        name = operand.lstrip("!")
        row = np.ones(self.threads, bool) if name.endswith("PT") else self.row(name)
        return (lambda: ~row) if operand.startswith("!") else (lambda: row)

    def put(self, operand: str, value: Any, above: int = 0) -> None:
        """Keep a result; `above` counts registers from the operand on."""
        if (operand, above) not in self._kept:
            match = re.fullmatch(r"(U?[RP])(\d+)", operand)
            name = f"{match[1]}{int(match[2]) + above}" if match else ""
            self._kept[operand, above] = self.row(name) if name else None
        row = self._kept[operand, above]
        if row is not None:  # neither RZ nor PT
            np.copyto(row, value, where=self.where)

    def put_pair(self, operand: str, value: Any) -> None:
        self.put(operand, value & MASK)
        self.put(operand, value >> 32 & MASK, 1)


def is_wide(instruction: Instruction) -> bool:
    return "WIDE" in instruction.modifiers or "64" in instruction.modifiers or instruction.opcode == "CS2R"


def _result_count(instruction: Instruction) -> int:
    """How many of the operands, the first ones, are results."""
    if not instruction.operands or instruction.opcode in _WITHOUT_RESULT:
        return 0
    opcode = instruction.opcode.removeprefix("U")
    if opcode not in _FIRST_PREDICATES:
        return 1
    if opcode.endswith(("SETP", "SETP2", "PLOP3")):
        return 2
    leading = [is_predicate(operand) for operand in instruction.operands[:3]]
    if leading[0]:
        return 3 if len(leading) > 2 and leading[2] else 2
    # a register, and the carries out of it
    return 1 + (len(leading) > 1 and leading[1]) + (len(leading) > 2 and all(leading[1:]))


def destinations(instruction: Instruction) -> tuple[str, ...]:
    """Registers and predicates that an instruction writes."""
    opcode = instruction.opcode.removeprefix("U")
    if opcode == "R2P":
        return tuple(f"P{k}" for k in range(7))
    registers = max(1, instruction.bytes // 4) if opcode in LOADS else 2 if is_wide(instruction) else 1
    written = []
    for operand in instruction.operands[: _result_count(instruction)]:
        match = re.fullmatch(r"(U?[RP])(\d+)", operand)
        if match:
            above = registers if "R" in match[1] else 1
            written += [f"{match[1]}{int(match[2]) + k}" for k in range(above)]
    return tuple(written)


def sources(instruction: Instruction, *, only_addresses: bool = False) -> Iterator[str]:
    """Registers and predicates that an instruction reads. Rather a word too many than one too few."""
    adds_pair = instruction.opcode.endswith("IMAD") and {"WIDE", "HI"} & set(instruction.modifiers)
    pairs = only_addresses and "E" in instruction.modifiers
    wide = is_wide(instruction) and not instruction.opcode.endswith("IMAD")
    read = (
        instruction.operands
        if instruction.opcode == "R2P"
        else instruction.operands[_result_count(instruction) :]
    )
    last = [operand for operand in read if not is_predicate(operand)][-1:]
    for operand in read:
        if only_addresses and not operand.endswith("]"):
            continue
        if is_predicate(operand):
            yield operand.lstrip("!")
        for kind, number, pair in _REGISTER.findall(operand):
            yield f"{kind}{number}"
            if pair or pairs or wide or (adds_pair and [operand] == last):
                yield f"{kind}{int(number) + 1}"
    if instruction.opcode in ("P2R", "R2P"):
        yield from (f"P{k}" for k in range(7))
