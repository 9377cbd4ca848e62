"""Vectorised elementary functions: polynomials where LLVM would call scalar libm for each lane.

Errors are at most about 2e-7 relative to float64 (sigmoid, tanh and erf: of the scale 1); NaN, infinities and
denormal results are those of libm. Sources of the coefficients: Cephes (S. Moshier) for exp and log, Eigen's
rational minimax fits for tanh and erf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from tvm import ir, tirx

Elementary = Callable[[ir.Expr], ir.Expr]

_ROUND = 12582912.0
"""1.5 * 2**23: adding it leaves the nearest integer in the low bits of a float32's mantissa."""
_PRIORITY = 150
"""Above TVM's own lowering for LLVM."""


@cache
def install() -> None:
    """Register the lowerings for LLVM code generation of this process; calling it again does nothing."""
    for name, function, wide in (
        ("exp", _exp, _libm("exp")),
        ("log", _log, _libm("log")),
        ("sigmoid", _sigmoid, None),
        ("tanh", _tanh, _wide_tanh),
        ("erf", _erf, None),
    ):
        lowering = _lowering(function, wide)
        tirx.register_intrin_lowering(f"tirx.{name}", target="llvm", f=lowering, level=_PRIORITY)


def _lowering(function: Elementary, wide: Elementary | None) -> Callable[[ir.Call], ir.Expr]:
    """Rewrite scalar and vector calls: narrow floats in float32, float64 by `wide` or TVM's own rule."""

    def lower(call: ir.Call) -> ir.Expr:
        x = call.args[0]
        kind, _, lanes = _dtype(x).partition("x")
        if kind == "float32":
            return function(x)
        if kind == "float64":
            return call if wide is None else wide(x)
        single = f"float32{'x' if lanes else ''}{lanes}"
        return tirx.Cast(_dtype(x), function(tirx.Cast(single, x)))

    return lower


def _libm(name: str) -> Elementary:
    return lambda x: tirx.call_llvm_pure_intrin(_dtype(x), f"llvm.{name}", x)


def _wide_tanh(x: ir.Expr) -> ir.Expr:
    one, two = _constant(x, 1.0), _constant(x, 2.0)
    return one - two / (_libm("exp")(x * two) + one)


def _constant(x: ir.Expr, value: float) -> ir.Expr:
    return tirx.const(value, _dtype(x))


def _integer(x: ir.Expr, value: int) -> ir.Expr:
    return tirx.const(value, _integer_dtype(x))


def _dtype(x: ir.Expr) -> str:
    return str(x.ty.dtype)


def _integer_dtype(x: ir.Expr) -> str:
    return _dtype(x).replace("float32", "int32")


def _bits(x: ir.Expr) -> ir.Expr:
    return tirx.reinterpret(_integer_dtype(x), x)


def _polynomial(x: ir.Expr, coefficients: Sequence[float]) -> ir.Expr:
    """Horner's rule, highest power first."""
    value = _constant(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _constant(x, coefficient)
    return value


def _named(value: ir.Expr, body: Callable[[ir.Var], ir.Expr]) -> ir.Expr:
    """Compute a value once; expressions are trees, and every use would repeat it."""
    var = tirx.Var("t", _dtype(value))
    return tirx.Let(var, value, body(var))


def _exp(x: ir.Expr) -> ir.Expr:
    """exp(x) = 2**n * exp(r), |r| <= ln(2) / 2; 2**n in two factors, for denormal results."""

    def scaled(x: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        n = shifted - _constant(x, _ROUND)
        r = x - n * _constant(x, 0.693359375) - n * _constant(x, -2.12194440e-4)
        return _named(r, lambda r: fraction(r, _bits(shifted) - _integer(x, 0x4B400000)))

    def fraction(r: ir.Expr, n: ir.Expr) -> ir.Expr:
        terms = (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        )
        power = _polynomial(r, terms) * r * r + r + _constant(r, 1.0)
        return _named(
            n, lambda n: _named(n >> _integer(r, 1), lambda h: power * two_to(r, h) * two_to(r, n - h))
        )

    def two_to(x: ir.Expr, n: ir.Expr) -> ir.Expr:
        return tirx.reinterpret(_dtype(x), (n + _integer(x, 127)) << _integer(x, 23))

    def limited(x: ir.Expr) -> ir.Expr:
        shifted = x * _constant(x, 1.44269504088896341) + _constant(x, _ROUND)
        value = _named(shifted, lambda s: scaled(x, s))
        overflow = tirx.Select(x > _constant(x, 88.72283935546875), _constant(x, float("inf")), value)
        return tirx.Select(x < _constant(x, -103.97208404541016), _constant(x, 0.0), overflow)

    return _named(x, limited)


def _log(x: ir.Expr) -> ir.Expr:
    """log(x) = e * ln(2) + log(m), m in [sqrt(1/2), sqrt(2)); denormals are scaled up first."""

    def from_bits(x: ir.Expr, bits: ir.Expr, bias: ir.Expr) -> ir.Expr:
        # move the interval so that the mantissa lies around one
        moved = bits - _integer(x, 0x3F3504F3)
        exponent = moved >> _integer(x, 23)
        mantissa = (moved & _integer(x, 0x007FFFFF)) + _integer(x, 0x3F3504F3)
        e = tirx.Cast(_dtype(x), exponent) + bias
        f = tirx.reinterpret(_dtype(x), mantissa) - _constant(x, 1.0)
        return _named(e, lambda e: _named(f, lambda f: combined(e, f)))

    def combined(e: ir.Expr, f: ir.Expr) -> ir.Expr:
        terms = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                 -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
        z = f * f
        tail = f * z * _polynomial(f, terms) + e * _constant(f, -2.12194440e-4) - z * _constant(f, 0.5)
        return f + tail + e * _constant(f, 0.693359375)

    def limited(x: ir.Expr) -> ir.Expr:
        tiny = x < _constant(x, 1.17549435e-38)
        normal = tirx.Select(tiny, x * _constant(x, 8388608.0), x)
        bias = tirx.Select(tiny, _constant(x, -23.0), _constant(x, 0.0))
        value = _named(_bits(normal), lambda bits: from_bits(x, bits, bias))
        # written so that NaN, which fails every comparison, takes the last branch of each
        value = tirx.Select(x < _constant(x, float("inf")), value, x)
        value = tirx.Select(x < _constant(x, 0.0), _constant(x, float("nan")), value)
        return tirx.Select(tirx.EQ(x, _constant(x, 0.0)), _constant(x, float("-inf")), value)

    return _named(x, limited)


def _sigmoid(x: ir.Expr) -> ir.Expr:
    one = _constant(x, 1.0)
    return one / (one + _exp(_constant(x, 0.0) - x))


def _rational(x: ir.Expr, limit: float, odd: Sequence[float], even: Sequence[float]) -> ir.Expr:
    """x * odd(x**2) / even(x**2), constant beyond `limit`; NaN passes through the comparisons."""

    def bounded(x: ir.Expr) -> ir.Expr:
        below = tirx.Select(x < _constant(x, -limit), _constant(x, -limit), x)
        return tirx.Select(x > _constant(x, limit), _constant(x, limit), below)

    def ratio(x: ir.Expr) -> ir.Expr:
        return _named(x * x, lambda z: x * _polynomial(z, odd) / _polynomial(z, even))

    return _named(x, lambda x: _named(bounded(x), ratio))


def _tanh(x: ir.Expr) -> ir.Expr:
    odd = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
           1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)  # fmt: skip
    even = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    return _rational(x, 7.90531110763549805, odd, even)


def _erf(x: ir.Expr) -> ir.Expr:
    odd = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
           -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
    even = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
            -1.42647390514189e-02)  # fmt: skip
    return _rational(x, 4.0, odd, even)
