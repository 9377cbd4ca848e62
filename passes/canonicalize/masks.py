"""Masks that are broadcast as late as they can be: where what they decide on is computed.

Exporters write the mask of a prompt as a condition for each pair of tokens, where most networks tell keys
apart and no queries: [batch, 1, tokens, tokens] of zeros and minus infinities, which say no more than
[batch, 1, 1, tokens]. Attention reads them with whatever axes they have.
"""

from __future__ import annotations

from tvm import relax

from hybridc.passes.canonicalize.context import Context, result_shape
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.placeholders import is_placeholder


def drop_neutral_conditions(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`x and True` and `x or False` are x, broadcast to the shape of the result."""
    if not is_op(expr, "logical_and", "logical_or"):
        return None
    neutral = is_op(expr, "logical_and")
    for condition, other in (expr.args, reversed(expr.args)):
        value = context.weight(other)
        if value is not None and not is_placeholder(value) and (value == neutral).all():
            return _broadcast(condition, result_shape(expr), context)
    return None


def broadcast_masks_later(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """Of a mask that is broadcast and then read element by element what is broadcast is read.

    If the result has fewer axes or elements for it, it is broadcast itself.
    """
    if not has_fact(expr, Fact.BINARY | Fact.TERNARY):
        return None
    found = [_before_broadcast(argument, context) for argument in expr.args]
    if all(source is None for source in found):
        return None
    pairs = zip(found, expr.args, strict=True)
    sources = [argument if source is None else source for source, argument in pairs]
    earlier = relax.Call(expr.op, sources, expr.attrs)
    if result_shape(earlier) == result_shape(expr):
        return context.emit(earlier)
    return _broadcast(context.emit(earlier), result_shape(expr), context)


def _before_broadcast(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """What a mask is broadcast from, which is a condition, or a choice by one."""
    definition = context.definition(expr)
    if not is_op(definition, "broadcast_to"):
        return None
    source: relax.Expr = definition.args[0]
    is_mask = tensor_dtype(source) == "bool" or is_op(context.definition(source), "where")
    return source if is_mask else None


def _broadcast(expr: relax.Expr, shape: tuple[int, ...], context: Context) -> relax.Expr:
    if isinstance(expr, relax.Var) and tensor_shape(expr) == shape:
        return expr
    return context.emit(relax.op.broadcast_to(expr, shape))
