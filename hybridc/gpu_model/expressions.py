"""Values of TVM's integer expressions for many threads side by side, and what arithmetic costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

Values = Any
"""An array with a value for each thread, or a number that all share."""


def _quotient(a: Values, b: Values) -> Values:
    return np.where(np.asarray(b) == 0, 0, a // np.where(np.asarray(b) == 0, 1, b))


_BINARY: dict[type, Callable[[Values, Values], Values]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: _quotient,
    tirx.Div: _quotient,
    tirx.FloorMod: lambda a, b: a - _quotient(a, b) * b,
    tirx.Mod: lambda a, b: a - _quotient(a, b) * b,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
    tirx.LShift: lambda a, b: a << b,
    tirx.RShift: lambda a, b: a >> b,
    tirx.BitwiseAnd: lambda a, b: a & b,
    tirx.BitwiseOr: lambda a, b: a | b,
    tirx.BitwiseXor: lambda a, b: a ^ b,
}
_CALLS: dict[str, Callable[..., Values]] = {
    "tirx.if_then_else": np.where,
    "tirx.likely": lambda a: a,
}


def evaluate(expression: Any, values: Mapping[tirx.Var, Values]) -> Values:
    """An integer expression's value; variables that are not given, and what is read from memory, count as
    0."""
    kind = type(expression)
    if isinstance(expression, tirx.IntImm):
        return int(expression.value)
    if isinstance(expression, tirx.Var):
        return values.get(expression, 0)
    if kind in _BINARY:
        return _BINARY[kind](evaluate(expression.a, values), evaluate(expression.b, values))
    if isinstance(expression, tirx.Cast):
        return evaluate(expression.value, values)
    if isinstance(expression, tirx.Not):
        return np.logical_not(evaluate(expression.a, values))
    if isinstance(expression, tirx.Select):
        parts = (expression.condition, expression.true_value, expression.false_value)
        return np.where(*(evaluate(part, values) for part in parts))
    if isinstance(expression, ir.Call):
        function = _CALLS.get(getattr(expression.op, "name", ""))
        if function is not None:
            return function(*(evaluate(argument, values) for argument in expression.args))
    if isinstance(expression, tirx.Ramp):
        return evaluate(expression.base, values)
    return 0


def variables(expression: Any) -> set[tirx.Var]:
    """All that occur in it."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, found.append))
    return set(found)


_SPECIAL_COST = {
    "exp": (3, 1),
    "exp2": (1, 1),
    "log": (8, 1),
    "sqrt": (6, 1),
    "rsqrt": (4, 1),
    "tanh": (12, 2),
    "erf": (20, 1),
    "sigmoid": (8, 2),
    "sin": (12, 1),
    "cos": (12, 1),
    "pow": (20, 2),
}
"""Instructions on the pipes of fp32 and transcendental ones that CUDA's functions of these names take,
roughly: what the compiler makes of them without fast math."""
_DIVISION = (8, 1)


def float_cost(expression: Any) -> tuple[int, int]:
    """Instructions of fp32 and transcendental ones that a value takes; a product and a sum are one."""
    plain = special = 0

    def note(node: Any) -> None:
        nonlocal plain, special
        if not is_float(node):
            return
        if isinstance(node, tirx.Div):
            plain, special = plain + _DIVISION[0], special + _DIVISION[1]
        elif isinstance(node, ir.Call):
            name = getattr(node.op, "name", "").removeprefix("tirx.")
            more = _SPECIAL_COST.get(name, (0, 0))
            plain, special = plain + more[0], special + more[1]
        elif isinstance(node, tirx.Add | tirx.Sub):
            fused = any(isinstance(part, tirx.Mul) for part in (node.a, node.b))
            plain += 0 if fused else 1
        elif isinstance(node, tirx.Mul | tirx.Min | tirx.Max):
            plain += 1

    tvm_ffi.structural_walk(expression, (ir.Expr, note), order="post")
    return plain, special


def is_float(expression: Any) -> bool:
    return "float" in str(getattr(expression.ty, "dtype", ""))
