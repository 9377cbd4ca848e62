"""Scales and shifts per channel behind a convolution, in its weights and its bias: rules of canonicalize.

    (conv(x, w) + b) * scale + shift = conv(x, w * scale) + (b * scale + shift)

BatchNorm of inference is such a scale and shift. TensorFlow's converter writes it as a product and a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from hybridc.passes.canonicalize.context import Context, result_shape
from hybridc.passes.canonicalize.transposed_conv import emit_before_interleaving
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape

SHARED_FOLD_LIMIT_BYTES = 1 << 20
"""A weight with other readers is folded into a second copy only if the copy is no larger. 1 MiB is little
compared with the weights of a network, and tied embeddings are tens of MiB."""


def fold_batch_norm(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """BatchNorm of inference is a scale and a shift per channel.

    After a convolution without other readers they are folded into its weights and one bias; else they stay
    as a multiply and an add, which fuse with what follows.
    """
    if not is_op(expr, "nn.batch_norm") or expr.attrs.training:
        return None
    data, *parameters = expr.args
    constants = [value for p in parameters if (value := context.weight(p)) is not None]
    if len(constants) < len(parameters):
        return None
    gamma, beta, mean, variance = (np.asarray(c, np.float64) for c in constants)
    scale = (gamma if expr.attrs.scale else 1.0) / np.sqrt(variance + float(expr.attrs.epsilon))
    shift = (beta if expr.attrs.center else 0.0) - mean * scale
    affine = _affine_of(data, context)
    if affine is not None:
        folded = affine.changed(scale, shift, context)
    else:
        per_channel = _channel_shape(data, int(expr.attrs.axis))
        scaled = emit_before_interleaving(
            context, relax.op.multiply(data, _parameter(scale, per_channel, data, context))
        )
        context.uses[scaled] = 1
        folded = emit_before_interleaving(
            context, relax.op.add(scaled, _parameter(shift, per_channel, data, context))
        )
    statistics = [context.builder.weight(s, f"{context.name}_stat") for s in constants[2:]]
    return relax.Tuple([folded, *statistics])


def fold_scale(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """A product or quotient by a constant, or one for each channel, is a scale of the convolution before it;
    a sum or difference of that kind behind one that has a bias is another bias."""
    if not is_op(expr, "multiply", "divide", "add", "subtract"):
        return None
    first, second = expr.args
    data, number = first, context.weight(second)
    if number is None and is_op(expr, "multiply", "add"):
        data, number = second, context.weight(first)
    if number is None or tensor_dtype(data) not in ("float32", "float16", "bfloat16"):
        return None
    affine = _affine_of(data, context)
    if affine is None or (affine.bias is None and is_op(expr, "add", "subtract")):
        return None
    value = _per_channel(number, data)
    if value is None or result_shape(expr) != tensor_shape(data):
        return None
    if is_op(expr, "divide"):
        if not value.all():
            return None
        value = 1 / value
    if not np.isfinite(value).all():
        return None
    if is_op(expr, "multiply", "divide"):
        return affine.changed(value, None, context)
    return affine.changed(None, -value if is_op(expr, "subtract") else value, context)


@dataclass(frozen=True, slots=True)
class _Affine:
    """A convolution without other readers, and the constant bias that is added to it, if any is."""

    convolution: relax.Var
    result: relax.Var
    """The sum, or the convolution itself."""
    weight: np.ndarray
    bias: np.ndarray | None
    """Of each channel, float64."""

    def changed(self, scale: np.ndarray | None, shift: np.ndarray | None, context: Context) -> relax.Expr:
        """Times a scale plus a shift, both of each channel in float64."""
        conv, bias = context.definition(self.convolution), self.bias
        vars = dict.fromkeys((self.convolution, self.result))
        origins = [origin for var in vars for origin in context.builder.origins.get(var.name, ())]
        context.origins = tuple(dict.fromkeys([*origins, *context.origins]))
        product = self.convolution
        if scale is not None:
            per_output = (-1,) + (1,) * (self.weight.ndim - 1)
            scaled = (self.weight.astype(np.float64) * scale.reshape(per_output)).astype(self.weight.dtype)
            weight = context.builder.weight(scaled, conv.args[1].name)
            product = context.emit(relax.Call(conv.op, [conv.args[0], weight], conv.attrs))
            context.uses[product] = 1
            bias = None if bias is None else bias * scale
        if shift is not None:
            bias = shift if bias is None else bias + shift
        if bias is None:
            return product
        shape = _channel_shape(product, 1)
        return context.emit(relax.op.add(product, _parameter(bias, shape, product, context)))


def _affine_of(data: relax.Expr, context: Context) -> _Affine | None:
    """What computes data, if that is a convolution by weights that nothing else reads."""
    conv_var, bias = data, None
    definition = context.definition(data)
    if is_op(definition, "add") and context.uses[data] == 1:
        conv_var, other = definition.args
        if context.weight(conv_var) is not None:
            conv_var, other = other, conv_var
        constant = context.weight(other)
        bias = None if constant is None else _per_channel(constant, data)
        if bias is None:
            return None
    conv = context.definition(conv_var)
    if not has_fact(conv, Fact.CONVOLUTION) or context.uses[conv_var] != 1:
        return None
    weight = context.weight(conv.args[1])
    if weight is None:
        return None
    if context.uses[conv.args[1]] > 1 and weight.nbytes > SHARED_FOLD_LIMIT_BYTES:
        return None
    return _Affine(conv_var, data, weight, bias)


def _per_channel(number: np.ndarray, data: relax.Expr) -> np.ndarray | None:
    """One value for each channel, in float64, or None if a constant has others."""
    shape = _channel_shape(data, 1)
    if number.ndim > len(shape):
        return None
    padded = number.reshape((1,) * (len(shape) - number.ndim) + number.shape)
    if any(extent not in (1, whole) for extent, whole in zip(padded.shape, shape, strict=True)):
        return None
    return np.broadcast_to(padded.astype(np.float64), shape).reshape(-1)


def _channel_shape(data: relax.Expr, axis: int) -> tuple[int, ...]:
    shape = tensor_shape(data)
    return tuple(extent if i == axis % len(shape) else 1 for i, extent in enumerate(shape))


def _parameter(value: np.ndarray, shape: tuple[int, ...], like: relax.Expr, context: Context) -> relax.Var:
    return context.builder.weight(value.reshape(shape).astype(tensor_dtype(like)), f"{context.name}_param")
