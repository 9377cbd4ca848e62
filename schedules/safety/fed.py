"""Expressions of fed indices and divisors."""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.checks import Marker
from hybridc.ir import CheckKind


def is_zero(integer: ir.Expr) -> ir.Expr:
    """Whether an integer is zero, of 64 bits: TVM cannot simplify comparisons of unsigned numbers."""
    return tirx.EQ(tirx.Cast("int64", integer), tirx.IntImm("int64", 0))


def from_start(marker: Marker, fed: ir.Expr) -> ir.Expr:
    """An index counted from 0; it is outside of the axis if it was illegal."""
    if not marker.lower:
        return fed
    return tirx.Select(fed < 0, fed + tirx.IntImm("int64", marker.upper + 1), fed)


def nearest(marker: Marker, position: ir.Expr) -> ir.Expr:
    """The position itself if it is legal."""
    # of the illegal ones some are negative: they are huge if unsigned
    inside = tirx.min(tirx.Cast("uint64", position), tirx.const(marker.upper, "uint64"))
    return tirx.Cast("int64", inside)


def as_fed(marker: Marker, found: ir.Expr) -> ir.Expr:
    """The value whose unsigned position, or being a divisor of zero, was `found` to be illegal."""
    if marker.kind is CheckKind.DIVISOR:
        return tirx.IntImm("int64", 0)
    below = found - tirx.IntImm("int64", marker.upper + 1) if marker.lower else found
    return tirx.Select(found < 0, below, found)
