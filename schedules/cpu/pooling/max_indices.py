"""Max pooling of blocked activations that also writes which tap of each window won."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

Span = tuple[ir.Expr, ir.Expr]


@dataclass(frozen=True, slots=True)
class PoolingAxis:
    """Output `y` and tap `k` read input `y * stride + k * dilation - before`."""

    taps: int
    stride: int
    before: int
    dilation: int
    inputs: int
    outputs: int

    def source(self, output: ir.Expr, tap: ir.Expr) -> ir.Expr:
        """The input's position that a tap reads; outside of the input for padding."""
        return output * integer(self.stride) + tap * integer(self.dilation) - integer(self.before)

    def taps_of(self, output: ir.Expr) -> Span:
        """The first tap that reads data, and the one behind the last."""
        start = output * integer(self.stride) - integer(self.before)
        step = integer(self.dilation)
        # rounded up: the first tap whose position is not below zero
        first = tirx.max(tirx.floordiv(step - integer(1) - start, step), integer(0))
        last = tirx.floordiv(integer(self.inputs) - start + step - integer(1), step)
        return first, tirx.max(tirx.min(last, integer(self.taps)), first)

    @property
    def inside(self) -> tuple[int, int]:
        """The first output all of whose taps read data, and the one behind the last."""
        reach = (self.taps - 1) * self.dilation
        first = -(-self.before // self.stride)
        last = (self.inputs - 1 - reach + self.before) // self.stride + 1
        return min(first, self.outputs), max(min(last, self.outputs), min(first, self.outputs))


@schedule_rule(family="pooling")
def max_pool_indices(request: Request) -> Scheduled | None:
    """Accepts `max_pool_with_indices` of `passes/layout/max_pool.py`.

    Tiling: an image row of outputs is a task; each pixel is a vector of channels, whose best value and the
    number of its tap are two registers. Taps that read padding are left out.
    """
    function = request.function
    axes = _read(function)
    if axes is None:
        return None
    data, values, numbers = function.params
    batches, blocks, height, width, lanes = (int(e) for e in values.shape)
    best = tirx.decl_buffer((lanes,), "float32", "best", scope="local")
    number = tirx.decl_buffer((lanes,), "int32", "number", scope="local")
    rows, columns = axes

    def task(point: Point) -> tirx.Stmt:
        n, block, y = point

        def pixel(x: ir.Expr, taps: Callable[[Callable[[ir.Expr], tirx.Stmt]], tirx.Stmt]) -> tirx.Stmt:
            def tap(a: ir.Expr, b: ir.Expr) -> tirx.Stmt:
                def step(lane: ir.Expr) -> tirx.Stmt:
                    place = [n, block, rows.source(y, a), columns.source(x, b), lane]
                    value, old = tirx.BufferLoad(data, place), tirx.BufferLoad(best, [lane])
                    # the first of equal values wins, and every NaN
                    wins = tirx.any(value > old, tirx.isnan(value))
                    tap_number = (a * integer(columns.taps) + b).astype("int32")
                    kept = tirx.Select(wins, tap_number, tirx.BufferLoad(number, [lane]))
                    return tirx.SeqStmt([
                        tirx.BufferStore(number, kept, [lane]),
                        tirx.BufferStore(best, tirx.Select(wins, value, old), [lane]),
                    ])  # fmt: skip

                return vectorized(lanes, step)

            def clear(lane: ir.Expr) -> tirx.Stmt:
                return tirx.SeqStmt([
                    tirx.BufferStore(best, tirx.FloatImm("float32", -math.inf), [lane]),
                    tirx.BufferStore(number, tirx.IntImm("int32", 0), [lane]),
                ])  # fmt: skip

            def write(lane: ir.Expr) -> tirx.Stmt:
                place = [n, block, y, x, lane]
                found = tirx.BufferLoad(number, [lane]).astype(str(numbers.dtype))
                return tirx.SeqStmt([
                    tirx.BufferStore(values, tirx.BufferLoad(best, [lane]), place),
                    tirx.BufferStore(numbers, found, place),
                ])  # fmt: skip

            first, last = rows.taps_of(y)
            windows = loop(last - first, lambda a: taps(lambda b: tap(first + a, b)))
            return sequence([vectorized(lanes, clear), windows, vectorized(lanes, write)])

        return _image_row(columns, pixel)

    parallel = math.prod((batches, blocks, height, width, lanes)) >= PARALLEL_WORK
    body = grid((batches, blocks, height), task, parallel=parallel)
    return finish(function_of(function, function.params, [body], [best, number]), max_pool_indices.__name__)


def _image_row(
    columns: PoolingAxis,
    pixel: Callable[[ir.Expr, Callable[[Callable[[ir.Expr], tirx.Stmt]], tirx.Stmt]], tirx.Stmt],
) -> tirx.Stmt:
    """All pixels of an image row: inside, all taps of a column are written out."""
    first, last = columns.inside

    def edge(x: ir.Expr) -> tirx.Stmt:
        start, end = columns.taps_of(x)
        return pixel(x, lambda body: loop(end - start, lambda b: body(start + b)))

    def whole(x: ir.Expr) -> tirx.Stmt:
        return pixel(x, lambda body: sequence([body(integer(b)) for b in range(columns.taps)]))

    def span(start: int, end: int, emit: Callable[[ir.Expr], tirx.Stmt]) -> list[tirx.Stmt]:
        return [loop(end - start, lambda i: emit(integer(start) + i))] if end > start else []

    return sequence([*span(0, first, edge), *span(first, last, whole), *span(last, columns.outputs, edge)])


def _read(function: tirx.PrimFunc) -> Sequence[PoolingAxis] | None:
    """The two axes, if it is the function."""
    if len(function.params) != 3 or any(len(p.shape) != 5 for p in function.params):
        return None
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append), order="post")
    found = [b.annotations for b in blocks if str(b.annotations.get("operator", "")) == "max_pool"]
    if not found or len(found[0]["taps"]) != 2:  # three axes of plain data have five dimensions, too
        return None
    (notes,) = found
    data, values, _ = function.params
    taps, strides, before, dilation = (
        [int(v) for v in notes[k]] for k in ("taps", "strides", "before", "dilation")
    )
    extents = [(int(data.shape[axis]), int(values.shape[axis])) for axis in (2, 3)]
    return [PoolingAxis(taps[i], strides[i], before[i], dilation[i], *extents[i]) for i in range(2)]
