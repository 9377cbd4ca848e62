"""The least and the greatest value of an index, as expressions of the loops around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import ir, tirx


@dataclass(frozen=True, slots=True)
class Interval:
    """All values from `low` to `high`."""

    low: ir.Expr
    high: ir.Expr

    @property
    def is_point(self) -> bool:
        """Whether it is one value."""
        return self.low is self.high


def point(value: ir.Expr) -> Interval:
    """A single value."""
    return Interval(value, value)


_OPERATIONS: Mapping[type, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.Min: tirx.min,
    tirx.Max: tirx.max,
}


class Intervals:
    """Interval arithmetic (Moore, Interval Analysis, 1966) of index expressions."""

    def __init__(self) -> None:
        self.known: dict[ir.Var, Interval] = {}
        """Of variables."""

    def of(self, expr: ir.Expr) -> Interval | None:
        """An interval that all values lie in; None if nothing is known. Ends need not be taken."""
        match expr:
            case tirx.IntImm():
                return point(expr)
            case ir.Var():
                return self.known.get(expr)
            case tirx.Cast():
                inner = self.of(expr.value)
                dtype = str(expr.ty.dtype)
                return inner and _both(inner, lambda end: tirx.Cast(dtype, end))
            case tirx.Ramp():
                return self._ramp(expr)
            case tirx.Broadcast():
                return self.of(expr.value)
            case tirx.Select():
                return _hull(self.of(expr.true_value), self.of(expr.false_value))
            case tirx.Add() | tirx.Sub() | tirx.Mul() | tirx.Min() | tirx.Max():
                return self._combined(expr)
            case tirx.FloorDiv() | tirx.Div() | tirx.FloorMod() | tirx.Mod():
                return self._divided(expr)
            case _:
                return None

    def _ramp(self, expr: tirx.Ramp) -> Interval | None:
        base = self.of(expr.base)
        if base is None or not isinstance(expr.stride, tirx.IntImm) or int(expr.stride) < 0:
            return None
        return Interval(base.low, base.high + int(expr.stride) * (int(expr.lanes) - 1))

    def _combined(self, expr: ir.Expr) -> Interval | None:
        one, other = self.of(expr.a), self.of(expr.b)
        if one is None or other is None:
            return None
        if one.is_point and other.is_point:
            return point(_OPERATIONS[type(expr)](one.low, other.low))
        match expr:
            case tirx.Add():
                return Interval(one.low + other.low, one.high + other.high)
            case tirx.Sub():
                return Interval(one.low - other.high, one.high - other.low)
            case tirx.Min():
                return Interval(tirx.min(one.low, other.low), tirx.min(one.high, other.high))
            case tirx.Max():
                return Interval(tirx.max(one.low, other.low), tirx.max(one.high, other.high))
            case _:
                return _scaled(one, other.low) if other.is_point else _scaled(other, one.low)

    def _divided(self, expr: ir.Expr) -> Interval | None:
        """Of values that are not negative, as those of indices are."""
        inner, divisor = self.of(expr.a), expr.b
        if inner is None or not isinstance(divisor, tirx.IntImm) or int(divisor) <= 0:
            return None
        if isinstance(expr, tirx.FloorDiv | tirx.Div):
            return _both(inner, lambda end: tirx.floordiv(end, divisor))
        if inner.is_point:
            return point(tirx.floormod(inner.low, divisor))
        # in one period the remainder grows with the value; in several it takes any
        is_one = tirx.EQ(tirx.floordiv(inner.low, divisor), tirx.floordiv(inner.high, divisor))
        zero = tirx.const(0, str(divisor.ty.dtype))
        return Interval(
            tirx.Select(is_one, tirx.floormod(inner.low, divisor), zero),
            tirx.Select(is_one, tirx.floormod(inner.high, divisor), divisor - 1),
        )


def _both(inner: Interval, change: Callable[[ir.Expr], ir.Expr]) -> Interval:
    low = change(inner.low)
    return point(low) if inner.is_point else Interval(low, change(inner.high))


def _hull(one: Interval | None, other: Interval | None) -> Interval | None:
    if one is None or other is None:
        return None
    return Interval(tirx.min(one.low, other.low), tirx.max(one.high, other.high))


def _scaled(inner: Interval, factor: ir.Expr) -> Interval | None:
    if not isinstance(factor, tirx.IntImm) or int(factor) < 0:
        return None
    return Interval(inner.low * factor, inner.high * factor)
