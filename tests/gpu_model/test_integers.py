"""SASS's integer arithmetic against Python's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridc.gpu_model.sass.integers import (
    MASK,
    funnel_shift,
    lookup,
    permute_bytes,
    scaled_add,
    shifted_mask,
    sign_extended,
    signed,
)

words = st.integers(0, MASK)


def of(value: int) -> np.ndarray:
    return np.array([value], np.int64)


@given(words, words, st.integers(0, 40), st.booleans())
def test_right_shifts(low: int, high: int, amount: int, arithmetic: bool) -> None:
    top = high - (1 << 32) if arithmetic and high >> 31 else high
    upper = funnel_shift(of(low), of(high), of(amount), left=False, upper=True, arithmetic=arithmetic)
    assert upper[0] == top >> amount & MASK
    if amount <= 32:
        lower = funnel_shift(of(low), of(high), of(amount), left=False, upper=False, arithmetic=arithmetic)
        assert lower[0] == (top << 32 | low) >> amount & MASK


@given(words, words, st.integers(0, 31))
def test_left_shifts(low: int, high: int, amount: int) -> None:
    pair = (high << 32 | low) << amount
    for upper in (False, True):
        got = funnel_shift(of(low), of(high), of(amount), left=True, upper=upper, arithmetic=False)
        assert got[0] == (pair >> 32 if upper else pair) & MASK


@given(words, words, words, st.integers(0, 255))
def test_lookup_tables(a: int, b: int, c: int, table: int) -> None:
    got = int((lookup(of(a), of(b), of(c), table) & MASK)[0])
    bits = ((a >> k & 1, b >> k & 1, c >> k & 1) for k in range(32))
    assert got == sum((table >> (4 * x + 2 * y + z) & 1) << k for k, (x, y, z) in enumerate(bits))


@given(words, words, st.integers(0, 0x7777))
def test_byte_permutation(a: int, b: int, selector: int) -> None:
    selector &= 0x7777
    pair = (a | b << 32).to_bytes(8, "little")
    chosen = bytes(pair[selector >> 4 * k & 7] for k in range(4))
    assert permute_bytes(of(a), of(selector), of(b))[0] == int.from_bytes(chosen, "little")


@given(words, words, words, st.integers(1, 31))
def test_scaled_addition(low: int, high: int, addend: int, shift: int) -> None:
    assert scaled_add(of(low), of(addend), of(0), shift, upper=False)[0] == (low << shift & MASK) + addend
    upper = scaled_add(of(low), of(addend), of(high), shift, upper=True)[0]
    assert upper == ((high << 32 | low) >> (32 - shift) & MASK) + addend


@given(words, st.integers(1, 32))
def test_extension_and_masks(word: int, width: int) -> None:
    kept = word & ((1 << width) - 1)
    number = kept - (1 << width) if kept >> (width - 1) & 1 else kept
    assert sign_extended(of(word), of(width), unsigned=False)[0] == number & MASK
    assert sign_extended(of(word), of(width), unsigned=True)[0] == kept
    assert shifted_mask(of(4), of(width))[0] == ((1 << width) - 1) << 4 & MASK
    assert signed(of(word))[0] == (word - (1 << 32) if word >> 31 else word)
