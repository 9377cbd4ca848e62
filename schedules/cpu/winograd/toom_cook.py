"""The bilinear algorithms behind Winograd convolution: `m` outputs of a 3-tap filter for `m + 2` products.

    out = A^T [(G w) * (B^T d)]        d: m + 2 inputs, w: 3 taps

Both factors are evaluated at the points 0, +-p, +-q, .. and infinity (Toom and Cook; Winograd, "Arithmetic
complexity of computations", 1980; Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016).
With a point its mirror image is there too: even and odd parts of a polynomial are computed once for both.
B^T is scaled to leading coefficients of one and A^T has the points' powers, which saves multiplications;
G, used when compiling, takes what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx


@dataclass(frozen=True, slots=True)
class ToomCook:
    """The algorithm from the points 0, infinity, and plus and minus each of `magnitudes`.

    Magnitudes have few bits, so that every coefficient that meets an activation is exact in float32.
    """

    magnitudes: tuple[float, ...]

    @property
    def points(self) -> int:
        """Inputs, and products, of one tile."""
        return 2 * len(self.magnitudes) + 2

    @property
    def outputs(self) -> int:
        """Outputs of one tile in one axis."""
        return self.points - 2

    @property
    def name(self) -> str:
        """As in the literature: F4 stands for F(4, 3)."""
        return f"F{self.outputs}"

    def filter_matrix(self) -> tuple[tuple[float, ...], ...]:
        """G: a row of 3 for each point, in the order 0, p, -p, q, -q, .., infinity."""
        finite = [0.0, *(sign * p for p in self.magnitudes for sign in (1, -1))]
        rows = []
        for x in finite:
            scale = math.prod(x - other for other in finite if other != x)
            rows.append((1 / scale, x / scale, x * x / scale))
        return (*rows, (0.0, 0.0, 1.0))

    def transform_input(self, inputs: Sequence[ir.Expr]) -> list[ir.Expr]:
        """B^T d. A product that two sums need is spelled twice: shared, it would not be part of an FMA."""
        others = _roots(self.magnitudes)
        result = [_linear(others, inputs[::2])]
        for p in self.magnitudes:
            rest = _roots([q for q in self.magnitudes if q != p])
            even, odd = _linear(rest, inputs[2::2]), _linear(rest, inputs[1::2])
            result += [even + _times(p, odd), even + _times(-p, odd)]
        return [*result, _linear(others, inputs[1::2])]

    def transform_output(self, products: Sequence[ir.Expr]) -> list[ir.Expr]:
        """A^T products: sums of powers of the points; infinity adds to the last output."""
        mirrored = list(zip(products[1:-1:2], products[2:-1:2], strict=True))
        sums, differences = [a + b for a, b in mirrored], [a - b for a, b in mirrored]
        first, last = products[0], products[-1]
        result = []
        for power in range(self.outputs):
            extra = [first] if power == 0 else [last] if power == self.outputs - 1 else []
            factors = [p**power for p in self.magnitudes]
            terms = differences if power % 2 else sums
            result.append(_linear([*factors, *(1.0 for _ in extra)], [*terms, *extra]))
        return result


F2 = ToomCook((1.0,))
F4 = ToomCook((11 / 16, 23 / 16))
"""Of a dozen pairs that were simulated these had the least largest error at 512 channels: a fifth of that of
0, +-1, +-2, and no more than that of +-sqrt(1/2), +-sqrt(2), whose coefficients are not exact."""


def _roots(magnitudes: Sequence[float]) -> list[float]:
    """Coefficients of the product of (y - q^2), the constant one first: even powers of x where y = x^2."""
    coefficients = [1.0]
    for q in magnitudes:
        shifted = [0.0, *coefficients]
        coefficients = [s - q * q * c for s, c in zip(shifted, [*coefficients, 0.0], strict=True)]
    return coefficients


def _linear(factors: Sequence[float], terms: Sequence[ir.Expr]) -> ir.Expr:
    """Sum of factor times term; terms taken once come first, so that the others are multiply-adds."""
    pairs = sorted(zip(factors, terms, strict=False), key=lambda pair: pair[0] != 1)
    result = _times(*pairs[0])
    for factor, term in pairs[1:]:
        result = result + _times(factor, term)
    return result


def _times(factor: float, term: ir.Expr) -> ir.Expr:
    return term if factor == 1 else term * tirx.FloatImm("float32", factor)
