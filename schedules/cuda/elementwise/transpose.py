"""Transpositions through shared memory, with element-wise work around them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.nest import Nest, NestBlock, read_nest, substitute
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    point_of,
    sequence,
    unrolled,
    when,
)
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import address_of, moved
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

TILE = WARP
"""Rows and columns of a tile: both sides of it are accessed by whole warps."""
PITCH = TILE + 1
"""Elements from one row of a tile in shared memory to the next: a column's lie in different banks."""
WARPS = 8
"""Of a block, which has so many rows of its tile in flight at once."""
SHORTEST = 8
"""Elements along the axis that is contiguous in memory: of shorter runs a cache line brings little more."""


@schedule_rule(family="elementwise")
def transpose(request: Request) -> Scheduled | None:
    """Accepts one result made from one tensor whose contiguous axis is not the result's last, element by
    element, and from others in any order.

    Tiling: a block reads a tile of 32 x 32 along the tensor's contiguous axis, and writes it along the
    result's.
    """
    nest = attempt(transpose.__name__, lambda: read_nest(request.function))
    if nest is None or nest.reductions:
        return None
    outputs = [block for block in nest.blocks if nest.parameter(block.buffer) is not None]
    found = _read(nest, outputs[0]) if len(outputs) == 1 else None
    if found is None:
        return None
    builder = KernelBuilder(request.function)
    function = builder.function([_launch(builder, found)])
    return finish_function(function, transpose.__name__, cuda_target(request.target))


@dataclass(frozen=True, slots=True)
class _Transposition:
    """`block.buffer[axes] = value`, in which `operand` is contiguous along `axes[inner]`."""

    block: NestBlock
    value: ir.Expr
    operand: ir.TensorLoad
    inner: int


def _read(nest: Nest, block: NestBlock) -> _Transposition | None:
    value = nest.inlined(block.value)
    if len(block.spatial) != len(block.indices):
        return None
    found = [
        (load, _contiguous_axis(load, block)) for load in moved(value) if isinstance(load, ir.TensorLoad)
    ]
    turned = [(load, axis) for load, axis in found if axis is not None and axis < len(block.spatial) - 1]
    if len(turned) != 1 or block.extents[block.spatial[-1]] < SHORTEST:
        return None
    ((operand, inner),) = turned
    return _Transposition(block, value, operand, inner)


def _contiguous_axis(load: ir.TensorLoad, block: NestBlock) -> int | None:
    """The long axis along which a load goes through memory in steps of one element; None without one."""
    analyzer = sym.Analyzer()
    for var, extent in block.extents.items():
        analyzer.bind(var, ir.Range(integer(0), integer(extent)))
    address = address_of(load)
    for axis, var in enumerate(block.spatial):
        step = analyzer.simplify(substitute(address, {var: var + integer(1)}) - address)
        if isinstance(step, tirx.IntImm) and int(step) == 1 and block.extents[var] >= SHORTEST:
            return axis
    return None


def _launch(builder: KernelBuilder, found: _Transposition) -> tirx.Stmt:
    block, inner, last = found.block, found.inner, len(found.block.spatial) - 1
    extents = [block.extents[var] for var in block.spatial]
    tiles = [
        extents[axis] if axis not in (inner, last) else -(-extents[axis] // TILE) for axis in range(last + 1)
    ]
    # flat: TVM would take an unused last column off a matrix
    tile = builder.shared((TILE * PITCH,), str(found.operand.source.dtype), "tile")

    def of_thread(thread: Threads) -> tirx.Stmt:
        at = point_of(thread.block, tiles)

        def point(row: ir.Expr, column: ir.Expr) -> list[ir.Expr]:
            """Of an element of the tile, whose rows are along `last` and columns along `inner`."""
            place = list(at)
            place[last] = at[last] * integer(TILE) + row
            place[inner] = at[inner] * integer(TILE) + column
            return place

        def exists(place: list[ir.Expr]) -> ir.Expr:
            inside = [place[axis] < integer(extents[axis]) for axis in (inner, last) if extents[axis] % TILE]
            return tirx.all(*inside) if len(inside) > 1 else inside[0] if inside else tirx.const(True, "bool")

        is_whole = not any(extents[axis] % TILE for axis in (inner, last))

        def read(turn: ir.Expr) -> tirx.Stmt:
            row = turn * integer(WARPS) + thread.y
            place = point(row, thread.x)
            element = substitute(found.operand, dict(zip(block.spatial, place, strict=True)))
            return when(
                exists(place),
                tirx.BufferStore(tile, element, [row * integer(PITCH) + thread.x]),
                always=is_whole,
            )

        def write(turn: ir.Expr) -> tirx.Stmt:
            column = turn * integer(WARPS) + thread.y
            place = point(thread.x, column)
            value = _with_operand(found, tirx.BufferLoad(tile, [thread.x * integer(PITCH) + column]))
            value = substitute(value, dict(zip(block.spatial, place, strict=True)))
            return when(exists(place), tirx.BufferStore(block.buffer, value, place), always=is_whole)

        return sequence([unrolled(TILE // WARPS, read), unrolled(TILE // WARPS, write)])

    return launch(math.prod(tiles), (TILE, WARPS), of_thread)


def _with_operand(found: _Transposition, element: ir.Expr) -> ir.Expr:
    def replaced(load: ir.TensorLoad) -> ir.Expr:
        return element if tvm_ffi.structural_equal(load, found.operand) else load

    return tvm_ffi.structural_map(found.value, (ir.TensorLoad, replaced))
