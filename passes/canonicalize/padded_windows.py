"""Padding in front of a convolution or pooling, as that operator's own: rules of canonicalize.

Keras pads by a layer of its own (`ZeroPadding2D`) before each convolution with strides. Within the operator
it costs neither a kernel nor a copy of the data.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from hybridc.passes.canonicalize.context import Context, result_shape
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import is_op

_NEVER_NEGATIVE = ("nn.relu", "sigmoid", "exp", "abs", "nn.softmax")


def pad_within_window(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """Zeros before a convolution, or an average that counts its padding; before a maximum, which pads with
    minus infinities, whatever is no more than the data."""
    if has_fact(expr, Fact.CONVOLUTION):
        return _of_convolution(expr, context)
    if is_op(expr, "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d"):
        return _of_average(expr, context)
    if is_op(expr, "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d"):
        return _of_maximum(expr, context)
    return None


def _of_convolution(expr: Any, context: Context) -> relax.Expr | None:
    attrs = expr.attrs
    padding = _outer_padding(expr, context)
    if padding is None or not _is_zero(expr, context):
        return None
    how = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout), attrs.out_dtype
    window = attrs.strides, padding, attrs.dilation, int(attrs.groups)
    function = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}[len(attrs.strides)]
    return _emit(expr, function(_unpadded(expr, context), expr.args[1], *window, *how), context)


def _of_average(expr: Any, context: Context) -> relax.Expr | None:
    padding = _outer_padding(expr, context)
    if padding is None or not _is_zero(expr, context) or expr.attrs.ceil_mode:
        return None
    if any(int(each) for each in expr.attrs.padding) and not expr.attrs.count_include_pad:
        return None
    return _pooled(expr, padding, True, context)


def _of_maximum(expr: Any, context: Context) -> relax.Expr | None:
    """Each window must reach some of the data: of one that does not the maximum is the padding."""
    padding, attrs = _outer_padding(expr, context), expr.attrs
    if padding is None or attrs.ceil_mode or any(int(each) != 1 for each in attrs.dilation):
        return None
    taps = [int(each) for each in attrs.pool_size]
    if any(each >= extent for each, extent in zip(padding, taps * 2, strict=True)):
        return None
    value, data = _pad_of(expr, context).attrs.pad_value, _unpadded(expr, context)
    is_least = value == -math.inf or (value <= 0 and _is_never_negative(data, context))
    return _pooled(expr, padding, bool(attrs.count_include_pad), context) if is_least else None


def _pooled(expr: Any, padding: list[int], counts: bool, context: Context) -> relax.Expr | None:
    attrs, data = expr.attrs, _unpadded(expr, context)
    pool = getattr(relax.op.nn, expr.op.name.removeprefix("relax.nn."))
    layouts = str(attrs.layout), str(attrs.out_layout)
    call = pool(data, attrs.pool_size, attrs.strides, padding, attrs.dilation, False, counts, *layouts)
    return _emit(expr, call, context)


def _emit(expr: relax.Expr, call: relax.Call, context: Context) -> relax.Expr | None:
    if result_shape(call) != result_shape(expr):
        return None
    padded = expr.args[0]
    context.origins = tuple(dict.fromkeys([*context.builder.origins.get(padded.name, ()), *context.origins]))
    context.uses[padded] -= 1
    context.uses[_unpadded(expr, context)] += 1
    return context.emit(call)


def _pad_of(expr: Any, context: Context) -> Any:
    return context.definition(expr.args[0])


def _unpadded(expr: Any, context: Context) -> relax.Var:
    return _pad_of(expr, context).args[0]


def _is_zero(expr: Any, context: Context) -> bool:
    return float(_pad_of(expr, context).attrs.pad_value) == 0


def _outer_padding(expr: Any, context: Context) -> list[int] | None:
    """Of the operator with what is padded before it: beginnings of all axes, then ends.

    None without constant padding of the axes that the window moves along, and of no others.
    """
    pad = _pad_of(expr, context)
    if not is_op(pad, "nn.pad") or str(pad.attrs.pad_mode) != "constant":
        return None
    widths = [int(each) for each in pad.attrs.pad_width]
    own = [int(each) for each in expr.attrs.padding]
    if any(widths[:4]) or min(widths) < 0 or len(own) != len(widths) - 4:
        return None
    outer = widths[4::2] + widths[5::2]
    return [a + b for a, b in zip(own, outer, strict=True)]


def _is_never_negative(data: relax.Expr, context: Context) -> bool:
    constant = context.weight(data)
    if constant is not None:
        return bool((constant >= 0).all())
    definition = context.definition(data)
    if is_op(definition, *_NEVER_NEGATIVE):
        return True
    if is_op(definition, "maximum", "minimum"):  # which a Clip becomes
        enough = any if is_op(definition, "maximum") else all
        return enough(_is_never_negative(argument, context) for argument in definition.args)
    return False
