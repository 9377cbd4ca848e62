"""Choices by a condition: those that a compiler knows, and those that hide rows of weights.

ONNX's body of Attention zeroes the weights of queries that see no key, between the softmax and the second
product. Behind that product it is the same, and nothing stands between the two, so that stage `fuse` finds
attention.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape


def drop_known_choices(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`where(condition, a, b)` with a weight for a condition that is the same everywhere is `a` or `b`."""
    if not is_op(expr, "where"):
        return None
    condition = context.weight(expr.args[0])
    if condition is None or condition.size == 0 or np.any(condition != condition.flat[0]):
        return None
    chosen = expr.args[1 if condition.flat[0] else 2]
    if not isinstance(chosen, relax.Var):
        return None
    shape = np.broadcast_shapes(condition.shape, *(tensor_shape(a) for a in expr.args[1:]))
    return chosen if tensor_shape(chosen) == shape else None


def hide_rows_later(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`where(rows, 0, softmax(x)) @ y` is `where(rows, 0, softmax(x) @ y)`, if a row is hidden as a whole."""
    if not is_op(expr, "matmul"):
        return None
    hidden = context.definition(expr.args[0])
    if not is_op(hidden, "where") or context.uses[expr.args[0]] != 1 or len(tensor_shape(expr.args[1])) < 2:
        return None
    rows, zero, weights = hidden.args
    shape, number = tensor_shape(rows), context.weight(zero)
    if not shape or shape[-1] != 1 or number is None or np.any(number != 0):
        return None
    if not is_op(context.definition(weights), "nn.softmax"):
        return None
    if tensor_shape(weights) != tensor_shape(expr.args[0]):
        return None
    product = context.emit(relax.Call(expr.op, [weights, expr.args[1]], expr.attrs))
    context.uses[product] = 1
    return context.emit(relax.op.where(rows, relax.const(0.0, tensor_dtype(weights)), product))
