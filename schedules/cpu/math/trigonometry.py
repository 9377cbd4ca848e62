"""sin, cos and tan of float32, right for arguments of any size.

The argument is reduced with as many bits of 2/pi as its exponent asks for (M. Payne and R. Hanek, "Radian
reduction for trigonometric functions", SIGNUM Newsletter 18, 1983), here in float64: x times 29 bits of 2/pi
is exact, and multiples of four are dropped. Coefficients of the polynomials are those of Cephes (S. Moshier).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import ir, tirx

from hybridc.schedules.cpu.core.lanewise import (
    bits,
    constant,
    dtype,
    llvm,
    named,
    negated_where,
    polynomial,
    single,
    wide,
)

_TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDE
"""The first 232 bits of 2/pi after the point."""
_BITS = 232
_PART_BITS = 29
_THRESHOLDS = (2.0**54, 2.0**83, 2.0**112)
"""From here on another part of 2/pi contributes nothing but multiples of four."""
_ROUND = 1.5 * 2.0**52
"""Adding it leaves an integer in the low bits of a float64's mantissa."""
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def sin_float32(x: ir.Expr) -> ir.Expr:
    """Within two units in the last place."""
    return named(x, lambda x: _zero_or(x, _reduced(x, _sine)))


def cos_float32(x: ir.Expr) -> ir.Expr:
    """Within two units in the last place."""
    return _reduced(x, lambda y, quadrant: _sine(y, quadrant + tirx.const(1, dtype(quadrant))))


def tan_float32(x: ir.Expr) -> ir.Expr:
    """Within four units in the last place."""

    def ratio(y: ir.Expr, quadrant: ir.Expr) -> ir.Expr:
        odd = tirx.NE(quadrant & tirx.const(1, dtype(quadrant)), tirx.const(0, dtype(quadrant)))
        return named(_sin(y), lambda s: named(_cos(y), lambda c: quotient(s, c, odd)))

    def quotient(s: ir.Expr, c: ir.Expr, odd: ir.Expr) -> ir.Expr:
        return tirx.Select(odd, constant(s, 0.0) - c, s) / tirx.Select(odd, s, c)

    return named(x, lambda x: _zero_or(x, _reduced(x, ratio)))


def _zero_or(x: ir.Expr, value: ir.Expr) -> ir.Expr:
    """Zeros as they are: reduced, they would lose their sign."""
    return tirx.Select(tirx.EQ(x, constant(x, 0.0)), x, value)


def _sine(y: ir.Expr, quadrant: ir.Expr) -> ir.Expr:
    def bit(mask: int) -> ir.Expr:
        return tirx.NE(quadrant & tirx.const(mask, dtype(quadrant)), tirx.const(0, dtype(quadrant)))

    return negated_where(bit(2), tirx.Select(bit(1), _cos(y), _sin(y)))


def _sin(y: ir.Expr) -> ir.Expr:
    return named(y * y, lambda z: y + y * z * polynomial(z, _SIN))


def _cos(y: ir.Expr) -> ir.Expr:
    return named(y * y, lambda z: constant(z, 1.0) - z * constant(z, 0.5) + z * z * polynomial(z, _COS))


def _reduced(x: ir.Expr, body: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> ir.Expr:
    """`body(y, quadrant)` for x = y + quadrant * pi/2 with |y| <= pi/4; quadrants are right modulo 4."""

    def from_wide(w: ir.Expr) -> ir.Expr:
        size = llvm("fabs", w)
        # three parts of 2/pi: 58 bits exactly, and the rest as one float64
        first, second, rest = (w * _part(size, k) for k in range(3))
        return named(first, lambda a: named(second, lambda b: near(modulo_four(a), b, rest)))

    def modulo_four(a: ir.Expr) -> ir.Expr:
        # whole turns drop out: only the quadrant modulo four counts
        return a - constant(a, 4.0) * llvm("rint", a * constant(a, 0.25))

    def near(a: ir.Expr, b: ir.Expr, rest: ir.Expr) -> ir.Expr:
        return named(a, lambda a: named(llvm("rint", a + b), lambda n: quarter(a, b, rest, n)))

    def quarter(a: ir.Expr, b: ir.Expr, rest: ir.Expr, n: ir.Expr) -> ir.Expr:
        # largest first: a and n nearly cancel, and exactly
        r = (a - n) + b + rest
        quadrant = tirx.Cast(dtype(x).replace("float32", "int32"), bits(n + constant(n, _ROUND)))
        return named(single(r * constant(r, math.pi / 2)), lambda y: body(y, quadrant))

    return named(wide(x), from_wide)


def _part(size: ir.Expr, number: int) -> ir.Expr:
    """The first, the second, or the rest of the bits of 2/pi that count for numbers as large as `size`."""
    value = constant(size, _bits_of_two_over_pi(number, 0))
    for dropped, threshold in enumerate(_THRESHOLDS, 1):
        part = constant(size, _bits_of_two_over_pi(number, dropped))
        value = tirx.Select(size < constant(size, threshold), value, part)
    return value


def _bits_of_two_over_pi(number: int, dropped: int) -> float:
    """29 bits as a float64; of part 2 as many as a float64 has."""
    # 24 bits of the argument times 29 of 2/pi are 53, all that a float64 holds exactly
    below = _BITS - _PART_BITS * (dropped + number)
    rest = _TWO_OVER_PI & ((1 << below) - 1)
    if number < 2:
        rest = rest >> (below - _PART_BITS) << (below - _PART_BITS)
    return math.ldexp(rest, -_BITS)
