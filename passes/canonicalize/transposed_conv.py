"""Transposed convolutions as ordinary ones: rules of canonicalize.

A transposed convolution of stride s writes every s-th output with the same taps. Outputs whose positions
are equal modulo s, a *phase*, are an ordinary convolution with each s-th tap of the kernel; so all phases are
one convolution of stride 1 with s times the output channels for each axis, whose results are interleaved:

    out[n, c, s * y + p] = convolved[n, p * C + c, y]          (depth to space, as ONNX's mode DCR)

For each axis that takes 1/s of the arithmetic of convolving data with s - 1 zeros between its elements (Shi
et al., "Is the deconvolution layer the same as a convolutional layer?", 2016).

Weights that are not known at compile time are reordered by a function in every run: gradients of convolutions
with respect to their data are transposed convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx

from hybridc.passes.canonicalize.context import Context
from hybridc.passes.program.operators import Fact, has_fact
from hybridc.passes.program.program import is_op, tensor_dtype, tensor_shape
from hybridc.schedules.annotation import Pattern
from hybridc.schedules.blocked_operators import extents


@dataclass(frozen=True, slots=True)
class _Phases:
    """One axis: the convolution whose outputs, interleaved, give `outputs` elements from `first` on."""

    stride: int
    taps: tuple[tuple[int, ...], ...]
    """For each phase and each tap of the new kernel the tap of the old one; -1 where there is none."""
    before: int
    after: int
    """Padding of the convolution."""
    first: int
    outputs: int

    @property
    def window(self) -> int:
        """Taps of the new kernel."""
        return len(self.taps[0])

    def tap_of(self, phase: tirx.Expr, place: tirx.Expr) -> tuple[tirx.Expr, bool]:
        """The old tap at a position of a phase's new kernel, and whether that exists for every position and
        phase.

        It is affine in the position: one position further is `stride` taps back.
        """
        known = [(p, j, k) for p, taps in enumerate(self.taps) for j, k in enumerate(taps) if k >= 0]
        firsts = {p: k + self.stride * j for p, j, k in known}
        always = len(known) == self.stride * self.window
        first: tirx.Expr = tirx.const(-1, "int64")
        for p, number in firsts.items():
            value = tirx.const(number, "int64")
            first = value if self.stride == 1 else tirx.Select(phase == p, value, first)
        return first - place * self.stride, always


def split_transposed_convolution(expr: relax.Expr, context: Context) -> relax.Expr | None:
    """`conv1d_transpose` or `conv2d_transpose`; without dilation if there is a stride."""
    if not isinstance(expr, relax.Call) or not is_op(expr, "nn.conv1d_transpose", "nn.conv2d_transpose"):
        return None
    attrs, weight = expr.attrs, tensor_shape(expr.args[1])
    rank = len(attrs.strides)
    if tensor_dtype(expr.args[0]) != "float32":
        return None
    plain = (attrs.data_layout, attrs.kernel_layout) == (("NCW", "IOW"), ("NCHW", "IOHW"))[rank - 1]
    if not plain:
        return None
    if any(int(d) != 1 for d in attrs.dilation):
        return _rotated(expr, context)
    numbers = zip(
        attrs.strides, attrs.padding[:rank], attrs.padding[rank:], attrs.output_padding, strict=True
    )
    extents = tensor_shape(expr.args[0])[2:]
    axes = [
        _phases(extent, taps, *(int(n) for n in of_axis))
        for extent, taps, of_axis in zip(extents, weight[2:], numbers, strict=True)
    ]
    convolved = _convolve(expr, axes, context)
    return _interleave(convolved, int(attrs.groups), weight[1], axes, context)


def _phases(extent: int, taps: int, stride: int, before: int, after: int, extra: int) -> _Phases:
    """The alignment of phases with the fewest taps; among equals the one that crops least."""
    outputs = (extent - 1) * stride + taps - before - after + extra

    def aligned(first: int) -> _Phases:
        # output i takes tap k of the input (i + before - k) / stride, where that is whole
        reads: list[dict[int, int]] = []
        for phase in range(stride):
            offset, tap = divmod(phase + before - first, stride)
            reads.append({offset - j: k for j, k in enumerate(range(tap, taps, stride))})
        lowest = min([0, *itertools.chain(*reads)])
        highest = max([0, *itertools.chain(*reads)])
        kernel = tuple(tuple(r.get(at, -1) for at in range(lowest, highest + 1)) for r in reads)
        positions = -(-(outputs + first) // stride)
        return _Phases(stride, kernel, -lowest, max(positions + highest - extent, 0), first, outputs)

    return min((aligned(first) for first in range(stride)), key=lambda p: (p.window, p.first))


def _convolve(call: relax.Call, axes: Sequence[_Phases], context: Context) -> relax.Var:
    """One convolution whose output channels, within each group, are those of all phases in order."""
    padding = [a.before for a in axes] + [a.after for a in axes]
    return _emit_convolution(call, _kernel(call, axes, context), padding, [1] * len(axes), context)


def _kernel(call: relax.Call, axes: Sequence[_Phases], context: Context) -> relax.Var:
    value, groups = context.weight(call.args[1]), int(call.attrs.groups)
    if value is None:
        return _arranged(call.args[1], groups, axes, context)
    arranged = np.concatenate([_phase_kernel(part, axes) for part in np.split(value, groups)])
    return context.builder.weight(arranged, f"{context.name}_weight")


def _phase_kernel(weight: np.ndarray, axes: Sequence[_Phases]) -> np.ndarray:
    """`[phases * C, O, taps...]` of a group's weights `[O, C, taps...]`, zero where a phase has no tap."""
    split = weight
    for i, axis in enumerate(axes):
        zero = np.zeros_like(np.take(split, [0], 2 + 2 * i))
        split = np.take(np.concatenate([split, zero], 2 + 2 * i), np.array(axis.taps), 2 + 2 * i)
    phases = [2 + 2 * i for i in range(len(axes))]
    split = split.transpose(*phases, 1, 0, *(p + 1 for p in phases))
    return np.ascontiguousarray(split).reshape(-1, *split.shape[len(axes) + 1 :])


def _arranged(weight: relax.Expr, groups: int, axes: Sequence[_Phases], context: Context) -> relax.Var:
    """`_phase_kernel` of every group at run time."""
    shape = tensor_shape(weight)
    key = ("phase_kernel", shape, groups, *(axis.taps for axis in axes))
    phases = math.prod(a.stride for a in axes)
    result = (groups * phases * shape[1], shape[0] // groups, *(a.window for a in axes))
    made = context.emit(context.call(key, lambda: phase_kernel(shape, groups, axes), [weight], result))
    context.uses[made] = 1
    return made


def phase_kernel(shape: Sequence[int], groups: int, axes: Sequence[_Phases]) -> tirx.PrimFunc:
    """The function that brings weights `[O, C, taps...]`, O of all groups, into the order of phases."""
    weight = te.placeholder(extents(*shape), "float32", "weight")
    strides, inputs = [axis.stride for axis in axes], shape[0] // groups
    outputs = math.prod(strides) * shape[1]

    def at(channel: te.Var, o: te.Var, *place: te.Var) -> te.Expr:
        if groups > 1:
            o, channel = tirx.floordiv(channel, outputs) * inputs + o, tirx.floormod(channel, outputs)
        phase, taps, exists = tirx.floordiv(channel, shape[1]), [], []
        for i, axis in enumerate(axes):
            number = tirx.floormod(tirx.floordiv(phase, math.prod(strides[i + 1 :])), strides[i])
            tap, always = axis.tap_of(number, place[i])
            taps.append(tap)
            exists += [] if always else [tap >= 0, tap < shape[2 + i]]
        value = weight[(o, tirx.floormod(channel, shape[1]), *taps)]
        return tirx.if_then_else(tirx.all(*exists), value, tirx.const(0.0, "float32")) if exists else value

    result = (groups * outputs, inputs, *(axis.window for axis in axes))
    out = te.compute(extents(*result), at, name="phase_kernel")
    function = te.create_prim_func([weight, out])
    return function.with_attr("op_pattern", int(Pattern.INJECTIVE)).with_attr("tirx.noalias", True)


def _rotated(call: relax.Call, context: Context) -> relax.Var | None:
    """Of stride 1, with any dilation: one phase, whose taps are the kernel's in reverse."""
    attrs, shape = call.attrs, tensor_shape(call.args[1])
    rank = len(attrs.strides)
    dilation, taps = [int(d) for d in attrs.dilation], shape[2:]
    reach = [(k - 1) * d for k, d in zip(taps, dilation, strict=True)]
    before = [r - int(p) for r, p in zip(reach, attrs.padding[:rank], strict=True)]
    after = [
        r - int(p) + int(extra)
        for r, p, extra in zip(reach, attrs.padding[rank:], attrs.output_padding, strict=True)
    ]
    if any(int(s) != 1 for s in attrs.strides) or min(before + after) < 0:
        return None
    axes = [_Phases(1, (tuple(range(k - 1, -1, -1)),), 0, 0, 0, 0) for k in taps]
    return _emit_convolution(call, _kernel(call, axes, context), [*before, *after], dilation, context)


def _emit_convolution(
    call: relax.Call, kernel: relax.Var, padding: Sequence[int], dilation: Sequence[int], context: Context
) -> relax.Var:
    convolution = relax.op.nn.conv1d if len(dilation) == 1 else relax.op.nn.conv2d
    options = {"padding": list(padding), "dilation": list(dilation), "groups": int(call.attrs.groups)}
    result = context.emit(convolution(call.args[0], kernel, **options))
    context.uses[result] = 1
    return result


def _interleave(
    convolved: relax.Var, groups: int, channels: int, axes: Sequence[_Phases], context: Context
) -> relax.Var:
    """`[N, groups * phases * channels, positions...]` to `[N, groups * channels, outputs...]`."""
    batches, _, *positions = tensor_shape(convolved)
    rank, strides = len(axes), [axis.stride for axis in axes]
    result = convolved
    if math.prod(strides) > 1:
        outer = (batches,) if groups == 1 else (batches, groups)
        split = context.emit(relax.op.reshape(convolved, (*outer, *strides, channels, *positions)))
        order = [*range(len(outer)), *(axis + len(outer) - 1 for axis in (rank + 1, *_pairs(rank)))]
        moved = context.emit(relax.op.permute_dims(split, order))
        extents = [p * s for p, s in zip(positions, strides, strict=True)]
        result = context.emit(relax.op.reshape(moved, (batches, groups * channels, *extents)))
    begins = [axis.first for axis in axes]
    ends = [axis.first + axis.outputs for axis in axes]
    if list(tensor_shape(result)[2:]) == [axis.outputs for axis in axes] and not any(begins):
        return result
    return context.emit(relax.op.strided_slice(result, list(range(2, 2 + rank)), begins, ends))


def emit_before_interleaving(context: Context, expr: relax.Expr) -> relax.Var:
    """Emit an element-wise operator, moved before an interleaving whose result it reads."""
    result = interleave_later(expr, context)
    return context.emit(expr) if result is None else result


def interleave_later(expr: relax.Expr, context: Context) -> relax.Var | None:
    """An element-wise operator after an interleaving is done before it, as part of what computes its input.

    Accepts unary operators, and binary ones whose other operand is known and has one number per channel or
    one for all.
    """
    if not isinstance(expr, relax.Call) or not has_fact(expr, Fact.EPILOGUE):
        return None
    operands = list(expr.args) if has_fact(expr, Fact.BINARY) else [expr.args[0]]
    found = [(i, steps) for i, a in enumerate(operands) if (steps := _interleaving(a, context))]
    if len(found) != 1:
        return None
    position, steps = found[0]
    moved = [
        steps[0].args[0] if i == position else _phase_by_phase(operand, steps, context)
        for i, operand in enumerate(operands)
    ]
    if any(operand is None for operand in moved):
        return None
    result = context.emit(relax.Call(expr.op, [*moved, *expr.args[len(moved) :]], expr.attrs))
    context.uses[result] = 1
    for step in steps:
        result = context.emit(relax.Call(step.op, [result, *step.args[1:]], step.attrs))
    return result


def _interleaving(operand: relax.Expr, context: Context) -> list[relax.Call] | None:
    """The operators, in order, that interleave phases and crop the result; None if `operand` is something
    else, or if it or the phases have other readers."""
    names = ["reshape", "permute_dims", "reshape"]
    if is_op(context.definition(operand), "strided_slice"):
        names.append("strided_slice")
    steps: list[relax.Call] = []
    var = operand
    for name in reversed(names):
        call = context.definition(var)
        if not is_op(call, name):
            return None
        steps.insert(0, call)
        var = call.args[0]
    rank = len(tensor_shape(var)) - 2
    axes = [int(a) for a in steps[1].attrs.axes or ()]
    if axes != [0, rank + 1, *_pairs(rank)] or context.uses[operand] != 1 or context.uses[var] != 1:
        return None
    same_channels = tensor_shape(operand)[1] == tensor_shape(steps[2].args[0])[1]
    return steps if same_channels and len(tensor_shape(operand)) == rank + 2 else None


def _pairs(rank: int) -> list[int]:
    """Axes of `[N, phases..., C, positions...]`: position and phase of the first axis, then of the second."""
    return [axis for i in range(rank) for axis in (rank + 2 + i, 1 + i)]


def _phase_by_phase(operand: relax.Expr, steps: Sequence[relax.Call], context: Context) -> relax.Expr | None:
    """A constant per channel, or one for all, as a constant for the channels of all phases."""
    value = context.weight(operand)
    if value is None:
        return None
    if value.size == 1:
        return relax.const(value.reshape(()), value.dtype.name)
    _, phased, *positions = tensor_shape(steps[0].args[0])
    channels = tensor_shape(steps[2].args[0])[1]
    ones = (1,) * len(positions)
    if (1,) * (2 + len(ones) - value.ndim) + value.shape != (1, channels, *ones):
        return None
    tiled = np.tile(value.reshape(-1), phased // channels).reshape(1, phased, *ones)
    return context.builder.weight(tiled, f"{context.name}_param")
