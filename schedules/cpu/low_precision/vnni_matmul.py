"""What matrix products of bf16 and of 8-bit numbers share: VNNI packing of A, panels of B, and the loops.

VNNI-packed means that two bf16 or four 8-bit numbers, neighbours in k, lie in one 32-bit lane of a register:
an instruction multiplies all of a lane's numbers with those of another one and adds the products up. Where
no instruction does so with bytes, a lane holds two, extended to 16 bits (`dot_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Tile,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.matmul.matmul import OFFERED, Panels, panel_width, rank_direct_tiles, tile_loops
from hybridc.schedules.cpu.matmul.read import Product
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled, pick

PACKED_AT_ONCE = 8
"""Packed lanes that are made at once: of 16 floats, or 32 bytes, which are one load."""

PackOne = Callable[[Sequence[ir.Expr]], ir.Expr]
"""A packed lane of as many neighbouring elements of A as it holds."""
PackVector = Callable[[ir.Expr], ir.Expr]
"""`PACKED_AT_ONCE` packed lanes of a vector of elements of A."""

Place = Callable[[ir.Expr, ir.Expr], list[ir.Expr]]
"""Where the packed lane of a row and depth is."""


def schedule_vnni_product(
    request: Request, product: Product, dot: Dot, rule: str, word: PackOne, vector: PackVector
) -> Scheduled:
    """Tile a product as `matmul` does; steps take a packed lane of several depths each.

    A is packed in front of the product, in a buffer of its own: that is a pass over it, and the
    product reads each element once for every panel. A that is packed is read in its place.
    """
    tiles = rank_direct_tiles(request, product, dot.tiling_isa(request.target.isa))[:OFFERED]
    ranked = {f"{tile.rows}x{tile.width}": tile for _, tile in tiles}
    tile = pick(request, ranked)
    words = tirx.decl_buffer((product.rows, ceil_div(product.depth, dot.group_size)), "int32", "words")
    if is_vnni_packed(product, dot):
        panels, packing = _panels(
            request, product, tile, dot, lambda row, k: _packed_in_place(product, dot, row, k)
        )
        stages, buffers = packing, [*panels.buffers]
    else:
        panels, packing = _panels(
            request, product, tile, dot, lambda row, k: tirx.BufferLoad(words, [row, k])
        )
        filled = pack_vnni(product, dot, words, word, vector, lambda row, k: [row, k])
        stages, buffers = [*packing, dot.within(filled)], [*panels.buffers, words]
    body, sums = tile_loops(product, tile, panels, request)
    function = function_of(request.function, panels.params, [*stages, dot.within(body)], [*buffers, *sums])
    rows = product.row_axes if request.open_dimensions else ()
    return finish(function, rule, panels.packings, ranked, rows)


def is_vnni_packed(product: Product, dot: Dot) -> bool:
    """Whether rows of A are packed lanes: of numbers as the instructions take them, side by side."""
    narrow = str(product.left.source.dtype) == ("uint8" if dot.has_bytes else "uint16")
    return narrow and product.depth % dot.group_size == 0 and product.left.indices[-1].same_as(product.k)


def _packed_in_place(product: Product, dot: Dot, row: ir.Expr, k: ir.Expr) -> ir.Expr:
    numbers = tirx.Ramp(k * integer(dot.group_size), integer(1), dot.group_size)
    return tirx.reinterpret("int32", product.left_at(integer(0), row, numbers))


def _panels(
    request: Request,
    product: Product,
    tile: Tile,
    dot: Dot,
    left: Callable[[ir.Expr, ir.Expr], ir.Expr],
) -> tuple[Panels, list[tirx.Stmt]]:
    """With the statements that pack B in front of the product, if any."""
    position = product.contraction.nest.parameter(product.right.source)
    assert position is not None
    width = panel_width(request, tile)
    packing = panel_packing(product, width, dot)
    weight = packed_weight(request, position, packing, f"packed_{product.right.source.name}", dot.right_dtype)
    panels = Panels(
        weight.params,
        lambda b, k, panel, lane: tirx.BufferLoad(weight.buffer, [panel, k, lane]),
        buffers=weight.buffers,
        packings=weight.packings,
        left=left,
        dot=dot,
        side_by_side=tile.columns // width,
    )
    return panels, list(weight.stages)


def panel_packing(product: Product, width: int, dot: Dot) -> Packing:
    """B as `[N / width, K / count, width]` packed lanes, zero behind its last row and column."""
    steps, panels = ceil_div(product.depth, dot.group_size), ceil_div(product.columns, width)
    depth, columns = steps * dot.group_size, panels * width
    if product.right.indices[-1].same_as(product.k):
        return Packing(
            (columns, depth),
            (panels, width, steps, dot.group_size),
            (0, 2, 1, 3),
            vnni_dtype=dot.operand_dtype,
        )
    return Packing(
        (depth, columns), (steps, dot.group_size, panels, width), (2, 0, 3, 1), vnni_dtype=dot.operand_dtype
    )


def pack_vnni(
    product: Product, dot: Dot, words: ir.Var, word: PackOne, vector: PackVector, place: Place
) -> tirx.Stmt:
    """Write the packed lanes of A, `place(row, k / count)`; behind the last depth of a packed lane stand
    zeros."""
    size = PACKED_AT_ONCE * dot.group_size
    vectors = product.depth // size if product.left.indices[-1].same_as(product.k) else 0
    whole, rest = divmod(product.depth, dot.group_size)
    none, start = integer(0), vectors * PACKED_AT_ONCE

    def element(row: ir.Expr, k: ir.Expr) -> ir.Expr:
        return product.left_at(none, row, k)

    def vector_at(row: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        elements = tirx.Ramp(number * integer(size), integer(1), size)
        *outer, first = place(row, number * integer(PACKED_AT_ONCE))
        at = [*outer, tirx.Ramp(first, integer(1), PACKED_AT_ONCE)]
        return tirx.BufferStore(words, vector(element(row, elements)), at)

    def word_at(row: ir.Expr, k: ir.Expr, count: int) -> tirx.Stmt:
        found = [element(row, k * integer(dot.group_size) + integer(i)) for i in range(count)]
        zero = tirx.const(0, str(product.left.source.dtype))
        return tirx.BufferStore(words, word([*found, *[zero] * (dot.group_size - count)]), place(row, k))

    def line(point: Sequence[ir.Expr]) -> tirx.Stmt:
        (row,) = point
        parts = [loop(vectors, lambda i: vector_at(row, i))] if vectors else []
        if whole > start:
            parts.append(loop(whole - start, lambda i: word_at(row, i + integer(start), dot.group_size)))
        if rest:
            parts.append(word_at(row, integer(whole), rest))
        return sequence(parts)

    return grid((product.rows,), line, parallel=product.rows * product.depth >= PARALLEL_WORK)
