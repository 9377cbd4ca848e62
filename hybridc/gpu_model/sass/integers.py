"""Integer arithmetic of SASS on arrays of 32-bit words, each kept as an int64 from 0 to 2^32 - 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Words = Any
"""One word for each thread: an array, or a scalar where all have the same."""

MASK = 0xFFFFFFFF

COMPARISONS: dict[str, Callable[[Words, Words], Words]] = {
    "LT": np.less,
    "GT": np.greater,
    "LE": np.less_equal,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}
CONNECTIVES: dict[str, Callable[[Words, Words], Words]] = {
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
}


def signed(words: Words) -> Words:
    """The same bits as two's complement numbers."""
    return (words ^ 0x80000000) - 0x80000000


def lookup(a: Words, b: Words, c: Words, table: int) -> Words:
    """LOP3 and PLOP3: bit k of `table` is the result where the bits of a, b, c spell k."""
    result = np.zeros_like(a | b | c)
    for k in range(8):
        if table >> k & 1:
            result = result | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return result


def funnel_shift(
    low: Words, high: Words, amount: Words, *, left: bool, upper: bool, arithmetic: bool
) -> Words:
    """SHF: a pair of words shifted; its upper or lower word."""
    steps = np.minimum(amount, 63)
    top = signed(high) if arithmetic else high
    if not left:
        return (top >> steps if upper else (top << 32 | low) >> steps) & MASK
    if upper:  # 64 bits to the left would lose what int64 cannot hold
        return ((top << steps) | (low >> np.maximum(32 - steps, 0) << np.maximum(steps - 32, 0))) & MASK
    return low << np.minimum(steps, 31) & MASK


def permute_bytes(a: Words, selector: Words, b: Words) -> Words:
    """PRMT: four bytes of the pair (a, b), each chosen by four bits; the highest of them copies the sign."""
    pair = b << 32 | a
    result = np.zeros_like(pair)
    for place in range(4):
        choice = selector >> 4 * place
        byte = pair >> 8 * (choice & 7) & 255
        byte = np.where(choice & 8, np.where(byte & 128, 255, 0), byte)
        result = result | byte << 8 * place
    return result & MASK


def scaled_add(low: Words, addend: Words, high: Words, shift: int, *, upper: bool) -> Words:
    """LEA: the pair (high, low) shifted to the left; its lower or upper word, plus another. Unmasked."""
    if not upper:
        return (low << shift & MASK) + addend
    return ((high << 32 | low) >> (32 - shift) & MASK) + addend


def shifted_mask(position: Words, width: Words) -> Words:
    """BMSK: `width` ones from a bit on."""
    return (((1 << np.minimum(width, 32)) - 1) << np.minimum(position, 32)) & MASK


def sign_extended(words: Words, width: Words, *, unsigned: bool) -> Words:
    """SGXT: the lowest `width` bits as a number."""
    bits = np.clip(width, 1, 32)
    kept = words & ((1 << bits) - 1)
    return kept if unsigned else np.where(kept >> (bits - 1) & 1, kept - (1 << bits), kept) & MASK
