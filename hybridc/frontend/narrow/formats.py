"""Codes of floating point numbers of at most 8 bits, and of integers of fewer than 8, as TensorIR
expressions.

Formats: P. Micikevicius et al., FP8 Formats for Deep Learning (2022); B. Noune et al., 8-bit Numerical
Formats for Deep Neural Networks (2022), those without a negative zero; Open Compute Project, Microscaling
Formats (2023), those of 4 bits and of scales. What a cast makes of a number is as in ONNX's `Cast`, and bit
for bit as in the package ml_dtypes, which onnx computes it by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import onnx_ir as ir
from tvm import tirx
from tvm.ir import Expr

CODE = "uint8"
"""Type of codes: each fills the lowest bits of a byte, of the others none is read."""
_FRACTION, _BIAS = 23, 127
"""Bits of the fraction of float32, and what is added to its exponents."""
_NAN = 0x7FC00000
"""What is not a number, in float32."""


class Format(Protocol):
    """Numbers by their codes."""

    @property
    def is_integer(self) -> bool: ...

    def decoded(self, code: Expr) -> Expr:
        """The number, exactly: of floating point float32, of integers int8 or uint8."""
        ...

    def encoded(self, x: Expr, saturates: bool, rounding: str) -> Expr:
        """The code of a number: of float32, or for integers of any type."""
        ...


@dataclass(frozen=True, slots=True)
class Float:
    """Sign, exponent and fraction."""

    width: int
    fraction: int
    """Bits of it; the others but the sign are the exponent's."""
    bias: int
    largest: int
    """Code of the largest number. The codes below it are those of smaller numbers, in order, down to 0."""
    nan: int
    """Code of what is not a number; 0 where there is none."""
    infinity: int = 0
    """Code; 0 where there is none."""
    is_integer: bool = False

    @property
    def sign(self) -> int:
        """The bit that is the sign."""
        return 1 << self.width - 1

    @property
    def is_unsigned_zero(self) -> bool:
        """What would be a negative zero is not a number."""
        return self.nan == self.sign

    def decoded(self, code: Expr) -> Expr:
        wide = code.astype("uint32")
        magnitude = wide & _bits(self.sign - 1)
        exponent, fraction = magnitude >> _bits(self.fraction), wide & _bits((1 << self.fraction) - 1)
        leading = (exponent + _bits(_BIAS - self.bias)) << _bits(_FRACTION)
        pattern = leading | (fraction << _bits(_FRACTION - self.fraction))
        step = tirx.const(2.0 ** (1 - self.bias - self.fraction), "float32")
        small = _pattern(fraction.astype("float32") * step)
        pattern = tirx.Select(exponent == _bits(0), small, pattern)
        if self.infinity:
            is_infinite = magnitude == _bits(self.infinity)
            pattern = tirx.Select(is_infinite, _bits(0xFF << _FRACTION), pattern)
        sign = (wide & _bits(self.sign)) << _bits(32 - self.width)
        pattern = pattern | sign
        if self.is_unsigned_zero:
            pattern = tirx.Select(wide == _bits(self.nan), _bits(_NAN), pattern)
        elif self.nan:
            is_nan = magnitude > _bits(max(self.largest, self.infinity))
            pattern = tirx.Select(is_nan, _bits(_NAN) | sign, pattern)
        return _number(pattern)

    def encoded(self, x: Expr, saturates: bool, rounding: str) -> Expr:
        """Rounded to even. Above the largest number that itself if `saturates`, else infinity or no number.

        A magnitude is n steps of its exponent's, at most twice as many as the fraction has values; as codes
        count numbers in order, n and the steps of all lower exponents make the code.
        """
        is_negative, is_nan = _pattern(x) >= _bits(1 << 31), tirx.isnan(x)
        # of infinity the largest number of float32, which is beyond the format's just as well
        magnitude = tirx.min(tirx.abs(x), tirx.max_value("float32"))
        magnitude = tirx.Select(is_nan, tirx.const(0, "float32"), magnitude)
        # exponents are biased: the least one of numbers with a leading one is that of all below, too
        least = _BIAS + 1 - self.bias
        exponent = tirx.max(_pattern(magnitude) >> _bits(_FRACTION), _bits(least))
        inverse = _number((_bits(self.fraction + 2 * _BIAS) - exponent) << _bits(_FRACTION))
        steps = tirx.nearbyint(magnitude * inverse).astype("uint32")
        code = steps + ((exponent - _bits(least)) << _bits(self.fraction))
        beyond = self.largest if saturates else self.infinity or self.nan or self.largest
        code = tirx.Select(code > _bits(self.largest), _bits(beyond), code)
        sign = tirx.Select(is_negative, _bits(self.sign), _bits(0))
        if self.is_unsigned_zero:
            is_plain = tirx.any(code == _bits(0), code == _bits(self.nan))
            code = tirx.Select(is_plain, code, code | sign)
            return tirx.Select(is_nan, _bits(self.nan), code).astype(CODE)
        # ml_dtypes makes a zero of the other sign of what is not a number, where nothing stands for that
        return (tirx.Select(is_nan, _bits(self.nan or self.sign), code) ^ sign).astype(CODE)


@dataclass(frozen=True, slots=True)
class Scale:
    """Powers of two, 2**(code - 127), as E8M0 of the microscaling formats; 255 is not a number."""

    is_integer: bool = False

    def decoded(self, code: Expr) -> Expr:
        wide = code.astype("uint32")
        # the least power has no leading one in float32; where 255 stands there is infinity
        pattern = tirx.Select(wide == _bits(0), _bits(1 << _FRACTION - 1), wide << _bits(_FRACTION))
        return _number(tirx.Select(wide == _bits(255), _bits(_NAN), pattern))

    def encoded(self, x: Expr, saturates: bool, rounding: str) -> Expr:
        """`rounding` is up, down or nearest. The sign is dropped, as onnx does."""
        pattern = _pattern(x)
        exponent = (pattern >> _bits(_FRACTION)) & _bits(0xFF)
        fraction, half = pattern & _bits((1 << _FRACTION) - 1), _bits(1 << _FRACTION - 1)
        moves = exponent < _bits(254 if saturates else 255)
        if rounding == "up":
            moves = tirx.all(moves, fraction > _bits(0))
        elif rounding == "nearest":  # halves go up, but of numbers without a leading one
            is_half = tirx.all(fraction == half, exponent > _bits(0))
            moves = tirx.all(moves, tirx.any(fraction > half, is_half))
        else:
            return exponent.astype(CODE)
        return tirx.Select(moves, exponent + _bits(1), exponent).astype(CODE)


@dataclass(frozen=True, slots=True)
class Integer:
    """Of few bits; of a larger number the lowest ones."""

    width: int
    is_signed: bool
    is_integer: bool = True

    def decoded(self, code: Expr) -> Expr:
        free = 32 - self.width
        if not self.is_signed:
            return code & tirx.const((1 << self.width) - 1, CODE)
        return ((code.astype("int32") << free) >> free).astype("int8")

    def encoded(self, x: Expr, saturates: bool, rounding: str) -> Expr:
        return (x.astype("int32") & ((1 << self.width) - 1)).astype(CODE)


def _bits(value: int) -> Expr:
    """Unsigned: signed integers of 32 bits TVM would take for positions, and widen them."""
    return tirx.const(value, "uint32")


def _pattern(x: Expr) -> Expr:
    """The bits of a float32."""
    return tirx.reinterpret("uint32", x)


def _number(pattern: Expr) -> Expr:
    """The float32 that bits stand for."""
    return tirx.reinterpret("float32", pattern)


FORMATS: Mapping[ir.DataType, Format] = MappingProxyType(
    {
        ir.DataType.FLOAT8E4M3FN: Float(8, 3, 7, largest=0x7E, nan=0x7F),
        ir.DataType.FLOAT8E4M3FNUZ: Float(8, 3, 8, largest=0x7F, nan=0x80),
        ir.DataType.FLOAT8E5M2: Float(8, 2, 15, largest=0x7B, nan=0x7E, infinity=0x7C),
        ir.DataType.FLOAT8E5M2FNUZ: Float(8, 2, 16, largest=0x7F, nan=0x80),
        ir.DataType.FLOAT4E2M1: Float(4, 1, 1, largest=0x7, nan=0),
        ir.DataType.FLOAT8E8M0: Scale(),
        ir.DataType.INT4: Integer(4, True),
        ir.DataType.UINT4: Integer(4, False),
        ir.DataType.INT2: Integer(2, True),
        ir.DataType.UINT2: Integer(2, False),
    }
)
