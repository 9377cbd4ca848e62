"""Vectorised elementary functions: polynomials where LLVM would call scalar libm for each lane.

Errors in units in the last place (of the exact result, denormal ones too), over all float32 arguments:

    exp 1.1    log 1    sigmoid 2.5    tanh, erf 6    sinh, cosh 4    sin, cos 2    tan 4    pow 0.6

NaN, infinities, signs of zero and denormal results are those of libm. Sources of the coefficients: Cephes (S.
Moshier) for exp and log, minimax fits of our own for tanh and erf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.lanewise import bits, constant, dtype, integer, llvm, named, polynomial
from hybridc.schedules.cpu.math.power import pow_float32
from hybridc.schedules.cpu.math.quantize import OPERATOR, steps
from hybridc.schedules.cpu.math.trigonometry import cos_float32, sin_float32, tan_float32

Elementary = Callable[..., ir.Expr]

_ROUND = 12582912.0
"""1.5 * 2**23: adding it leaves the nearest integer in the low bits of a float32's mantissa."""
_PRIORITY = 150
"""Above TVM's own lowering for LLVM."""


@cache
def install() -> None:
    """Register the lowerings for LLVM code generation of this process; calling it again does nothing."""
    for name, (function, double) in _FUNCTIONS.items():
        lowering = _lowering(function, double)
        tirx.register_intrin_lowering(name, target="llvm", f=lowering, level=_PRIORITY)
    tirx.register_intrin_lowering(OPERATOR, target="llvm", f=lambda call: steps(*call.args), level=_PRIORITY)
    for name in ("erf", "rsqrt", "nearbyint"):  # those that TVM would take apart into lanes
        ir.register_op_attr(f"tirx.{name}", "TVectorizable", True)


def _lowering(function: Elementary, double: Elementary) -> Callable[[ir.Call], ir.Expr]:
    """Rewrite scalar and vector calls: half types in float32, float64 by `double`."""

    def lower(call: ir.Call) -> ir.Expr:
        # float16 and bfloat16 go through float32, whose error is far below theirs
        kind, _, lanes = dtype(call).partition("x")
        if kind == "float32":
            return function(*call.args)
        if kind == "float64":
            return double(*call.args)
        single = f"float32{'x' if lanes else ''}{lanes}"
        return tirx.Cast(dtype(call), function(*(tirx.Cast(single, x) for x in call.args)))

    return lower


def _double_sigmoid(x: ir.Expr) -> ir.Expr:
    one = constant(x, 1.0)
    return one / (one + llvm("exp", constant(x, 0.0) - x))


def _double_erf(x: ir.Expr) -> ir.Expr:
    """libm's, lane by lane: LLVM has no such function of vectors."""
    _, _, lanes = dtype(x).partition("x")
    if not lanes:
        return tirx.call_pure_extern("float64", "erf", x)

    def by_lanes(x: ir.Expr) -> ir.Expr:
        elements = [tirx.Shuffle([x], [lane]) for lane in range(int(lanes))]
        called = [tirx.call_pure_extern("float64", "erf", element) for element in elements]
        return tirx.Shuffle(called, list(range(int(lanes))))

    return named(x, by_lanes)


def _exp(x: ir.Expr, greatest: float = 89.0) -> ir.Expr:
    """exp(x) = 2**n * exp(r), |r| <= ln(2) / 2; 2**n in two factors, for denormal results and infinity.

    Arguments above `greatest` count as that; exp(89) is infinite.
    """

    def scaled(x: ir.Expr, shifted: ir.Expr) -> ir.Expr:
        n = shifted - constant(x, _ROUND)
        # ln(2) in two parts, of which the first has 9 bits: its product with n is exact
        r = x - n * constant(x, 0.693359375) - n * constant(x, -2.12194440e-4)
        # the bits of 1.5 * 2**23; what is above them is n as an integer
        return named(r, lambda r: fraction(r, bits(shifted) - integer(x, 0x4B400000)))

    def fraction(r: ir.Expr, n: ir.Expr) -> ir.Expr:
        terms = (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        )
        # 1 + r apart from the polynomial, as its own terms are small beside them
        power = polynomial(r, terms) * r * r + r + constant(r, 1.0)
        return named(
            n, lambda n: named(n >> integer(r, 1), lambda h: power * two_to(r, h) * two_to(r, n - h))
        )

    def two_to(x: ir.Expr, n: ir.Expr) -> ir.Expr:
        # bias of the exponent, and bits of the mantissa below it
        return tirx.reinterpret(dtype(x), (n + integer(x, 127)) << integer(x, 23))

    def limited(x: ir.Expr) -> ir.Expr:
        shifted = x * constant(x, 1.44269504088896341) + constant(x, _ROUND)
        return named(shifted, lambda s: scaled(x, s))

    # the constant comes first: of two operands of which one is NaN, x86 takes the second
    bounded = tirx.min(constant(x, greatest), tirx.max(constant(x, -104.0), x))
    return named(bounded, limited)


def _log(x: ir.Expr) -> ir.Expr:
    """log(x) = e * ln(2) + log(m), m in [sqrt(1/2), sqrt(2)); denormals are scaled up first."""

    def from_bits(x: ir.Expr, bits: ir.Expr, bias: ir.Expr) -> ir.Expr:
        # move the interval so that the mantissa lies around one
        moved = bits - integer(x, 0x3F3504F3)
        exponent = moved >> integer(x, 23)
        mantissa = (moved & integer(x, 0x007FFFFF)) + integer(x, 0x3F3504F3)
        e = tirx.Cast(dtype(x), exponent) + bias
        f = tirx.reinterpret(dtype(x), mantissa) - constant(x, 1.0)
        return named(e, lambda e: named(f, lambda f: combined(e, f)))

    def combined(e: ir.Expr, f: ir.Expr) -> ir.Expr:
        terms = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                 -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
        z = f * f
        tail = f * z * polynomial(f, terms) + e * constant(f, -2.12194440e-4) - z * constant(f, 0.5)
        return f + tail + e * constant(f, 0.693359375)

    def limited(x: ir.Expr) -> ir.Expr:
        # the least normal number; denormal ones are scaled by 2**23 and 23 subtracted at the end
        tiny = x < constant(x, 1.17549435e-38)
        normal = tirx.Select(tiny, x * constant(x, 8388608.0), x)
        bias = tirx.Select(tiny, constant(x, -23.0), constant(x, 0.0))
        value = named(bits(normal), lambda bits: from_bits(x, bits, bias))
        # written so that NaN, which fails every comparison, takes the last branch of each
        value = tirx.Select(x < constant(x, float("inf")), value, x)
        value = tirx.Select(x < constant(x, 0.0), constant(x, float("nan")), value)
        return tirx.Select(tirx.EQ(x, constant(x, 0.0)), constant(x, float("-inf")), value)

    return named(x, limited)


def _sigmoid(x: ir.Expr) -> ir.Expr:
    """exp(x) / (1 + exp(x)), which is precise for small results too, with exp(x) kept finite."""
    # above 88 exp(x) would be infinite, and infinity by infinity no number
    return named(_exp(x, greatest=88.0), lambda power: power / (power + constant(power, 1.0)))


def _sinh(x: ir.Expr) -> ir.Expr:
    """A series near zero, where exp(x) and exp(-x) cancel."""

    def near_zero(x: ir.Expr) -> ir.Expr:
        terms = (1.0 / 39916800, 1.0 / 362880, 1.0 / 5040, 1.0 / 120, 1.0 / 6)
        return named(x * x, lambda z: x + x * z * polynomial(z, terms))

    def halves(x: ir.Expr) -> ir.Expr:
        # from one on the difference of the halves loses less than a bit
        small = llvm("fabs", x) < constant(x, 1.0)
        return tirx.Select(small, near_zero(x), _half_powers(x, lambda a, b: a - b))

    return named(x, halves)


def _cosh(x: ir.Expr) -> ir.Expr:
    return _half_powers(x, lambda a, b: a + b)


def _half_powers(x: ir.Expr, combine: Elementary) -> ir.Expr:
    """exp(x) / 2 and exp(-x) / 2, combined; by exp(x / 2), as exp(x) overflows too early."""

    def halves(root: ir.Expr) -> ir.Expr:
        half = constant(root, 0.5)
        return combine(root * half * root, half / root / root)

    return named(_exp(x * constant(x, 0.5)), halves)


def _saturating(x: ir.Expr, limit: float, odd: Sequence[float], even: Sequence[float]) -> ir.Expr:
    """x * (odd(x**2) / even(x**2)), one with the sign of x from `limit` on; NaN fails that comparison."""

    def ratio(x: ir.Expr) -> ir.Expr:
        value = named(x * x, lambda z: x * (polynomial(z, odd) / polynomial(z, even)))
        beyond = llvm("fabs", x) >= constant(x, limit)
        return tirx.Select(beyond, llvm("copysign", constant(x, 1.0), x), value)

    return named(x, ratio)


def _tanh(x: ir.Expr) -> ir.Expr:
    odd = (3.678652051083029e-11, 1.1124318565498471e-07, 4.2285377417246665e-05, 0.0044263996697426755,
           0.14099547525443998, 0.9999999999640432)  # fmt: skip
    even = (2.953671928121998e-09, 2.6049380658713718e-06, 0.0005009209373091619, 0.02920266978780424,
            0.4743288081925458, 1.0)  # fmt: skip
    # from this argument on tanh rounds to one
    return _saturating(x, 9.010913848876953, odd, even)


def _erf(x: ir.Expr) -> ir.Expr:
    odd = (2.0507356102775523e-06, 0.0002848902571377285, 0.003764546993156602, 0.05274555555580339,
           0.1903773700261878, 1.1283791461906467)  # fmt: skip
    even = (3.809879705983767e-05, 0.0011623341432067027, 0.014967058709649992, 0.11409770207763394,
            0.5020502936909391, 1.0)  # fmt: skip
    # from this argument on erf rounds to one
    return _saturating(x, 3.919205904006958, odd, even)


_FUNCTIONS: dict[str, tuple[Elementary, Elementary]] = {
    "tirx.exp": (_exp, partial(llvm, "exp")),
    "tirx.log": (_log, partial(llvm, "log")),
    "tirx.sigmoid": (_sigmoid, _double_sigmoid),
    "tirx.tanh": (_tanh, partial(llvm, "tanh")),
    "tirx.erf": (_erf, _double_erf),
    "tirx.sinh": (_sinh, partial(llvm, "sinh")),
    "tirx.cosh": (_cosh, partial(llvm, "cosh")),
    "tirx.sin": (sin_float32, partial(llvm, "sin")),
    "tirx.cos": (cos_float32, partial(llvm, "cos")),
    "tirx.tan": (tan_float32, partial(llvm, "tan")),
    "tirx.pow": (pow_float32, partial(llvm, "pow")),
}
"""By TVM's operator: for float32, and for float64."""
OPERATORS = frozenset({*_FUNCTIONS, OPERATOR})
"""What is lowered here."""
