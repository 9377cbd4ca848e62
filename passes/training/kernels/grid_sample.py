"""Gradients of sampling data at a grid's points.

A sample is a sum of elements (`passes/program/sampling.py`): with respect to the data its gradient is added
to these elements; with respect to the point their factors are differentiated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from hybridc.passes.program.sampling import Sampling, taps_of
from hybridc.passes.training.gradients import extents


def grid_sample_gradient(shape: Sequence[int], points: Sequence[int], sampling: Sampling) -> tirx.PrimFunc:
    """dy [N, C, points...] and grid [N, axes, points...], to the gradient of data of `shape` [N, C, axes...].

    A thread adds up all of a channel's samples: no two write one element, and the order is fixed.
    """
    batch, channels, *axes = shape
    dtype, zero = sampling.dtype, tirx.const(0, sampling.dtype)
    count, elements = math.prod(points), math.prod(axes)
    grad = te.placeholder(extents((batch, channels, count)), dtype, "dy")
    grid = te.placeholder(extents((batch, len(axes), count)), dtype, "grid")

    def build(buffers: list[tirx.Buffer]) -> tirx.Stmt:
        dy, at, out = (T.buffer_proxy(buffer) for buffer in buffers)
        with IRBuilder() as builder:
            with T.parallel(0, batch * channels) as task:
                with T.serial(0, elements) as element:
                    out[task * elements + element] = zero
                with T.serial(0, count) as point:
                    image = tirx.floordiv(task, channels)

                    def coordinate(axis: int) -> tirx.Expr:
                        return at[(image * len(axes) + axis) * count + point]

                    for taps in itertools.product(*taps_of(sampling, coordinate, axes)):
                        with T.If(tirx.all(*(tap.is_inside for tap in taps))), T.Then():
                            place = task * elements + _flat([tap.index for tap in taps], axes)
                            factor = _product([tap.factor for tap in taps])
                            out[place] = out[place] + dy[task * count + point] * factor
            return builder.get()

    buffer = tirx.decl_buffer(extents(shape), dtype, "dx", layout=None)
    out = te.extern(
        [extents(shape)],
        [grad, grid],
        lambda inputs, outputs: build([*inputs, *outputs]),
        dtype=dtype,
        out_buffers=[buffer],
        name="grid_sample_gradient",
    )
    return te.create_prim_func([grad, grid, out])


def grid_gradient(shape: Sequence[int], points: Sequence[int], sampling: Sampling) -> tirx.PrimFunc:
    """Data of `shape` [N, C, axes...], grid [N, axes, points...] and dy [N, C, points...], to the grid's.

    Coordinates are listed from the last axis of the data to the first.
    """
    batch, channels, *axes = shape
    dtype, zero = sampling.dtype, tirx.const(0, sampling.dtype)
    data = te.placeholder(extents(shape), dtype, "data")
    grid = te.placeholder(extents((batch, len(axes), *points)), dtype, "grid")
    grad = te.placeholder(extents((batch, channels, *points)), dtype, "dy")
    channel = te.reduce_axis((0, tirx.IntImm("int64", channels)), "c")

    def body(n: tirx.Var, number: tirx.Var, *point: tirx.Var) -> tirx.Expr:
        taps = taps_of(sampling, lambda i: grid[(n, i, *point)], axes)

        def along(axis: int) -> tirx.Expr:
            """The sample's derivative with respect to the coordinate of one axis of the data."""
            total = zero
            for chosen in itertools.product(*taps):
                factors = [tap.slope if i == axis else tap.factor for i, tap in enumerate(chosen)]
                element = data[(n, channel, *(tap.index for tap in chosen))]
                is_inside = tirx.all(*(tap.is_inside for tap in chosen))
                total = total + tirx.if_then_else(is_inside, element, zero) * _product(factors)
            return total

        value = along(len(axes) - 1)
        for i in range(1, len(axes)):
            value = tirx.if_then_else(number == i, along(len(axes) - 1 - i), value)
        return te.sum(grad[(n, channel, *point)] * value, axis=[channel])

    out = te.compute(extents((batch, len(axes), *points)), body, name="grid_gradient")
    return te.create_prim_func([data, grid, grad, out])


def _flat(indices: Sequence[tirx.Expr], axes: Sequence[int]) -> tirx.Expr:
    place = indices[0]
    for index, extent in zip(indices[1:], axes[1:], strict=True):
        place = place * extent + index
    return place


def _product(factors: Sequence[tirx.Expr]) -> tirx.Expr:
    return math.prod(factors[1:], start=factors[0])
