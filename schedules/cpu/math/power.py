"""pow(x, y) of float32, computed as 2**(y * log2(x)) in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import ir, tirx

from hybridc.schedules.cpu.core.lanewise import (
    bits,
    constant,
    dtype,
    integer,
    llvm,
    named,
    negated_where,
    polynomial,
    single,
    wide,
)

_LOG2 = (
    -0.06973800730394908, 0.1325110788267417, -0.13462941783400267, 0.1302758565424423, -0.142498646675194,
    0.1602166433836112, -0.1804367491206269, 0.20610712422603925, -0.24044643363729837, 0.28853879570043356,
    -0.36067379313660536, 0.48089834880312177, -0.7213475203275544, 1.442695040886573,
)  # fmt: skip
"""log2(1 + f) / f for 1 + f in [sqrt(1/2), sqrt(2)], a minimax fit whose relative error is 2.6e-12."""
_EXP2 = (
    0.00015345807535779713, 0.0013399931181735947, 0.00961848897374681, 0.05550328777082879,
    0.24022646890479796, 0.6931472057371953, 1.0000000005541885,
)  # fmt: skip
"""2**r for |r| <= 1/2, a minimax fit whose relative error is 1.9e-9."""
_ROUND = 1.5 * 2.0**52
"""Adding it leaves an integer in the low bits of a float64's mantissa."""


def pow_float32(x: ir.Expr, y: ir.Expr) -> ir.Expr:
    """Within 0.6 units in the last place for all x and y, 2.5 for exponents in `_SIMPLE`.

    Special values are those of C's pow.
    """
    simple = _SIMPLE.get(_literal(y))
    if simple is not None:
        return named(x, simple)
    return named(x, lambda x: named(y, lambda y: named(llvm("fabs", x), lambda m: _of_magnitude(x, y, m))))


def _literal(y: ir.Expr) -> float:
    value = y.value if isinstance(y, tirx.Broadcast) else y
    return float(value.value) if isinstance(value, tirx.FloatImm) else math.nan


def _three_quarters(x: ir.Expr) -> ir.Expr:
    """The root of |x| times its own root; NaN for finite x below zero."""
    undefined = tirx.And(x < constant(x, 0.0), x > constant(x, -math.inf))
    value = named(llvm("sqrt", llvm("fabs", x)), lambda root: root * llvm("sqrt", root))
    return tirx.Select(undefined, constant(x, math.nan), value)


_SIMPLE: dict[float, Callable[[ir.Expr], ir.Expr]] = {3.0: lambda x: x * x * x, 0.75: _three_quarters}
"""Exponents of gelu and of local response normalisation. TVM itself takes care of 2 and 1/2."""


def _of_magnitude(x: ir.Expr, y: ir.Expr, magnitude: ir.Expr) -> ir.Expr:
    one, zero, infinity = (constant(x, value) for value in (1.0, 0.0, math.inf))
    # half of an odd integer is no integer; of floats above 2**24 all are even
    half = y * constant(x, 0.5)
    fraction = tirx.NE(llvm("trunc", y), y)
    odd = tirx.Not(tirx.Or(fraction, tirx.EQ(llvm("trunc", half), half)))

    def signed(size: ir.Expr) -> ir.Expr:
        value = negated_where(tirx.And(bits(x) < integer(x, 0), odd), size)
        root = tirx.And(tirx.And(x < zero, magnitude < infinity), fraction)
        value = tirx.Select(root, constant(x, math.nan), value)
        return tirx.Select(tirx.Or(tirx.EQ(x, one), tirx.EQ(y, zero)), one, value)

    # one to any power is one, to infinity and NaN too, where 0 * infinity would be NaN
    size = tirx.Select(tirx.EQ(magnitude, one), one, _power(magnitude, y))
    ordered = tirx.And(magnitude <= infinity, llvm("fabs", y) <= infinity)
    return named(tirx.Select(ordered, size, x + y), signed)


def _power(magnitude: ir.Expr, y: ir.Expr) -> ir.Expr:
    """2**(y * log2(magnitude)); where that is far out of range any value as far out will do."""
    exponent = wide(y) * _log2(magnitude)
    # 2**256 is infinite and 2**-256 zero in float32, and both are ordinary numbers in float64
    bounded = tirx.max(tirx.min(exponent, constant(exponent, 256.0)), constant(exponent, -256.0))
    return named(bounded, lambda t: single(_exp2(t)))


def _log2(magnitude: ir.Expr) -> ir.Expr:
    """In float64; infinite for zero and infinity."""
    smallest = 2.0**-126
    tiny = magnitude < constant(magnitude, smallest)

    def from_bits(pattern: ir.Expr) -> ir.Expr:
        # move the interval so that the mantissa lies around one
        moved = pattern - integer(magnitude, 0x3F3504F3)
        mantissa = (moved & integer(magnitude, 0x007FFFFF)) + integer(magnitude, 0x3F3504F3)
        exponent = tirx.Cast(dtype(magnitude), moved >> integer(magnitude, 23))
        # denormal numbers were scaled by 2**24, which makes them normal
        scale = tirx.Select(tiny, constant(magnitude, -24.0), constant(magnitude, 0.0))
        f = wide(tirx.reinterpret(dtype(magnitude), mantissa) - constant(magnitude, 1.0))
        return named(f, lambda f: f * polynomial(f, _LOG2) + wide(exponent + scale))

    normal = tirx.Select(tiny, magnitude * constant(magnitude, 2.0**24), magnitude)
    value = named(bits(normal), from_bits)
    infinity, zero = constant(magnitude, math.inf), constant(magnitude, 0.0)
    value = tirx.Select(tirx.EQ(magnitude, infinity), constant(value, math.inf), value)
    return tirx.Select(tirx.EQ(magnitude, zero), constant(value, -math.inf), value)


def _exp2(t: ir.Expr) -> ir.Expr:
    """In float64, of |t| <= 256: the exponent is added to the bits of what is near one."""

    def scaled(n: ir.Expr) -> ir.Expr:
        fraction = named(t - n, lambda r: polynomial(r, _EXP2))
        # 52 bits of mantissa below the exponent: adding n there multiplies by 2**n
        exponent = bits(n + constant(t, _ROUND)) << integer(t, 52)
        return tirx.reinterpret(dtype(t), bits(fraction) + exponent)

    return named(llvm("rint", t), scaled)
