"""Which unit of a multiprocessor an instruction takes, for how long, and when its result is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from hybridc.gpu_model.architecture import WARP, Architecture
from hybridc.gpu_model.chip import TensorRates
from hybridc.gpu_model.sass.code import Code, Instruction
from hybridc.gpu_model.sass.operands import COPIES, LOADS, STORES


class Unit(IntEnum):
    """In the order of native/multiprocessor.h."""

    FP32 = 0
    """Any pipe of 32-bit floating point."""
    FMA = 1
    """That pipe which multiplies integers, too."""
    ALU = 2
    HALF = 3
    TENSOR = 4
    SFU = 5
    """Transcendental functions, conversions, reads of special registers."""
    FP64 = 6
    SHARED = 7
    GLOBAL = 8
    COPY = 9
    """From global to shared memory, past the registers."""
    NONE = 10


class Flag(IntFlag):
    """In the order of native/multiprocessor.h."""

    BARRIER = 1
    BRANCH = 2
    STORE = 4
    LOCAL = 8
    COMMIT = 16
    AWAIT = 32
    BYPASS = 64


_OPCODES = {
    Unit.FP32: ("FFMA", "FMUL", "FADD"),
    Unit.FMA: ("IMAD", "IDP"),
    Unit.HALF: ("HFMA2", "HADD2", "HMUL2", "HMNMX2", "HSETP2"),
    Unit.TENSOR: ("HMMA", "IMMA", "BMMA", "DMMA"),
    Unit.SFU: ("MUFU", "I2F", "F2I", "F2F", "I2FP", "F2FP", "S2R", "S2UR", "POPC", "FLO", "BREV"),
    Unit.FP64: ("DFMA", "DADD", "DMUL", "DSETP", "DMNMX"),
    Unit.SHARED: ("LDS", "STS", "LDSM", "STSM", "SHFL", "LDC", "ATOMS"),
    Unit.COPY: tuple(COPIES),
    Unit.GLOBAL: ("LDG", "STG", "LDL", "STL", "LD", "ST", "RED", "ATOM", "ATOMG"),
    Unit.NONE: (
        *("NOP", "BRA", "EXIT", "BAR", "BSSY", "BSYNC", "WARPSYNC", "CALL", "RET", "DEPBAR", "LDGDEPBAR"),
        *("ERRBAR", "MEMBAR", "CCTL", "YIELD", "BREAK", "BPT", "ULDC", "NANOSLEEP", "LEPC", "CS2R"),
    ),
}
_UNIT_OF = {opcode: unit for unit, opcodes in _OPCODES.items() for opcode in opcodes}

_SFU_LANES = 4
"""Of a partition: 16 results a cycle and multiprocessor (CUDA C++ programming guide, "Arithmetic
instructions")."""
_SFU_LATENCY = 20
_TENSOR_LATENCY = 24
"""Cycles to a result for others to use; Sun et al., "Dissecting tensor cores via microbenchmarks" (arXiv
2206.02874), measure 18 to 33, by shape and type."""
_BANK_CHECKED = ("FFMA", "HFMA2", "IMAD")
_REGISTER_BANKS = 2
_TENSOR_SHAPE = re.compile(r"^(16|8)(8|16)?(4|8|16|32|64|128|256)$")


@dataclass(frozen=True, slots=True)
class Cost:
    """What issuing an instruction takes of a multiprocessor; as in native/multiprocessor.h."""

    unit: Unit
    cycles: int
    latency: int
    bank_cycles: int
    flags: Flag
    groups: int


def unit_of(instruction: Instruction) -> Unit:
    return _UNIT_OF.get(instruction.opcode, Unit.ALU)


def costs_of(code: Code, architecture: Architecture, tensor: TensorRates) -> tuple[Cost, ...]:
    """Costs of a kernel's instructions."""
    banks = _bank_conflicts(code)
    return tuple(_cost(i, architecture, tensor, extra) for i, extra in zip(code, banks, strict=True))


def _cost(
    instruction: Instruction, architecture: Architecture, tensor: TensorRates, bank_cycles: int
) -> Cost:
    unit = unit_of(instruction)
    latency = {Unit.SFU: _SFU_LATENCY, Unit.TENSOR: _TENSOR_LATENCY}.get(unit, 0)
    cycles = _cycles(instruction, unit, architecture, tensor)
    if unit in (Unit.SFU, Unit.FP64, Unit.TENSOR):
        latency += cycles
    groups = int(instruction.operands[-1], 16) if _awaits(instruction) else 0
    return Cost(unit, cycles, latency, bank_cycles, _flags(instruction), groups)


def _cycles(instruction: Instruction, unit: Unit, architecture: Architecture, tensor: TensorRates) -> int:
    lanes = {
        Unit.FP32: 16.0,
        Unit.FMA: 16.0,
        Unit.ALU: 16.0,
        Unit.HALF: float(architecture.half2_lanes),
        Unit.SFU: float(_SFU_LANES),
        Unit.FP64: architecture.fp64_lanes,
    }
    if unit is Unit.TENSOR:
        rate = tensor.integers if is_integer(instruction) else tensor.floats / float_weight(instruction)
        return max(1, round(tensor_products(instruction) / rate))
    if unit in lanes:
        return max(1, round(WARP / lanes[unit]))
    return lsu_cycles(architecture) if unit in (Unit.SHARED, Unit.GLOBAL, Unit.COPY) else 0


def lsu_cycles(architecture: Architecture) -> int:
    """The fewest cycles that a warp's access takes of the load/store unit."""
    return WARP // architecture.load_store_lanes


def tensor_products(instruction: Instruction) -> int:
    """Multiply-adds of one HMMA or IMMA: 16816 is 16 x 8 x 16."""
    for modifier in instruction.modifiers:
        if match := _TENSOR_SHAPE.match(modifier):
            rows, columns, depth = match.groups()
            return int(rows) * int(columns or 8) * int(depth)
    return 16 * 8 * 8


def is_integer(instruction: Instruction) -> bool:
    """Whether an instruction of tensor cores multiplies integers."""
    return instruction.opcode == "IMMA"


def float_weight(instruction: Instruction) -> float:
    """Time of a multiply-add on tensor cores relative to one of fp16: data sheets of all these GPUs give tf32
    half the rate."""
    return 2.0 if "TF32" in instruction.modifiers else 1.0


def _awaits(instruction: Instruction) -> bool:
    return instruction.opcode == "DEPBAR" and "LE" in instruction.modifiers


def _flags(instruction: Instruction) -> Flag:
    opcode, flags = instruction.opcode, Flag(0)
    if opcode == "BAR":
        flags |= Flag.BARRIER
    if opcode in ("BRA", "CALL"):
        flags |= Flag.BRANCH
    if opcode in STORES and opcode not in LOADS:
        flags |= Flag.STORE
    if opcode in ("LDL", "STL"):
        flags |= Flag.LOCAL
    if opcode == "LDGDEPBAR":
        flags |= Flag.COMMIT
    if _awaits(instruction):
        flags |= Flag.AWAIT
    if "BYPASS" in instruction.modifiers:
        flags |= Flag.BYPASS
    return flags


def _bank_conflicts(code: Sequence[Instruction]) -> list[int]:
    """1 for an instruction whose three sources lie in one of the two register banks, except those that the
    operand cache still holds (Jia et al., arXiv 1804.06826, section 2.2)."""
    conflicts, cached = [], dict[int, int]()
    for instruction in code:
        registers = {
            slot: int(match[1])
            for slot, operand in enumerate(instruction.operands[1:])
            if (match := re.match(r"[-~|]*R(\d+)", operand))
        }
        read = {r for slot, r in registers.items() if cached.get(slot) != r}
        same = len({register % _REGISTER_BANKS for register in read}) == 1
        conflicts.append(int(instruction.opcode in _BANK_CHECKED and len(read) == 3 and same))
        cached = {slot: r for slot, r in registers.items() if instruction.reuse >> slot & 1}
    return conflicts
