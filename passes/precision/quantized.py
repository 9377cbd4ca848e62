"""Quantized operators: products of dequantized tensors become products of 8-bit integers.

    sum of s_x (x - z_x) s_w w  =  s_x s_w (sum of x w - z_x sum of w)

for 8-bit numbers x and w: the sum of products is int32 and exact, z_x times the sum of w is known at
compile time, and scales, bias, activation and requantization are an epilogue. (Jacob et al.,
"Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018.)
These are rules of stage `layout`. Beside a GPU tensors keep their plain layout, and only what its tensor
cores multiply is rewritten, in front of fusion (`multiply_integers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from hybridc.passes.layout.layout import Rule, apply_rules, conv_window_of
from hybridc.passes.layout.state import Blocked, Layout, lanes_of
from hybridc.passes.layout.training_functions import NARROW_INPUT
from hybridc.passes.layout.weights import ConvWeight
from hybridc.passes.precision.integer_functions import (
    UNSIGNED_SHIFT,
    int8_conv2d,
    int8_matmul,
    int8_plain_conv2d,
)
from hybridc.passes.program.dequantized import dequantized
from hybridc.passes.program.program import Program, is_op, tensor_dtype, tensor_shape
from hybridc.schedules.blocked_operators import blocked_conv2d
from hybridc.schedules.cpu.low_precision.int8_conv2d import floats_are_faster
from hybridc.schedules.cuda.tensor_core.tensor_core import SMALLEST_SIDE
from hybridc.schedules.rule import Request
from hybridc.targets import Isa, Target


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor that is `scale * (values - zero)` of an 8-bit tensor, perhaps reshaped."""

    values: relax.Var
    shape: tuple[int, ...]
    scale: float
    zero: int

    @property
    def shift(self) -> int:
        """Added to the values so that they are unsigned."""
        return UNSIGNED_SHIFT if tensor_dtype(self.values) == "int8" else 0


@dataclass(frozen=True, slots=True)
class Factor:
    """A weight that is `scale * values` of an int8 array, with one scale for each element of one axis."""

    values: np.ndarray
    scale: np.ndarray
    sums: np.ndarray
    """Of the values, int32, for each element of that axis."""


# ---------------------------------------------------------------------------- what an operator multiplies


def _activation(layout: Layout, var: relax.Expr) -> Activation | None:
    call: Any = layout.values.get(var)
    if is_op(call, "reshape", "flatten"):
        inner = _activation(layout, call.args[0])
        return inner and replace(inner, shape=tensor_shape(var))
    if not is_op(call, "dequantize") or tensor_dtype(call.args[0]) not in ("uint8", "int8"):
        return None
    parameters = [layout.weight(argument) for argument in call.args[1:3]]
    if any(p is None or p.size != 1 for p in parameters) or layout.weight(call.args[0]) is not None:
        return None
    scale, zero = (p.reshape(()) for p in parameters if p is not None)
    return Activation(call.args[0], tensor_shape(var), float(scale), int(zero))


def _factor(layout: Layout, var: relax.Expr, axis: int) -> Factor | None:
    """The factor that a weight is, with a scale for each element of `axis`; transposed matrices are
    recognised."""
    call: Any = layout.values.get(var)
    if is_op(call, "permute_dims") and len(tensor_shape(var)) == 2:
        inner = _factor(layout, call.args[0], 1 - axis)
        return inner and Factor(np.ascontiguousarray(inner.values.T), inner.scale, inner.sums)
    if not is_op(call, "dequantize"):
        return None
    values, scale, zero = (layout.weight(argument) for argument in call.args)
    if values is None or scale is None or zero is None or values.dtype != np.int8 or zero.any():
        return None
    if scale.size > 1 and int(call.attrs.axis) % values.ndim != axis:
        return None
    others = tuple(other for other in range(values.ndim) if other != axis)
    scales = np.broadcast_to(scale.reshape(-1), values.shape[axis])
    return Factor(values, scales, values.sum(axis=others, dtype=np.int32))


# -------------------------------------------------------------------------------------------------- rules


def _convolution(
    layout: Layout, binding: relax.VarBinding, *, threads: int, winograd: bool
) -> Blocked | None:
    call = binding.value
    if not is_op(call, "nn.conv2d") or int(call.attrs.groups) != 1:
        return None
    x, w = _activation(layout, call.args[0]), _factor(layout, call.args[1], 0)
    if x is None or w is None or (call.attrs.data_layout, call.attrs.kernel_layout) != ("NCHW", "OIHW"):
        return None
    if x.shape != tensor_shape(x.values):
        return None
    outputs, inputs = w.values.shape[:2]
    lanes, window, result = (
        lanes_of(outputs, layout.isa),
        conv_window_of(call.attrs),
        tensor_shape(binding.var),
    )
    if x.values not in layout.blocked and inputs < NARROW_INPUT:
        source, input_lanes = layout.as_plain(x.values), None
    else:
        found = layout.blocked.get(x.values) or layout.as_blocked(x.values, lanes_of(inputs, layout.isa))
        source, input_lanes = found.var, found.lanes
    if winograd and input_lanes is not None:
        blocks_of_weight = -(-outputs // lanes), -(-inputs // input_lanes)
        weight = (*blocks_of_weight, *w.values.shape[2:], input_lanes, lanes)
        floats = blocked_conv2d(tensor_shape(source), weight, window)
        if floats_are_faster(Request(floats, frozenset([1]), Target((), layout.isa), threads=threads)):
            return None
    packed = ConvWeight(None, w.values).packed(layout, lanes, input_lanes)
    # without padding kernels of all zero points are one
    padding = x.zero if any(window.padding) else 0
    key = tensor_shape(source), tensor_shape(packed), window, tensor_dtype(source), padding
    blocks = -(-outputs // lanes)
    shape = (result[0], blocks, result[2], result[3], lanes)
    sums = layout.call(
        ("int8_conv2d", *key), lambda: int8_conv2d(*key), [source, packed], relax.TensorType(shape, "int32")
    )

    def per_channel(values: np.ndarray) -> np.ndarray:
        filled = np.zeros(blocks * lanes, values.dtype)
        filled[:outputs] = values
        return filled.reshape(1, blocks, 1, 1, lanes)

    scales, offsets = per_channel(x.scale * w.scale), per_channel(_offsets(x, w, x.shift))
    return Blocked(_scaled(layout, sums, offsets, scales), outputs)


def _plain_convolution(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    call = binding.value
    if not is_op(call, "nn.conv2d") or int(call.attrs.groups) != 1:
        return None
    x, w = _activation(layout, call.args[0]), _factor(layout, call.args[1], 0)
    if x is None or w is None or (call.attrs.data_layout, call.attrs.kernel_layout) != ("NCHW", "OIHW"):
        return None
    shape = tensor_shape(binding.var)
    outputs, positions = len(w.values), shape[0] * math.prod(shape[2:])
    if x.shape != tensor_shape(x.values) or not _suits_tensor_cores(outputs, positions, w.values[0].size):
        return None
    source, weight = layout.as_plain(x.values), layout.builder.weight(w.values, "weight")
    key = x.shape, w.values.shape, conv_window_of(call.attrs), tensor_dtype(source), x.zero
    sums = layout.call(
        ("int8_plain_conv2d", *key),
        lambda: int8_plain_conv2d(*key),
        [source, weight],
        relax.TensorType(shape, "int32"),
    )
    per_channel = (1, outputs, 1, 1)
    offsets, scales = _offsets(x, w, 0), x.scale * w.scale
    return _scaled(layout, sums, offsets.reshape(per_channel), scales.reshape(per_channel))


def _matmul(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    call = binding.value
    if not is_op(call, "matmul"):
        return None
    x, w = _activation(layout, call.args[0]), _factor(layout, call.args[1], 1)
    if x is None or w is None or w.values.ndim != 2 or len(x.shape) < 2:
        return None
    source, weight = layout.as_plain(x.values), layout.builder.weight(w.values, "weight")
    if tensor_shape(source) != x.shape:
        source = layout.emit(relax.op.reshape(source, x.shape), "view")
    key = x.shape, w.values.shape, tensor_dtype(source), x.shift
    result = relax.TensorType(tensor_shape(binding.var), "int32")
    sums = layout.call(("int8_matmul", *key), lambda: int8_matmul(*key), [source, weight], result)
    return _scaled(layout, sums, _offsets(x, w, x.shift), x.scale * w.scale)


def _plain_matmul(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    """The product as kernels of both devices multiply it."""
    if not is_op(binding.value, "matmul"):
        return None
    shape, depth = tensor_shape(binding.var), tensor_shape(binding.value.args[1])[0]
    if not shape or not _suits_tensor_cores(math.prod(shape[:-1]), shape[-1], depth):
        return None
    return _matmul(layout, binding)


def _suits_tensor_cores(rows: int, columns: int, depth: int) -> bool:
    return min(rows, columns, depth) >= SMALLEST_SIDE


def _offsets(x: Activation, w: Factor, added: int) -> np.ndarray:
    """The correction of each output's sums, in which x with `added` was multiplied instead of x - z."""
    return -np.int32(x.zero + added) * w.sums


def _scaled(layout: Layout, sums: relax.Var, offsets: np.ndarray, scales: np.ndarray) -> relax.Var:
    offset, scale = (
        layout.builder.weight(offsets, "offset"),
        layout.builder.weight(scales.astype("float32"), "scale"),
    )
    exact = layout.emit(relax.op.add(sums, offset), "sums")
    return layout.emit(
        relax.op.multiply(layout.emit(relax.op.astype(exact, "float32"), "sums"), scale), "scaled"
    )


def _blocked_conversion(layout: Layout, binding: relax.VarBinding) -> Blocked | None:
    """Quantization, and its reverse, of a blocked tensor as a whole."""
    call: Any = binding.value
    if not is_op(call, "quantize", "dequantize") or call.args[0] not in layout.blocked:
        return None
    known = [layout.weight(a) for a in call.args[1:3]]
    if any(value is None or value.size != 1 for value in known):
        return None
    source = layout.blocked[call.args[0]]
    parameters = [relax.const(v.reshape(()), v.dtype.name) for v in known if v is not None]
    value = relax.Call(call.op, [source.var, *parameters], call.attrs)
    return Blocked(layout.emit(value, binding.var.name), source.channels)


def _known(layout: Layout, binding: relax.VarBinding) -> relax.Var | None:
    """Dequantized constants, and views of them."""
    call: Any = binding.value
    if not is_op(call, "dequantize", "reshape", "permute_dims", "expand_dims"):
        return None
    values = [layout.weight(argument) for argument in call.args if not isinstance(argument, relax.ShapeExpr)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    value = known[0]
    if is_op(call, "dequantize"):
        value = dequantized(value, known[1], known[2], int(call.attrs.axis))
    elif is_op(call, "permute_dims"):
        axes = call.attrs.axes
        value = np.ascontiguousarray(value.transpose(None if axes is None else [int(a) for a in axes]))
    return layout.builder.weight(value.reshape(tensor_shape(binding.var)), binding.var.name)


DEQUANTIZED_RULES: tuple[Rule, ...] = (_known, _blocked_conversion)
"""Where products stay in floats: weights are dequantized when compiling."""
_PLAIN_RULES: tuple[Rule, ...] = (_known, _plain_convolution, _plain_matmul)


def quantized_rules(threads: int, *, winograd: bool) -> tuple[Rule, ...]:
    """Rules for `choose_layout`, in front of its own, for kernels that so many threads share.

    With `winograd` convolutions stay in float32 that are faster so; weights are dequantized when compiling.
    """
    return (_known, partial(_convolution, threads=threads, winograd=winograd), _matmul, _blocked_conversion)


def has_quantized_tensors(program: Program) -> bool:
    """Whether anything is dequantized from 8 bits."""
    return next(_dequantized(program), None) is not None


def has_quantized_activations(program: Program) -> bool:
    """The same of anything but weights."""
    return any(isinstance(e, relax.Var) and e.name not in program.weights for e in _dequantized(program))


def _dequantized(program: Program) -> Iterator[relax.Expr]:
    for binding in program.bindings:
        if is_op(binding.value, "dequantize") and tensor_dtype(binding.value.args[0]) in ("uint8", "int8"):
            yield binding.value.args[0]


def multiply_integers(program: Program, isa: Isa) -> Program:
    """Replace products of dequantized tensors that tensor cores can make of 8-bit integers.

    Requires: `main` canonical, a target with a GPU.
    Ensures: inputs and outputs of `main` as they were; every binding has origins. `isa` can run what is new.
    Raises: nothing of its own.
    """
    return apply_rules(program, isa, _PLAIN_RULES)
