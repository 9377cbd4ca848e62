"""What a packed matrix stands for, read as its layout says, is what it was made from."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hybridc.frontend.expand.quantized.packed_matrix import Codes, packed_panels, packed_rows
from hybridc.packed.layout import PackedLayout


def read_rows(layout: PackedLayout, packed: np.ndarray, scales: np.ndarray, *zeros: np.ndarray) -> np.ndarray:
    """`[N, K]` of bytes, scales and zeros that begin with N."""
    columns, depth = len(packed), packed.shape[1] * layout.codes_in_byte
    codes = packed
    if layout.bits == 4:
        spans = packed.reshape(columns, -1, layout.span // 2)
        codes = np.concatenate([spans & 15, spans >> 4], axis=2).reshape(columns, depth)
    if layout.exponent:
        # of half precision: the sign moves to the top, exponent and mantissa to where those of a half meet
        mantissa, sign = layout.bits - 1 - layout.exponent, 1 << (layout.bits - 1)
        halves = (codes % sign).astype("u2") << (10 - mantissa) | (codes // sign).astype("u2") << 15
        codes = halves.view("f2")
    block = np.arange(depth) // (depth // scales.shape[1])
    zero = zeros[0].astype("f8")[:, block] if zeros else layout.zero
    return scales.astype("f8")[:, block] * (codes.astype("f8") - zero)


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("zeros", ["none", "one", "integers", "fractions"])
def test_packed_and_read_again(kind: str, zeros: str) -> None:
    random = np.random.default_rng([*kind.encode(), *zeros.encode()])
    for _ in range(10):
        block = 2 * int(random.integers(4, 40))
        columns, depth = int(random.integers(20, 200)), 2 * int(random.integers(32, 200))
        blocks, limits = -(-depth // block), ml_dtypes.iinfo(kind)
        dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
        codes = random.integers(int(limits.min), int(limits.max) + 1, (columns, depth)).astype(dtype)
        scales = random.uniform(0.5, 2, (columns, blocks)).astype("f2")
        zero = {
            "none": None,
            "one": np.asarray(3, dtype),
            "integers": random.integers(0, 8, (columns, blocks)).astype(dtype),
            "fractions": random.uniform(0, 8, (columns, blocks)).astype("f4"),
        }[zeros]
        spread = np.arange(depth) // block
        offset = np.broadcast_to(np.zeros(()) if zero is None else zero.astype("f8"), scales.shape)[:, spread]
        wanted = scales.astype("f8")[:, spread] * (codes.astype("f8") - offset)
        given = Codes(codes, scales, zero, int(limits.bits), block)
        rows, panels = packed_rows(given), packed_panels(given)
        if np.gcd(depth, block) < 8:  # too many scales to save anything
            continue
        assert rows is not None and panels is not None
        np.testing.assert_allclose(read_rows(rows.layout, *rows.operands), wanted, atol=1e-5)
        flat = [p.transpose(0, 2, 1).reshape(-1, p.shape[1])[:columns] for p in panels.operands]
        np.testing.assert_allclose(read_rows(panels.layout, *flat), wanted, atol=1e-5)


FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn"]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_every_floating_point_number(kind: str, dtype: str) -> None:
    """Each finite number of a type, subnormal ones and both zeros among them, is read again exactly."""
    kept, random = np.dtype(getattr(ml_dtypes, kind)), np.random.default_rng(1)
    bits = 4 if "4_" in kind else 8
    every = np.arange(1 << bits, dtype=np.uint8).view(kept)
    finite = every[np.isfinite(every.astype("f4"))]
    # the largest exponent of e5m2fnuz is that of what is no number in a half
    finite = finite[np.abs(finite.astype("f4")) < 2.0**15]
    codes = random.permutation(np.resize(finite, 64 * 256)).reshape(64, 256)
    scales = random.uniform(0.5, 2, (64, 8)).astype(dtype)
    packed = packed_rows(Codes(codes, scales, None, bits, 32))
    assert packed is not None and packed.operands[0].nbytes == codes.size * bits // 8
    wanted = codes.astype("f8") * scales.astype("f8").repeat(32, 1)
    np.testing.assert_array_equal(read_rows(packed.layout, *packed.operands), wanted)


@pytest.mark.parametrize("kind", FLOATS[:4])
def test_what_is_no_number_is_not_packed(kind: str) -> None:
    kept = np.dtype(getattr(ml_dtypes, kind))
    codes = np.ones((64, 256), kept)
    codes[3, 5] = np.nan
    assert packed_rows(Codes(codes, np.ones((64, 1), "f4"), None, 8, 256)) is None


def test_what_saves_little_is_not_packed() -> None:
    codes = np.zeros((64, 66), "u1")
    for block in (2, 66):
        scales = np.ones((64, 66 // block), "f4")
        assert (packed_panels(Codes(codes, scales, None, 4, block)) is None) == (block == 2)
