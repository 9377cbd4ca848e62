"""Rules for calls of the functions of training steps, gradients and statistics, on blocked operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, s_tir, tirx
from tvm.ir.expr import GenericConst

from hybridc.passes.layout.functions import Channels, in_blocks
from hybridc.passes.layout.max_pool import blocked_max_pool_with_indices
from hybridc.passes.layout.state import Blocked, Layout, lanes_of
from hybridc.passes.program.program import is_op, operator_name, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import read_annotation
from hybridc.schedules.blocked_operators import ConvWindow, blocked_conv2d_wgrad

NARROW_INPUT = 8
"""With fewer channels, data stay plain and are read one channel at a time: a block would be mostly
padding."""


def _called(layout: Layout, call: Any) -> tirx.PrimFunc:
    return layout.library[call.args[0].name_hint]


def _weight_gradient(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    """`conv2d_wgrad` of data and dy, one of them blocked; the result is plain."""
    call = binding.value
    if not is_op(call, "call_tir") or operator_name(call) != "conv2d_wgrad":
        return None
    data, gradient = call.args[1].fields
    if data not in layout.blocked and gradient not in layout.blocked:
        return None
    schedule = s_tir.Schedule(_called(layout, call))
    notes = read_annotation(schedule.get(schedule.get_sblock("conv2d_wgrad")).annotations, "conv2d_wgrad")
    assert notes is not None
    (sh, sw), (top, left, bottom, right), (dh, dw) = notes.strides, notes.padding, notes.dilation
    window = ConvWindow((sh, sw), (top, left, bottom, right), (dh, dw))
    dy = _blocked(layout, gradient)
    narrow = data not in layout.blocked and tensor_shape(data)[1] < NARROW_INPUT and notes.groups == 1
    x = layout.as_plain(data) if narrow else _blocked(layout, data)
    key = tensor_shape(x), tensor_shape(dy), tensor_shape(binding.var), window, notes.groups
    return layout.call(
        ("conv2d_wgrad", *key), lambda: blocked_conv2d_wgrad(*key), [x, dy], tensor_shape(binding.var)
    )


def _max_pool(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    """`max_pool_with_indices` of images: maxima and the numbers of their taps, both blocked.

    Plain images whose channels fill blocks are worth a conversion: windows are vectors only there.
    """
    call = binding.value
    if not is_op(call, "call_tir") or operator_name(call) != "max_pool_with_indices":
        return None
    data = call.args[1].fields[0]
    shape = tensor_shape(data)
    source = layout.blocked.get(data)
    if len(shape) != 4 or tensor_dtype(data) != "float32":
        return None
    if source is None:
        lanes = lanes_of(shape[1], layout.isa)
        if shape[1] % lanes:
            return None
        source = layout.as_blocked(data, lanes)
    schedule = s_tir.Schedule(_called(layout, call))
    notes = schedule.get(schedule.get_sblock("max_pool")).annotations
    values, numbers = binding.var.ty.fields
    types = [_in_blocks_of(t, source) for t in (values, numbers)]
    window = tuple(tuple(int(v) for v in notes[k]) for k in ("taps", "strides", "before", "dilation"))
    positions = tuple(int(e) for e in values.shape.values)[2:]
    key = tensor_shape(source.var), positions, window, str(getattr(numbers.dtype, "dtype", numbers.dtype))
    made = layout.call(
        ("max_pool_with_indices", *key), lambda: blocked_max_pool_with_indices(*key), [source.var], types
    )
    layout.tuples[binding.var] = made
    return made


def _in_blocks_of(plain: relax.TensorType, source: Blocked) -> relax.TensorType:
    n, _, *positions = (int(e) for e in plain.shape.values)
    return relax.TensorType((n, tensor_shape(source.var)[1], *positions, source.lanes), plain.dtype)


def _blocked(layout: Layout, var: relax.Expr) -> relax.Expr:
    found = layout.blocked.get(var)
    return (found or layout.as_blocked(var, lanes_of(tensor_shape(var)[1], layout.isa))).var


def _channel_by_channel(layout: Layout, binding: relax.VarBinding) -> Blocked | relax.Var | None:
    """A function with a blocked operand that can be rewritten for blocked data; only without filling."""
    call = binding.value
    if not is_op(call, "call_tir"):
        return None
    arguments = list(call.args[1].fields)
    leader = next((layout.blocked[a] for a in arguments if a in layout.blocked), None)
    if leader is None or leader.is_filled:
        return None
    channels = Channels(leader.channels, leader.lanes)
    key = (operator_name(call), call.args[0].name_hint, channels)
    if key not in layout.rewritten:
        layout.rewritten[key] = in_blocks(_called(layout, call), channels)
    function, operands = layout.rewritten[key], [_operand(layout, a, channels) for a in arguments]
    if function is None or None in operands:
        return None
    if isinstance(binding.var.ty, relax.TensorType):
        made = layout.call(key, lambda: function, operands, _type(binding.var.ty, channels))
        return _result(layout, made, tensor_shape(binding.var), channels)
    types = [_type(t, channels) for t in binding.var.ty.fields]
    made = layout.tuples[binding.var] = layout.call(key, lambda: function, operands, types)
    return made


def _operand(layout: Layout, operand: relax.Expr, channels: Channels) -> relax.Expr | None:
    """An argument in the layout that the rewritten function takes; None if it cannot be converted to it."""
    shape = tensor_shape(operand)
    plain = operand if isinstance(operand, GenericConst) else None
    if channels.axis(shape) is None:
        return plain or layout.as_plain(operand)
    if len(shape) == 1:
        return layout.emit(relax.op.reshape(plain or layout.as_plain(operand), channels.shape(shape)), "view")
    found = layout.blocked.get(operand)
    if found is not None and found.lanes == channels.lanes:
        return found.var
    if plain or tensor_dtype(operand) != "float32":
        return None
    return layout.as_blocked(operand, channels.lanes).var


def _type(plain: relax.TensorType, channels: Channels) -> relax.TensorType:
    return relax.TensorType(channels.shape([int(e) for e in plain.shape.values]), plain.dtype)


def _result(layout: Layout, made: relax.Var, plain: Sequence[int], channels: Channels) -> Blocked | relax.Var:
    """The result of a function that has this plain shape."""
    if channels.axis(plain) == 1:
        return Blocked(made, channels.count)
    return made if channels.axis(plain) is None else layout.emit(relax.op.reshape(made, plain), "view")


def _item(layout: Layout, binding: relax.VarBinding) -> Blocked | relax.Var | None:
    """A field of a rewritten function's result."""
    item = binding.value
    if not isinstance(item, relax.TupleGetItem) or item.tuple_value not in layout.tuples:
        return None
    made, plain = layout.tuples[item.tuple_value], tensor_shape(binding.var)
    field = layout.emit(relax.TupleGetItem(made, item.index), binding.var.name)
    if len(tensor_shape(field)) == 5:
        return Blocked(field, plain[1])
    return field if tensor_shape(field) == plain else layout.emit(relax.op.reshape(field, plain), "view")


FUNCTION_RULES = (_weight_gradient, _max_pool, _channel_by_channel, _item)
"""Rules of `layout.py` for calls of functions."""
