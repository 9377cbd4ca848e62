"""Matrix products: `out[..., i, j] = epilogue(sum over k of left[..., i, k] * right[..., k, j])`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    INDEX,
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.sharing import at_least_one_each, idleness
from hybridc.schedules.cpu.matmul.kernel import (
    Ahead,
    Element,
    GemmAccess,
    gemm_kernel,
    prefetch_next,
    prefetch_rows,
    rank_gemm_tiles,
)
from hybridc.schedules.cpu.matmul.panel import copy_panel
from hybridc.schedules.cpu.matmul.read import Product, is_constant_matrix, read_product
from hybridc.schedules.cpu.matmul.strassen import accepts_strassen, strassen, strassen_cost
from hybridc.schedules.packing import Packing
from hybridc.schedules.padding.rows import ROW, in_groups, named, opaque
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule
from hybridc.targets import Isa

TASKS = 32
"""Tasks that a product is cut into if its size allows: enough for few threads to share
evenly. More threads have one each."""
PACKED_ROWS = 32
"""Rows that must share a copied panel: copying costs each element about as much as two multiply-adds."""
OFFERED = 4
"""Tiles of one kind that a measured search may try."""
ROWS_SHARE = 1 / 4
"""Of the second-level cache, for rows of A that all panels read; the next rows and two panels are there."""
FEWEST_BLOCKS = 4
"""Blocks of rows over which the prefetch of a panel is spread; with fewer it is all there is to wait for."""

_Made = tuple[tirx.PrimFunc, tuple[tuple[int, Packing], ...]]
_Scheme = Callable[[Request, Product, Tile], _Made]


@dataclass(frozen=True, slots=True)
class Panels:
    """Where B's panels are: `read(batch, k, panel, column in panel)`.

    A panel is as wide as a tile, or several `side_by_side` are.
    """

    params: tuple[ir.Var, ...]
    read: Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr], ir.Expr]
    copy: Callable[[ir.Expr, ir.Expr], tirx.Stmt] | None = None
    """Fills a task's own panel, given batch and panel."""
    buffers: tuple[ir.Var, ...] = ()
    packings: tuple[tuple[int, Packing], ...] = ()
    left: Callable[[ir.Expr, ir.Expr], ir.Expr] | None = None
    """A's element at row and k, if a copy of it is read."""
    dot: Dot | None = None
    """If A and the panels hold VNNI-packed pairs or quads, which make `depth` shorter."""
    side_by_side: int = 1
    """Panels of one tile."""


@schedule_rule(family="matmul")
def matmul(request: Request) -> Scheduled | None:
    """Accepts a product with one reduction axis whose last output axis is a column of the right factor.

    Tiling (AVX-512: up to 8 rows x 3 vectors): B is read as panels `[N/NR, K, NR]`, so that the
    micro-kernel streams it. A constant B is stored that way, and a task is one tile. Another is read in
    place where few rows share it, else each task copies a panel (transposing on the way) that stays in its
    cache for all its rows. Rows of several batches that share B are one long side. Large products with a
    constant B may go through Strassen's algorithm (`strassen.py`). A constant B that products of other sizes
    read, too, is stored in panels of one vector, of which a tile reads several.
    """
    product = read_product(request.function)
    if product is None or product.multiply_adds == 0:
        return None
    candidates = _ranked(request, product)
    scheme, tile = pick(request, candidates)
    function, packings = scheme(request, product, tile)
    rows = product.row_axes if request.open_dimensions else ()
    return finish(function, matmul.__name__, packings, candidates, rows)


def _ranked(request: Request, product: Product) -> dict[str, tuple[_Scheme, Tile]]:
    """The tiles, and Strassen's algorithm where it is allowed, by predicted time."""
    isa, rows, columns, depth = request.target.isa, product.rows, product.columns, product.depth
    found = [
        (steps * depth, f"{tile.rows}x{tile.width}", direct, tile)
        for steps, tile in rank_direct_tiles(request, product, isa)[:OFFERED]
    ]
    halved = [
        (strassen_cost(product, steps), f"strassen {tile.rows}x{tile.width}", _by_strassen, tile)
        for steps, tile in rank_gemm_tiles(isa, rows, columns, halves=2)
        if accepts_strassen(request, product, tile)
    ]
    found += halved[:OFFERED]
    # direct and Strassen's tiles compete by predicted time
    found.sort(key=lambda candidate: candidate[0])
    return {label: (scheme, tile) for _, label, scheme, tile in found}


def rank_direct_tiles(request: Request, product: Product, isa: Isa) -> list[tuple[float, Tile]]:
    """Tiles for all multiply-adds, with their predicted time for each step of the reduction, the least first.

    A product of fewer tiles than threads leaves some threads idle.
    """

    def idle(tile: Tile) -> float:
        tiles = product.batches * ceil_div(product.rows, tile.rows) * ceil_div(product.columns, tile.columns)
        return idleness(tiles, request.threads)

    ranked = rank_gemm_tiles(isa, product.rows, product.columns)
    return sorted(((steps * idle(tile), tile) for steps, tile in ranked), key=lambda pair: pair[0])


def direct(request: Request, product: Product, tile: Tile) -> _Made:
    """The ordinary product: one multiply-add for each element of the iteration space, with B in panels."""
    panels = _panels(request, product, tile)
    body, sums = tile_loops(product, tile, panels, request)
    buffers = [*panels.buffers, *sums]
    return function_of(request.function, panels.params, [body], buffers), panels.packings


def _by_strassen(request: Request, product: Product, tile: Tile) -> _Made:
    function, packing = strassen(request, product, tile)
    return function, (packing,)


def _panels(request: Request, product: Product, tile: Tile) -> Panels:
    params = tuple(request.function.params)
    if is_constant_matrix(request, product):
        return _packed_when_compiling(request, product, tile)
    # read in place where rows are too few to pay for a copy
    contiguous = product.right.indices[-1].same_as(product.column)
    if contiguous and product.columns % tile.columns == 0 and product.rows < PACKED_ROWS:
        return Panels(
            params,
            lambda b, k, panel, lane: product.right_at(b, k, panel * integer(tile.columns) + lane),
        )
    return _copied(request, product, tile)


def _packed_when_compiling(request: Request, product: Product, tile: Tile) -> Panels:
    params = tuple(request.function.params)
    position = product.contraction.nest.parameter(product.right.source)
    assert position is not None
    width = panel_width(request, tile)
    depth, count = product.depth, ceil_div(product.columns, width)
    # stored by columns, as fully connected layers have their weights
    transposed = product.right.indices[-1].same_as(product.k)
    # columns are padded to whole panels with zeros, whose products nobody reads
    padded = (count * width, depth) if transposed else (depth, count * width)
    split = (count, width, depth) if transposed else (depth, count, width)
    packing = Packing(padded, split, (0, 2, 1) if transposed else (1, 0, 2))
    packed = tirx.decl_buffer((count, depth, width), "float32", product.right.source.name)
    return Panels(
        (*params[:position], packed, *params[position + 1 :]),
        lambda b, k, panel, lane: tirx.BufferLoad(packed, [panel, k, lane]),
        packings=((position, packing),),
        side_by_side=tile.columns // width,
    )


def panel_width(request: Request, tile: Tile) -> int:
    """Columns of a panel of a constant B: those of a tile, which then reads one stream, or of one vector.

    Which tile is best depends on the rows. Several streams, one a vector, are what convolutions read anyway
    (Georganas et al., SC 2018), and no more than the prefetchers of a core follow.
    """
    return tile.lanes if request.many_sizes else tile.columns


def _copied(request: Request, product: Product, tile: Tile) -> Panels:
    copy = tirx.decl_buffer((product.depth, tile.columns), "float32", "panel")
    return Panels(
        tuple(request.function.params),
        lambda b, k, panel, lane: tirx.BufferLoad(copy, [k, lane]),
        lambda b, panel: copy_panel(product, tile, copy, b, panel),
        (copy,),
    )


def tile_loops(
    product: Product, tile: Tile, panels: Panels, request: Request
) -> tuple[tirx.Stmt, list[ir.Var]]:
    """The parallel loop over tasks, and the buffers of its sums."""
    body, sums = (_tile_tasks if panels.copy is None else _panel_tasks)(product, tile, panels, request)
    if not isinstance(body, tirx.For):  # what belongs to no loop would be allocated outside the function
        body = tirx.For(tirx.Var("i", INDEX), integer(0), integer(1), tirx.ForKind.SERIAL, body)
    return body, sums


@dataclass(frozen=True, slots=True)
class _Place:
    """Of a tile: batch, panel, block of rows, and how many blocks go through a panel one after the other."""

    b: ir.Expr
    panel: ir.Expr
    block: ir.Expr
    together: int

    @property
    def in_group(self) -> ir.Expr:
        """Which of the blocks that go through the panel."""
        return tirx.floormod(self.block, integer(self.together))


def _tile_tasks(
    product: Product, tile: Tile, panels: Panels, request: Request
) -> tuple[tirx.Stmt, list[ir.Var]]:
    """A tile is a task, which balances best: batch x group of blocks of rows x panel x block.

    A panel's tasks of a group are next to each other, so that the panel stays in cache.
    """
    blocks, count = ceil_div(product.rows, tile.rows), ceil_div(product.columns, tile.columns)
    together = _blocks_together(product, tile, panels, request)
    sums: list[ir.Var] = []

    def task(point: Point) -> tirx.Stmt:
        b, group, panel, i = point
        block = group * integer(together) + i
        place = _Place(b, panel, block, together)
        body, buffers = _tile(product, tile, panels, place, has_names=request.open_dimensions)
        sums.extend(buffers)
        return when(block < integer(blocks), body, always=blocks % together == 0)

    tasks = (product.batches, ceil_div(blocks, together), count, together)
    loops = grid(tasks, task, parallel=product.multiply_adds >= PARALLEL_WORK)
    if request.open_dimensions and product.batches == 1 and together < blocks:
        loops = in_groups(loops, steps=count * together, rows=together * tile.rows)
    return loops, sums


def _blocks_together(product: Product, tile: Tile, panels: Panels, request: Request) -> int:
    """Blocks of rows that all panels read before the next ones.

    Those that fit into the second-level cache, so that each row of A comes from behind it once, and B once
    for each group; or all of them, with which it is the other way round, if fewer bytes come then.
    """
    blocks, count = ceil_div(product.rows, tile.rows), ceil_div(product.columns, tile.columns)
    block_bytes = 4 * tile.rows * _steps(product, panels)
    fitting = max(int(request.target.isa.l2_bytes * ROWS_SHARE) // block_bytes, 1)
    groups = ceil_div(blocks, fitting)
    left, right = block_bytes * blocks, 4 * _steps(product, panels) * product.columns
    return ceil_div(blocks, groups) if left + groups * right < count * left + right else blocks


def _steps(product: Product, panels: Panels) -> int:
    """Of the reduction, each of which takes a number, or a pair or quad of them in 32 bits."""
    return ceil_div(product.depth, panels.dot.group_size) if panels.dot else product.depth


def _panel_tasks(
    product: Product, tile: Tile, panels: Panels, request: Request
) -> tuple[tirx.Stmt, list[ir.Var]]:
    """A task copies a panel and uses it for many rows: batch x panel x rows."""
    blocks, count = ceil_div(product.rows, tile.rows), ceil_div(product.columns, tile.columns)
    per_task = _blocks_per_task(product, tile, request.threads)
    sums: list[ir.Var] = []
    assert panels.copy is not None
    copy = panels.copy

    def task(point: Point) -> tirx.Stmt:
        b, panel, group = point

        def block(i: ir.Expr) -> tirx.Stmt:
            place = _Place(b, panel, group * integer(per_task) + i, blocks)
            body, buffers = _tile(product, tile, panels, place, has_names=request.open_dimensions)
            sums.extend(buffers)
            return body

        # the last group may be short
        left = tirx.min(integer(blocks) - group * integer(per_task), integer(per_task))
        extent = per_task if blocks % per_task == 0 else left
        return tirx.SeqStmt([copy(b, panel), loop(extent, block)])

    tasks = (product.batches, count, ceil_div(blocks, per_task))
    return grid(tasks, task, parallel=product.multiply_adds >= PARALLEL_WORK), sums


def _blocks_per_task(product: Product, tile: Tile, threads: int) -> int:
    """Blocks of rows that share a copied panel: all, unless that leaves too few tasks."""
    blocks = ceil_div(product.rows, tile.rows)
    # groups of rows for each panel, so that there are enough tasks
    tasks = at_least_one_each(TASKS, threads)
    groups = ceil_div(tasks, product.batches * ceil_div(product.columns, tile.columns))
    return max(ceil_div(blocks, groups), min(blocks, ceil_div(PACKED_ROWS, tile.rows)))


def _tile(
    product: Product, tile: Tile, panels: Panels, place: _Place, *, has_names: bool
) -> tuple[tirx.Stmt, list[ir.Var]]:
    """With `has_names` numbers of rows are variables (`padding/rows.py`)."""
    rows, columns = product.rows, product.columns
    b, panel, block = place.b, place.panel, place.block
    whole = rows % tile.rows == 0 and not has_names
    numbers = [block * integer(tile.rows) + integer(m) for m in range(tile.rows)]
    names = [named(number, ROW) for number in numbers]
    # named, as to simplify indices with a choice in them takes TVM much longer; and no minimum, which LLVM
    # computes anew in each step of the inner loop, so that sums have no registers
    places = [named(tirx.Select(name < integer(rows), name, integer(0)), "place") for name, _ in names]

    def row(m: int) -> ir.Expr:
        return names[m][0] if has_names else numbers[m]

    def at(m: int) -> ir.Expr:
        return places[m][0] if has_names else clamp(row(m), rows, inside=whole)

    def left(k: ir.Expr, m: int) -> ir.Expr:
        return product.left_at(b, at(m), k) if panels.left is None else panels.left(at(m), k)

    # of the last tile, panels that do not exist
    several = panels.side_by_side
    existing = ceil_div(columns, tile.columns // several)

    def right(k: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        if several == 1:
            return panels.read(b, k, panel, vector * integer(tile.lanes) + lane)
        number = clamp(panel * integer(several) + vector, existing, inside=existing % several == 0)
        return panels.read(b, k, number, lane)

    def write(sum_at: Element) -> tirx.Stmt:
        def vector(m: int, v: ir.Expr) -> tirx.Stmt:
            def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                return product.store(b, row(m) if has_names else at(m), column, sum_at(m, v, lane))

            return write_columns(panel * integer(tile.columns), columns, tile, v, element)

        def each(m: int) -> tirx.Stmt:
            vectors = unrolled(tile.width, lambda v: vector(m, v))
            is_there = row(m) < integer(rows)
            return when(opaque(is_there) if has_names else is_there, vectors, always=whole)

        return sequence([each(m) for m in range(tile.rows)])

    def element(at: ir.Expr) -> ir.Expr:
        return panels.read(b, integer(0), panel * integer(several), at)

    access, depth = GemmAccess(left, right, write), _steps(product, panels)
    ahead: list[Ahead] = []
    if panels.packings and place.together >= FEWEST_BLOCKS:
        ahead.append(prefetch_next(element, depth * tile.columns, place.in_group, place.together))
    if panels.left is None and panels.copy is None:
        ahead += _next_rows(product, tile, place)
    body, sums = gemm_kernel(tile, depth, access, ahead, dot=panels.dot)
    return sequence([*(naming for _, naming in (*names, *places)), body]) if has_names else body, sums


def _next_rows(product: Product, tile: Tile, place: _Place) -> list[Ahead]:
    """This tile's share of the rows of A that the next group reads."""
    rows = place.together * tile.rows
    # only a row that lies in one piece has lines
    if rows >= product.rows or not product.left.indices[-1].same_as(product.k):
        return []
    first = (place.block - place.in_group) * integer(tile.rows) + integer(rows)
    parts = ceil_div(product.columns, tile.columns) * place.together
    part = place.panel * integer(place.together) + place.in_group
    return [
        prefetch_rows(lambda m, k: product.left_at(place.b, first + m, k), (rows, product.depth), part, parts)
    ]
