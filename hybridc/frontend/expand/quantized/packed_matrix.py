"""Constant matrices of few bits, laid out as kernels read them (`hybridc/packed/layout.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from hybridc.packed.layout import PackedLayout
from hybridc.placeholders import is_placeholder, placeholder

_WIDTHS = (64, 32, 16)
"""Columns of a panel: of bytes a cache line if there are many columns, at least a vector of float32."""
_MOST_PADDING = 1 / 8
_SPAN = 32
_FLOATS = {
    "float8_e4m3fn": (4, 2.0**8),
    "float8_e4m3fnuz": (4, 2.0**7),
    "float8_e5m2": (5, 1.0),
    "float8_e5m2fnuz": (5, 2.0**-1),
    "float4_e2m1fn": (2, 2.0**14),
}
"""Bits of the exponent, and what makes the number of a float16 with the same exponent and mantissa, since
that adds 15 to exponents: 2 to the power of 15 less what the type adds.
"""
_LARGEST_HALF = 65504
_MOST_OF_DENSE = 1 / 2
"""Of the bytes of the matrix in float32: what saves less stays float32."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Constants of a matrix `scale * (code - zero)`, `[N, K]`; its rows have a scale for each block."""

    codes: np.ndarray
    """`[N, K]`: integers of 4 bits, or of 8, or such floating-point numbers."""
    scales: np.ndarray
    """`[N, blocks]`."""
    zeros: np.ndarray | None
    """One number, or as many as there are scales; None: 0."""
    bits: int
    block: int
    """Elements of a block; the last one may have fewer."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Operands of a kernel: bytes, scales, and zeros unless all are one."""

    layout: PackedLayout
    columns: int
    """N."""
    operands: tuple[np.ndarray, ...]


def packed_panels(given: Codes) -> PackedMatrix | None:
    """The transpose, `[K, N]`, for products: bytes `[panels, bytes of a column, width]`, scales `[panels,
    blocks, width]`. None if more than half of the bytes that the matrix has in float32 were left.
    """
    packed = packed_rows(given)
    if packed is None:
        return None
    columns = packed.columns
    width = next((w for w in _WIDTHS if -columns % w <= columns * _MOST_PADDING), _WIDTHS[-1])
    operands = tuple(_panels(each.T, width) for each in packed.operands)
    return _if_small(replace(packed, operands=operands), given)


def packed_rows(given: Codes) -> PackedMatrix | None:
    """The matrix as it is, for reading rows: bytes `[N, bytes of a row]`, scales `[N, blocks]`; or None."""
    depth = given.codes.shape[1]
    # the last block may be cut off: its scale is that of smaller blocks, which are whole
    whole = math.gcd(depth, given.block)
    if given.bits not in (4, 8) or not given.codes.size or (given.bits == 4 and whole % 2):
        return None
    spread = np.arange(depth // whole) * whole // given.block
    if is_placeholder(given.codes):
        return _unread_rows(given)
    exponent, factor = _FLOATS.get(given.codes.dtype.name, (0, 1.0))
    if exponent and not _are_halves(given, exponent, factor):
        return None
    codes, zeros = (_bits(given), np.zeros(())) if exponent else _around_zero(given)
    is_one = (zeros == zeros.flat[0]).all() and float(zeros.flat[0]).is_integer()
    layout = PackedLayout(given.bits, math.gcd(whole, _SPAN), int(zeros.flat[0]) if is_one else 0, exponent)
    # in float16 as they are
    has_room = given.scales.dtype == np.float16 and np.abs(given.scales).max() * factor <= _LARGEST_HALF
    scales = (given.scales * np.float32(factor)).astype(np.float16 if has_room else np.float32)
    parameters = [each.take(spread, 1) for each in ([scales] if is_one else [scales, zeros])]
    rows = codes if given.bits == 8 else _pairs(codes, layout.span)
    return _if_small(PackedMatrix(layout, len(codes), (rows, *parameters)), given)


def _unread_rows(given: Codes) -> PackedMatrix | None:
    """Placeholders for what `packed_rows` makes of weights that are not read: of zeros, and of scales that
    float16 has room for. Zero points of which there are several differ."""
    scales, zeros = np.ones((2, given.scales.shape[1]), given.scales.dtype), given.zeros
    if zeros is not None and zeros.size > 1:
        zeros = np.zeros(scales.shape, zeros.dtype)
        zeros[1] = 1
    two_rows = packed_rows(replace(given, codes=np.array(given.codes[:2]), scales=scales, zeros=zeros))
    if two_rows is None:
        return None
    rows = len(given.codes)
    operands = tuple(placeholder((rows, *each.shape[1:]), each.dtype) for each in two_rows.operands)
    return replace(two_rows, columns=rows, operands=operands)


def _if_small(packed: PackedMatrix, given: Codes) -> PackedMatrix | None:
    size_bytes = sum(each.nbytes for each in packed.operands)
    return packed if size_bytes <= 4 * given.codes.size * _MOST_OF_DENSE else None


def _around_zero(given: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Codes and zeros as kernels want them: 4 bits unsigned, 8 bits signed, most often around 0."""
    is_signed = ml_dtypes.iinfo(given.codes.dtype).min < 0
    shift = 8 if is_signed and given.bits == 4 else -128 if not is_signed and given.bits == 8 else 0
    kept = np.uint8 if given.bits == 4 else np.int8
    zeros: np.ndarray = np.zeros((), np.int16) if given.zeros is None else given.zeros
    codes = (given.codes.astype(np.int16) + shift).astype(kept)
    if np.issubdtype(zeros.dtype, np.floating):
        return codes, zeros.astype(np.float32) + np.float32(shift)
    return codes, (zeros.astype(np.int16) + shift).astype(kept)


def _bits(given: Codes) -> np.ndarray:
    """Those of floating-point codes, in the lower bits of bytes."""
    return given.codes.view(np.uint8) & np.uint8((1 << given.bits) - 1)


def _are_halves(given: Codes, exponent: int, factor: float) -> bool:
    """Whether all codes are numbers that float16 has, but for a factor.

    A type may give bits of its own to what is not a number.
    """
    every = np.arange(1 << given.bits, dtype=np.uint8)
    numbers = every.view(given.codes.dtype).astype(np.float32)
    sign = 1 << (given.bits - 1)
    magnitude = (every & (sign - 1)).astype(np.uint16) << (11 - given.bits + exponent)
    halves = magnitude | (every & sign).astype(np.uint16) << (16 - given.bits)
    with np.errstate(invalid="ignore"):  # what is not a number is equal to none
        are_same = halves.view(np.float16).astype(np.float32) * np.float32(factor) == numbers
    return bool(are_same[_bits(given)].all())


def _pairs(codes: np.ndarray, span: int) -> np.ndarray:
    """`[N, K / 2]`: the codes of k in the lower bits, those half a span further in the upper ones."""
    parted = codes.reshape(len(codes), -1, 2, span // 2)
    return (parted[:, :, 0] | parted[:, :, 1] << 4).reshape(len(codes), -1)


def _panels(rows: np.ndarray, width: int) -> np.ndarray:
    """`[rows, N]` as `[panels, rows, width]`, padded with zeros."""
    height, columns = rows.shape
    if is_placeholder(rows):
        return placeholder((-(-columns // width), height, width), rows.dtype)
    padded = np.pad(rows, ((0, 0), (0, -columns % width)))
    return np.ascontiguousarray(padded.reshape(height, -1, width).transpose(1, 0, 2))
