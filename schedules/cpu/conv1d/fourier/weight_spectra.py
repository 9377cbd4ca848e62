"""Transformed weights of convolutions along one axis: conjugate, for a correlation, and divided by N."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.fourier.dft import Plane, Transform
from hybridc.schedules.cpu.conv2d.read import Convolution
from hybridc.schedules.cpu.core.micro_kernel import Point, ceil_div, clamp, grid, integer, loop, vectorized
from hybridc.schedules.packing import LinearMap, Packing


@dataclass(frozen=True, slots=True)
class Spectra:
    """Where products read them, and what has to run before and be allocated for it."""

    read: Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr, int], ir.Expr]
    """`read(f, block, c, row, part)` at a frequency f up to N / 2, of output channel `block * rows + row`."""
    stages: tuple[tirx.Stmt, ...] = ()
    buffers: tuple[ir.Var, ...] = ()
    parameter: tuple[int, ir.Var, Packing] | None = None


def packed_spectra(conv: Convolution, transform: Transform, row_blocks: int, rows: int) -> Spectra:
    """Of constant weights, in the order of reading: `[f, O / rows, C, rows, 2]`."""
    n, count = transform.points, transform.points // 2 + 1
    taps = range(conv.width.taps)
    angles = [[2 * math.pi * (f * k % n) / n for k in taps] for f in range(count)]
    matrix = [tuple(part(a) / n for a in row) for row in angles for part in (math.cos, math.sin)]
    line = () if conv.height.output is None else (1,)
    padded = (row_blocks * rows, conv.group_inputs, *line, 2 * count)
    shape = (row_blocks, rows, conv.group_inputs, count, 2)
    packing = Packing(padded, shape, (3, 0, 2, 1, 4), LinearMap(tuple(matrix), (2 + len(line),)))
    weights = tirx.decl_buffer([shape[axis] for axis in packing.axes], "float32", "packed_weight")
    position = conv.contraction.nest.parameter(conv.weight.source)
    assert position is not None

    def read(f: ir.Expr, block: ir.Expr, c: ir.Expr, row: ir.Expr, part: int) -> ir.Expr:
        return tirx.BufferLoad(weights, [f, block, c, row, integer(part)])

    return Spectra(read, parameter=(position, weights, packing))


def spectra_cost(conv: Convolution, transform: Transform, lanes: int) -> float:
    """Predicted time of `computed_spectra` in vector multiply-adds."""
    points = transform.points * (5 * math.log2(transform.points) + 6)
    vectors = conv.group_inputs * ceil_div(conv.group_outputs, lanes)
    return vectors * (points + 2 * lanes * conv.width.taps)


def computed_spectra(
    conv: Convolution, transform: Transform, lanes: int, row_blocks: int, rows: int, roots: ir.Var
) -> Spectra:
    """Of weights known at run time, `[f, C, 2, O]`: each lane transforms an output channel's."""
    n, taps, outputs = transform.points, conv.width.taps, conv.group_outputs
    blocks = ceil_div(row_blocks * rows, lanes)
    work, transformed = (
        tirx.decl_buffer((1, n, 2, lanes), "float32", name) for name in ("weight_work", "weight_points")
    )
    shape = (n // 2 + 1, conv.group_inputs, 2, blocks * lanes)
    spectra = tirx.decl_buffer(shape, "float32", "weight_spectra")
    zero = tirx.FloatImm("float32", 0.0)

    def task(point: Point) -> tirx.Stmt:
        c, block = point
        source, target = Plane(work, integer(0)), Plane(transformed, integer(0))

        def tap(k: ir.Expr) -> tirx.Stmt:
            def put(lane: ir.Expr) -> tirx.Stmt:
                o = clamp(block * integer(lanes) + lane, outputs, inside=outputs % lanes == 0)
                value = conv.weight_at(o, c, integer(0), k)
                return tirx.BufferStore(work, value, [integer(0), k, integer(0), lane])

            return loop(lanes, put)

        def clear(k: ir.Expr, part: int) -> tirx.Stmt:
            at = [integer(0), k, integer(part)]
            return vectorized(lanes, lambda lane: tirx.BufferStore(work, zero, [*at, lane]))

        def write(f: ir.Expr) -> tirx.Stmt:
            def part(lane: ir.Expr) -> tirx.Stmt:
                real, imaginary = target.load(transform.position(f), lane)
                scaled = real * tirx.FloatImm("float32", 1 / n), imaginary * tirx.FloatImm("float32", -1 / n)
                o = block * integer(lanes) + lane
                stores = [tirx.BufferStore(spectra, v, [f, c, integer(i), o]) for i, v in enumerate(scaled)]
                return tirx.SeqStmt(stores)

            return vectorized(lanes, part)

        filled = [
            loop(taps, tap),
            loop(n, lambda k: clear(k, 1)),
            *([loop(n - taps, lambda k: clear(integer(taps) + k, 0))] if taps < n else []),
        ]
        forward = transform.forward(source, target, roots, lambda i: tirx.Evaluate(integer(0)))
        return tirx.SeqStmt([*filled, forward, loop(n // 2 + 1, write)])

    def read(f: ir.Expr, block: ir.Expr, c: ir.Expr, row: ir.Expr, part: int) -> ir.Expr:
        return tirx.BufferLoad(spectra, [f, c, integer(part), block * integer(rows) + row])

    stage = grid((conv.group_inputs, blocks), task, parallel=True)
    return Spectra(read, (stage,), (work, transformed, spectra))
