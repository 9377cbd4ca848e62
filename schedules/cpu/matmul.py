"""Matrix products: `out[..., i, j] = epilogue(sum over k of left[..., i, k] * right[..., k, j])`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.nest import Contraction, finish, read_contraction, substitute, uses
from hybridc.schedules.cpu.tile import (
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    choose_tile,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    micro_kernel,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.registry import Packing, Request, Scheduled


@dataclass(frozen=True, slots=True)
class _Product:
    """The anchor's iterators by what they index: `left[batch, rows, k]` and `right[batch, k, column]`."""

    contraction: Contraction
    left: ir.TensorLoad
    right: ir.TensorLoad
    batch: tuple[ir.Var, ...]
    rows: tuple[ir.Var, ...]
    column: ir.Var
    k: ir.Var

    def extent(self, *iterators: ir.Var) -> int:
        return math.prod(self.contraction.anchor.extents[v] for v in iterators)


def matmul(request: Request) -> Scheduled | None:
    """Accepts a product with one reduction axis whose last output axis is a column of the right factor.

    Tiling (AVX-512: up to 8 rows x 3 vectors): B is read as panels `[N/NR, K, NR]`, one panel a task
    inner loop, so that the micro-kernel streams it; a constant B is stored that way, another is read in
    place where NR divides N and copied into panels where not. Rows of several batches that share B are
    one long side.
    """
    contraction = read_contraction(request.function)
    product = contraction and _read_product(contraction)
    if not product:
        return None
    rows, columns, depth = (
        product.extent(*product.rows),
        product.extent(product.column),
        product.extent(product.k),
    )
    tile = choose_tile(request.target.isa, rows, 1, columns)
    panels = _panels(request, product, tile, depth)
    body, sums = _tiles(product, tile, rows, columns, depth, panels.read)
    function = function_of(request.function, panels.params, [*panels.stages, body], [*panels.buffers, sums])
    return finish(function, matmul.__name__, panels.packings)


def _read_product(contraction: Contraction) -> _Product | None:
    anchor = contraction.anchor
    factors = [contraction.nest.inlined(load) for load in (contraction.left, contraction.right)]
    if (
        len(anchor.reduce) != 1
        or not anchor.spatial
        or not all(isinstance(f, ir.TensorLoad) for f in factors)
    ):
        return None
    (k,) = anchor.reduce
    column = anchor.spatial[-1]
    for left, right in (factors, factors[::-1]):
        in_left = [any(uses(i, v) for i in left.indices) for v in anchor.spatial]
        in_right = [any(uses(i, v) for i in right.indices) for v in anchor.spatial]
        direct = any(i.same_as(column) for i in right.indices[-2:]) and any(
            i.same_as(k) for i in right.indices[-2:]
        )
        if in_left[-1] or not direct or not any(uses(i, k) for i in left.indices):
            continue
        batch = tuple(
            v for v, used in zip(anchor.spatial, in_right, strict=True) if used and not v.same_as(column)
        )
        shared = tuple(v for v, used in zip(anchor.spatial, in_right, strict=True) if not used)
        return _Product(contraction, left, right, batch, shared, column, k)
    return None


def _unflatten(flat: ir.Expr, iterators: tuple[ir.Var, ...], product: _Product) -> dict[ir.Var, ir.Expr]:
    point: dict[ir.Var, ir.Expr] = {}
    for var in reversed(iterators):
        extent = product.extent(var)
        point[var] = integer(0) if extent == 1 else tirx.floormod(flat, integer(extent))
        if var is iterators[0]:
            point[var] = flat
        flat = tirx.floordiv(flat, integer(extent))
    return point


def _load(load: ir.TensorLoad, point: dict[ir.Var, ir.Expr]) -> ir.Expr:
    return tirx.BufferLoad(load.source, [substitute(i, point) for i in load.indices])


@dataclass(frozen=True, slots=True)
class _Panels:
    """Where B's panels are: `read(batch, k, panel, column in panel)`."""

    params: tuple[ir.Var, ...]
    read: Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr], ir.Expr]
    stages: tuple[tirx.Stmt, ...] = ()
    buffers: tuple[ir.Var, ...] = ()
    packings: tuple[tuple[int, Packing], ...] = ()


def _panels(request: Request, product: _Product, tile: Tile, depth: int) -> _Panels:
    params = tuple(request.function.params)
    columns, width = product.extent(product.column), tile.columns
    count = ceil_div(columns, width)
    position = product.contraction.nest.parameter(product.right.source)
    shape = [int(e) for e in product.right.source.shape]
    transposed = product.right.indices[-1].same_as(product.k)
    if position in request.constants and len(shape) == 2:
        padded = (count * width, depth) if transposed else (depth, count * width)
        split = (count, width, depth) if transposed else (depth, count, width)
        packing = Packing(padded, split, (0, 2, 1) if transposed else (1, 0, 2))
        packed = tirx.decl_buffer((count, depth, width), "float32", product.right.source.name)
        return _Panels(
            (*params[:position], packed, *params[position + 1 :]),
            lambda b, k, panel, lane: tirx.BufferLoad(packed, [panel, k, lane]),
            packings=((position, packing),),
        )

    def element(b: ir.Expr, k: ir.Expr, column: ir.Expr) -> ir.Expr:
        return _load(
            product.right, {**_unflatten(b, product.batch, product), product.k: k, product.column: column}
        )

    if columns % width == 0 and not transposed:
        return _Panels(params, lambda b, k, panel, lane: element(b, k, panel * integer(width) + lane))
    batches = product.extent(*product.batch)
    copy = tirx.decl_buffer((batches, count, depth, width), "float32", "panels")

    def pack(point: Point) -> tirx.Stmt:
        b, panel, k = point

        def one(lane: ir.Expr) -> tirx.Stmt:
            column = panel * integer(width) + lane
            value = element(b, k, clamp(column, columns, inside=columns % width == 0))
            return tirx.BufferStore(copy, value, [b, panel, k, lane])

        return loop(width, one)

    work = batches * count * depth * width
    stage = grid((batches, count, depth), pack, parallel=work >= PARALLEL_WORK)
    return _Panels(
        params, lambda b, k, panel, lane: tirx.BufferLoad(copy, [b, panel, k, lane]), (stage,), (copy,)
    )


def _tiles(
    product: _Product, tile: Tile, rows: int, columns: int, depth: int, right_at: Callable[..., ir.Expr]
) -> tuple[tirx.Stmt, ir.Var]:
    """Tasks: batch x panel x block of rows, a panel's tasks next to each other so that it stays in cache."""
    batches = product.extent(*product.batch)
    sums: list[ir.Var] = []

    def task(point: Point) -> tirx.Stmt:
        b, panel, block = point

        def at(m: ir.Expr) -> dict[ir.Var, ir.Expr]:
            row = clamp(block * integer(tile.rows) + m, rows, inside=rows % tile.rows == 0)
            return {**_unflatten(b, product.batch, product), **_unflatten(row, product.rows, product)}

        def left(k: Point, m: ir.Expr) -> ir.Expr:
            return _load(product.left, {**at(m), product.k: k[0]})

        def right(k: Point, line: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return right_at(b, k[0], panel, vector * integer(tile.lanes) + lane)

        def write(sum_at: Callable[..., ir.Expr]) -> tirx.Stmt:
            def row(m: ir.Expr) -> tirx.Stmt:
                inside = block * integer(tile.rows) + m < integer(rows)
                return when(inside, unrolled(tile.width, lambda v: line(m, v)), always=rows % tile.rows == 0)

            def line(m: ir.Expr, v: ir.Expr) -> tirx.Stmt:
                def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                    point = {**at(m), product.column: column, product.k: integer(0)}
                    return product.contraction.store(point, sum_at(m, integer(0), v, lane))

                return write_columns(panel * integer(tile.columns), columns, tile, v, element)

            return unrolled(tile.rows, row)

        body, buffer = micro_kernel(tile, (depth,), left, right, write)
        sums.append(buffer)
        return body

    tasks = (batches, ceil_div(columns, tile.columns), ceil_div(rows, tile.rows))
    return grid(tasks, task, parallel=batches * rows * columns * depth >= PARALLEL_WORK), sums[0]
