"""Weight gradients of convolutions: implicit GEMM whose long reduction is split over blocks of threads.

The result is small, as few tiles as weights need, and the reduction runs over all positions of all images:
without a split a few blocks would do everything. Each split gives a partial result; another launch adds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, te, tirx
from tvm.s_tir.dlight.analysis import normalize_prim_func

from hybridc.schedules.cuda.core.anchor import find_anchor
from hybridc.schedules.cuda.core.launch import apply_dlight, cuda_target, finish_function
from hybridc.schedules.cuda.core.loops import launch_alone
from hybridc.schedules.cuda.matmul.matmul import MICRO, SMALLEST_SIDE, TILE_THREADS, TiledMatmul
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.schedules.shapes import index_shape, shape_of

BLOCKS = 256
"""Of threads, that keep every multiprocessor of a GPU busy."""
SPLIT_DEPTH = 256
"""Steps of the reduction that each split has at least."""
OPERATORS = ("conv1d_wgrad", "conv2d_wgrad")


@dataclass(frozen=True, slots=True)
class _Gradient:
    """`dw[o, c, k...] = sum of dy[n, o, y...] * data[n, c, y * stride + k * dilation - before...]`."""

    data: tirx.Var
    dy: tirx.Var
    weight: tirx.Var
    strides: tuple[int, ...]
    before: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Images, and the spatial axes of dy."""
        batches, _, *spatial = shape_of(self.dy)
        return (batches, *spatial)

    @property
    def rows(self) -> int:
        return shape_of(self.weight)[0]

    @property
    def columns(self) -> int:
        return math.prod(shape_of(self.weight)[1:])


@schedule_rule(family="conv2d")
def conv_wgrad(request: Request) -> Scheduled | None:
    """Accepts weight gradients as `passes/training` writes them, if they have too few tiles for a GPU.

    Tiling: that of `matmul.py` for each split, of the flattened positions; then a thread for each weight.
    """
    gradient = _read(request.function)
    if gradient is None or min(gradient.rows, gradient.columns) < SMALLEST_SIDE:
        return None
    depth = math.prod(gradient.positions)
    # blocks of threads that a product without splits would have
    tiles = -(-gradient.rows * gradient.columns // (TILE_THREADS * MICRO * MICRO))
    # as many blocks as keep the GPU busy, unless a split would be too short
    splits = min(BLOCKS // tiles, depth // SPLIT_DEPTH)
    if splits < 2:
        return None
    target = cuda_target(request.target)
    products = _products(gradient, splits, -(-depth // splits))
    anchor = find_anchor(products)
    if anchor is None:
        return None
    first = apply_dlight(TiledMatmul(anchor), products, target)
    if first is None:
        return None
    second = s_tir.Schedule(_sums(gradient, splits))
    (info,) = normalize_prim_func(second) or []
    launch_alone(second, info)
    return finish_function(_joined(request.function, gradient, first, second), conv_wgrad.__name__, target)


def _read(function: tirx.PrimFunc) -> _Gradient | None:
    """The gradient, in one group and without an epilogue."""
    if find_anchor(function) is None:
        return None
    schedule = s_tir.Schedule(function)
    blocks = [schedule.get(b) for b in schedule.get_child_blocks(schedule.get_sblock("root"))]
    anchor, notes = blocks[-1], blocks[-1].annotations
    if str(notes.get("operator", "")) not in OPERATORS or int(notes["groups"]) != 1:
        return None
    product = anchor.body.value.b
    dy, data = product.a.source, product.b.source
    producer = next((b for b in blocks if b.writes[0].source.same_as(data)), None)
    data = data if producer is None else producer.reads[0].source
    *inputs, weight = function.params
    if not all(any(v.same_as(p) for p in inputs) for v in (dy, data)) or len(dy.shape) != len(weight.shape):
        return None
    rank = len(weight.shape) - 2
    strides, padding, dilation = (tuple(int(v) for v in notes[k]) for k in ("strides", "padding", "dilation"))
    return _Gradient(data, dy, weight, strides, padding[:rank], dilation)


def _unflatten(flat: tirx.Expr, shape: Sequence[int]) -> list[tirx.Expr]:
    point: list[tirx.Expr] = []
    for extent in reversed(shape[1:]):
        point.append(tirx.floormod(flat, extent))
        flat = tirx.floordiv(flat, extent)
    return [flat, *reversed(point)]


def _products(gradient: _Gradient, splits: int, depth: int) -> tirx.PrimFunc:
    """Data and dy to the partial results `[splits, O, C * taps]`: a batch of matrix products."""
    x, dy = (
        te.placeholder(index_shape(shape_of(v)), "float32", v.name) for v in (gradient.data, gradient.dy)
    )
    zero = tirx.const(0.0, "float32")
    every, taps = math.prod(gradient.positions), shape_of(gradient.weight)[1:]

    def left(split: te.Var, o: te.Var, k: te.Var) -> te.Expr:
        position = split * depth + k
        n, *at = _unflatten(position, gradient.positions)
        value = dy[(n, o, *at)]
        # the last split may reach beyond the last position
        return value if splits * depth == every else tirx.if_then_else(position < every, value, zero)

    def right(split: te.Var, column: te.Var, k: te.Var) -> te.Expr:
        position = split * depth + k
        n, *at = _unflatten(position, gradient.positions)
        c, *tap = _unflatten(column, taps)
        source = [
            y * s + t * d - b
            for y, s, t, d, b in zip(
                at, gradient.strides, tap, gradient.dilation, gradient.before, strict=True
            )
        ]
        inside = [
            c for i, e in zip(source, shape_of(gradient.data)[2:], strict=True) for c in (i >= 0, i < e)
        ]
        return tirx.if_then_else(tirx.all(position < every, *inside), x[(n, c, *source)], zero)

    a = te.compute(index_shape((splits, gradient.rows, depth)), left, name="left")
    b = te.compute(index_shape((splits, gradient.columns, depth)), right, name="right")
    k = te.reduce_axis((0, tirx.IntImm("int64", depth)), "k")
    partial = te.compute(
        index_shape((splits, gradient.rows, gradient.columns)),
        lambda s, o, j: te.sum(a[s, o, k] * b[s, j, k], axis=k),
        name="partial",
    )
    return te.create_prim_func([x, dy, partial])


def _sums(gradient: _Gradient, splits: int) -> tirx.PrimFunc:
    shape = shape_of(gradient.weight)
    partial = te.placeholder(index_shape((splits, gradient.rows, gradient.columns)), "float32", "partial")
    s = te.reduce_axis((0, tirx.IntImm("int64", splits)), "s")

    def at(o: te.Var, c: te.Var, *tap: te.Var) -> te.Expr:
        column = c
        for i, extent in zip(tap, shape[2:], strict=True):
            column = column * extent + i
        return te.sum(partial[s, o, column], axis=s)

    return te.create_prim_func([partial, te.compute(index_shape(shape), at, name="sums")])


def _joined(
    original: tirx.PrimFunc, gradient: _Gradient, first: s_tir.Schedule, second: s_tir.Schedule
) -> tirx.PrimFunc:
    """Both launches in one function of the original's parameters; partial results are its own."""
    products, sums = first.mod["main"], second.mod["main"]
    x, dy, partial = products.params
    names = {x: gradient.data, dy: gradient.dy, sums.params[0]: partial, sums.params[1]: gradient.weight}
    bodies = [
        tvm_ffi.structural_map(f.body.block, (ir.Var, lambda v: names.get(v, v))) for f in (products, sums)
    ]
    allocated = [b for body in bodies for b in body.alloc_buffers]
    root = s_tir.SBlock(
        [], [], [], "root", tirx.SeqStmt([b.body for b in bodies]), alloc_buffers=[*allocated, partial]
    )
    realize = s_tir.SBlockRealize([], True, root)
    return tirx.PrimFunc(list(original.params), realize, original.ret_type, original.attrs)
