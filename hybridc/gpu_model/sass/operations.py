"""What SASS's integer instructions do, each as a function that makes an action out of an instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from hybridc.gpu_model.sass.code import Instruction
from hybridc.gpu_model.sass.integers import (
    COMPARISONS,
    CONNECTIVES,
    MASK,
    Words,
    funnel_shift,
    lookup,
    permute_bytes,
    scaled_add,
    shifted_mask,
    sign_extended,
    signed,
)
from hybridc.gpu_model.sass.operands import Operands, Read, is_predicate, is_wide

Action = Callable[[], None]
_REGISTER, _NUMBER = re.compile(r"U?R(\d+|Z)"), re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def _parts(instruction: Instruction, operands: Operands) -> tuple[str, list[str], list[Read], list[Read]]:
    """The result, the carries beside it, predicates read, words read."""
    rest = list(instruction.operands)
    carries: list[str] = []
    first = rest.pop(0)
    if is_predicate(first):
        carries, first = [first], rest.pop(0)
    while rest and is_predicate(rest[0]):
        carries.append(rest.pop(0))
    read = [operands.predicate(o) for o in rest if is_predicate(o)]
    return first, carries, read, [operands.word(o) for o in rest if not is_predicate(o)]


def _move(instruction: Instruction, operands: Operands) -> Action:
    result, wide = instruction.operands[0], is_wide(instruction) and "32" not in instruction.modifiers
    last = instruction.operands[-1] if instruction.opcode != "MOV" else instruction.operands[1]
    if wide:
        pair = operands.pair(last)
        return lambda: operands.put_pair(result, pair())
    word = operands.word(last)
    return lambda: operands.put(result, word() & MASK)


def _sum_with_carries(operands: Operands, result: str, carries: list[str], total: Any) -> None:
    operands.put(result, total & MASK)
    for number, carry in enumerate(carries):
        operands.put(carry, (np.asarray(total) >> 32) > number)


def _add3(instruction: Instruction, operands: Operands) -> Action:
    result, carries, conditions, words = _parts(instruction, operands)
    if "X" in instruction.modifiers:
        return lambda: _sum_with_carries(
            operands, result, carries, sum(w() for w in words) + sum(c().astype(np.int64) for c in conditions)
        )
    # a - b is a + ~b + 1, whose carry says that nothing was borrowed
    texts = [o for o in instruction.operands if not is_predicate(o)][1:]
    plain = [operands.word(f"~{o[1:]}" if o.startswith("-") else o) for o in texts]
    ones = sum(o.startswith("-") for o in texts)
    return lambda: _sum_with_carries(operands, result, carries, sum(w() for w in plain) + ones)


def _multiply_add(instruction: Instruction, operands: Operands) -> Action:
    result, carries, conditions, words = _parts(instruction, operands)
    number: Callable[[Words], Words] = (lambda w: w) if "U32" in instruction.modifiers else signed
    a, b, c = words[0], words[1], words[2]
    if {"WIDE", "HI"} & set(instruction.modifiers):  # both add a pair of words, and HI keeps the upper one
        addend = operands.pair([o for o in instruction.operands if not is_predicate(o)][3])
        if "WIDE" in instruction.modifiers:
            return lambda: operands.put_pair(result, np.asarray(number(a()) * number(b()) + addend()))
        return lambda: operands.put(result, (number(a()) * number(b()) + addend()) >> 32 & MASK)
    carry = conditions[0] if "X" in instruction.modifiers and conditions else (lambda: np.int64(0))
    return lambda: _sum_with_carries(operands, result, carries, (a() * b() & MASK) + c() + carry())


def _load_address(instruction: Instruction, operands: Operands) -> Action:
    result, carries, conditions, words = _parts(instruction, operands)
    texts = [o for o in instruction.operands if not is_predicate(o)]
    shift, upper = int(texts[-1], 16), "HI" in instruction.modifiers
    carry = conditions[0] if "X" in instruction.modifiers and conditions else (lambda: np.int64(0))
    low, addend, third = words[0], words[1], words[2]

    def act() -> None:
        high = signed(low()) >> 31 if "SX32" in instruction.modifiers else third() if upper else np.int64(0)
        total = scaled_add(low(), addend(), high & MASK, shift, upper=upper) + carry()
        _sum_with_carries(operands, result, carries, total)

    return act


def _logic(instruction: Instruction, operands: Operands) -> Action:
    result, conditions, _, words = _parts(instruction, operands)
    a, b, c = words[0], words[1], words[2]
    texts = [o for o in instruction.operands if not is_predicate(o)]
    table = int(texts[4], 16)

    def act() -> None:
        value = lookup(a(), b(), c(), table) & MASK
        operands.put(result, value)
        for condition in conditions:
            operands.put(condition, value != 0)

    return act


def _predicate_logic(instruction: Instruction, operands: Operands) -> Action:
    a, b, c = (operands.predicate(o) for o in instruction.operands[2:5])
    tables = [int(o, 16) for o in instruction.operands[5:7]]

    def act() -> None:
        values = [lookup(a(), b(), c(), table) for table in tables]
        for result, value in zip(instruction.operands, values, strict=False):
            operands.put(result, value)

    return act


def _shift(instruction: Instruction, operands: Operands) -> Action:
    low, amount, high = (operands.word(o) for o in instruction.operands[1:4])
    left, upper = instruction.modifiers[0] == "L", "HI" in instruction.modifiers
    arithmetic = bool({"S32", "S64"} & set(instruction.modifiers))
    return lambda: operands.put(
        instruction.operands[0],
        funnel_shift(low(), high(), amount(), left=left, upper=upper, arithmetic=arithmetic),
    )


def _compare(instruction: Instruction, operands: Operands) -> Action:
    first, second = instruction.operands[:2]
    a, b = operands.word(instruction.operands[2]), operands.word(instruction.operands[3])
    before = operands.predicate(instruction.operands[4] if len(instruction.operands) > 4 else "PT")
    lower = operands.predicate(instruction.operands[5]) if "EX" in instruction.modifiers else None
    compare = COMPARISONS[instruction.modifiers[0]]
    connect = CONNECTIVES[next((m for m in instruction.modifiers if m in CONNECTIVES), "AND")]
    number: Callable[[Words], Words] = (lambda w: w) if "U32" in instruction.modifiers else signed

    def act() -> None:
        x, y = number(a()), number(b())
        holds = np.asarray(compare(x, y))
        if lower is not None:  # the upper half of a comparison of 64 bits
            holds = (holds & (x != y)) | ((x == y) & lower())
        results = connect(holds, before()), connect(~holds, before())
        operands.put(first, results[0])
        operands.put(second, results[1])

    return act


def _compare_floats(instruction: Instruction, operands: Operands) -> Action:
    """Of a register with a constant, as loops end where what was loaded says so; any other is false."""
    first, second, *texts = instruction.operands[:4]
    relation, before = instruction.modifiers[0].removesuffix("U"), operands.predicate(instruction.operands[4])
    if not _REGISTER.fullmatch(texts[0]) or not _NUMBER.fullmatch(texts[1]) or relation not in COMPARISONS:
        return lambda: _put_false(operands, first, second)
    word, constant = operands.word(texts[0]), np.float32(float(texts[1]))
    connect = CONNECTIVES[next((m for m in instruction.modifiers if m in CONNECTIVES), "AND")]

    def act() -> None:
        number = np.asarray(word() & MASK).astype(np.uint32).view(np.float32)
        holds = np.asarray(COMPARISONS[relation](number, constant))
        operands.put(first, connect(holds, before()))
        operands.put(second, connect(~holds, before()))

    return act


def _put_false(operands: Operands, *results: str) -> None:
    for result in results:
        operands.put(result, np.bool_(False))


def _choose(instruction: Instruction, operands: Operands) -> Action:
    a, b = operands.word(instruction.operands[1]), operands.word(instruction.operands[2])
    condition = operands.predicate(instruction.operands[3])
    return lambda: operands.put(instruction.operands[0], np.asarray(np.where(condition(), a(), b())) & MASK)


def _least(instruction: Instruction, operands: Operands) -> Action:
    """The least of two or three words, or the greatest, as the condition says; of a sum, if the name says
    that."""
    words = [operands.word(operand) for operand in instruction.operands[1:-1]]
    condition = operands.predicate(instruction.operands[-1])
    number: Callable[[Words], Words] = (lambda w: w) if "U32" in instruction.modifiers else signed

    def act() -> None:
        values = [word() for word in words]
        if instruction.opcode == "VIADDMNMX":
            values[:2] = [(values[0] + values[1]) & MASK]
        values = [number(value) for value in values]
        least, greatest = reduce(np.minimum, values), reduce(np.maximum, values)
        operands.put(instruction.operands[0], np.asarray(np.where(condition(), least, greatest)) & MASK)

    return act


def _words(function: Callable[..., Words]) -> Callable[[Instruction, Operands], Action]:
    """An instruction whose result is a function of its sources."""

    def make(instruction: Instruction, operands: Operands) -> Action:
        words = [operands.word(o) for o in instruction.operands[1:] if not is_predicate(o)]
        return lambda: operands.put(instruction.operands[0], function(*(w() for w in words)) & MASK)

    return make


def _extend(instruction: Instruction, operands: Operands) -> Action:
    a, width = operands.word(instruction.operands[1]), operands.word(instruction.operands[2])
    unsigned = "U32" in instruction.modifiers
    return lambda: operands.put(instruction.operands[0], sign_extended(a(), width(), unsigned=unsigned))


def _pack_predicates(instruction: Instruction, operands: Operands) -> Action:
    rows = [operands.predicate(f"P{k}") for k in range(7)]
    mask = operands.word(instruction.operands[-1])
    return lambda: operands.put(
        instruction.operands[0], sum(row().astype(np.int64) << k for k, row in enumerate(rows)) & mask()
    )


def _unpack_predicates(instruction: Instruction, operands: Operands) -> Action:
    word, mask = operands.word(instruction.operands[1]), operands.word(instruction.operands[2])

    def act() -> None:
        for k in range(7):
            if int(mask()) >> k & 1:
                operands.put(f"P{k}", (word() >> k & 1).astype(bool))

    return act


def _half_constant(instruction: Instruction, operands: Operands) -> Action:
    """HFMA2 of zeros and two constants moves a word; any other result no address depends on."""
    constants = [o for o in instruction.operands[1:] if _NUMBER.fullmatch(o)]
    if len(constants) != 2:
        return lambda: operands.put(instruction.operands[0], 0)
    high, low = (int(np.float16(float(o)).view(np.uint16)) for o in constants)
    return lambda: operands.put(instruction.operands[0], high << 16 | low)


OPERATIONS: dict[str, Callable[[Instruction, Operands], Action]] = {
    **dict.fromkeys(("MOV", "S2R", "S2UR", "R2UR", "LDC", "CS2R"), _move),
    "IADD3": _add3,
    "IADD": _add3,
    "VIADD": _add3,
    "IMAD": _multiply_add,
    "LEA": _load_address,
    "LOP3": _logic,
    "PLOP3": _predicate_logic,
    "SHF": _shift,
    "ISETP": _compare,
    "FSETP": _compare_floats,
    "SEL": _choose,
    "FSEL": _choose,
    "IMNMX": _least,
    "VIMNMX": _least,
    "VIMNMX3": _least,
    "VIADDMNMX": _least,
    "IABS": _words(lambda a: np.abs(signed(a))),
    "PRMT": _words(permute_bytes),
    "BMSK": _words(shifted_mask),
    "SGXT": _extend,
    "P2R": _pack_predicates,
    "R2P": _unpack_predicates,
    "HFMA2": _half_constant,
}
"""By opcode; the same with a `U` in front works on uniform registers."""
