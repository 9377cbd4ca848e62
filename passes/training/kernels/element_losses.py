"""Losses of single elements x with targets t, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

Loss = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
Derivative = Callable[[tirx.Expr, tirx.Expr, tirx.Expr], tirx.Expr]
"""(x, t, dy) -> dx or dt"""


def _square(x: tirx.Expr, t: tirx.Expr) -> tirx.Expr:
    return (x - t) * (x - t)


def _square_slope(x: tirx.Expr, t: tirx.Expr, dy: tirx.Expr) -> tirx.Expr:
    return tirx.const(2, x.dtype) * (x - t) * dy


def _distance_slope(x: tirx.Expr, t: tirx.Expr, dy: tirx.Expr) -> tirx.Expr:
    zero = tirx.const(0, x.dtype)
    return tirx.Select(x > t, dy, zero) - tirx.Select(x < t, dy, zero)


def _cross_entropy(x: tirx.Expr, t: tirx.Expr) -> tirx.Expr:
    """`-t log(s) - (1 - t) log(1 - s)` with s = sigmoid(x); the exponential is of no positive number."""
    zero, one = tirx.const(0, x.dtype), tirx.const(1, x.dtype)
    return tirx.max(x, zero) - x * t + tirx.log(one + tirx.exp(-tirx.abs(x)))


ELEMENT_LOSSES: dict[str, Loss] = {
    "mse_loss": _square,
    "l1_loss": lambda x, t: tirx.abs(x - t),
    "bce_loss": _cross_entropy,
}

ELEMENT_GRADIENTS: dict[str, Derivative] = {
    "mse_loss": _square_slope,
    "l1_loss": _distance_slope,
    "bce_loss": lambda x, t, dy: (tirx.sigmoid(x) - t) * dy,
}

TARGET_GRADIENTS: dict[str, Derivative] = {
    "mse_loss": lambda x, t, dy: -_square_slope(x, t, dy),
    "l1_loss": lambda x, t, dy: -_distance_slope(x, t, dy),
    "bce_loss": lambda x, t, dy: -x * dy,
}
