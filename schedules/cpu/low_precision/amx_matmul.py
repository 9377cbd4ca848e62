"""Matrix products with AMX tiles, of bf16 or 8-bit numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.packed_weight import packed_weight
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.low_precision.amx import (
    ROW_BYTES,
    SIDE,
    Address,
    Passes,
    TileUnit,
    tile_kernel,
    tile_shape,
    tile_unit,
    with_tiles,
)
from hybridc.schedules.cpu.low_precision.vnni_matmul import PackOne, PackVector, is_vnni_packed, pack_vnni
from hybridc.schedules.cpu.matmul.matmul import TASKS
from hybridc.schedules.cpu.matmul.read import Product
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled
from hybridc.targets import Isa

FEWEST_ROWS = 8
"""With fewer rows tiles would do more than twice the work, and vectors are as fast as memory."""


Left = Callable[[ir.Expr, ir.Expr], Address]
"""The tile of A at a depth, counted in tiles, and a row."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """`shape` tiles of a micro-kernel; how many micro-kernels and tiles of depth the product has."""

    shape: tuple[int, int]
    row_groups: int
    panels: int
    depth: int
    threads: int

    @property
    def columns(self) -> int:
        """Of a panel."""
        return self.shape[1] * SIDE

    @property
    def groups_per_task(self) -> int:
        """Groups of rows that share a panel in its core's cache: all, unless that leaves too few tasks."""
        return ceil_div(self.row_groups, ceil_div(at_least_one_each(TASKS, self.threads), self.panels))


def accepts_tile_product(product: Product, isa: Isa) -> bool:
    """Whether the processor has tiles, and enough rows to fill them."""
    return isa.has_tiles and product.rows >= FEWEST_ROWS


def schedule_tile_product(
    request: Request, product: Product, dot: Dot, rule: str, word: PackOne, vector: PackVector
) -> Scheduled:
    """Emit a product. Unless A is packed it is packed in front, `[depth, rows, 16 lanes]`."""
    layout = _layout(product, dot, request.threads)
    position = product.contraction.nest.parameter(product.right.source)
    assert position is not None
    packing = tile_panels(product, dot, layout.shape[1])
    panels = packed_weight(request, position, packing, "panels")
    rows = layout.row_groups * layout.shape[0] * SIDE
    if _lies_as_tiles(product, dot, rows):
        stages, buffers, left = [*panels.stages], [*panels.buffers], _tile_in_place(product, dot)
    else:
        words = tirx.decl_buffer((layout.depth, rows, SIDE), "int32", "words")
        filled = dot.within(_filled(product, dot, words, word, vector))
        stages, buffers = [*panels.stages, filled], [*panels.buffers, words]
        left = _tile_of(words)
    stages.append(with_tiles(dot, _tasks(product, layout, tile_unit(dot), left, panels.buffer)))
    function = function_of(request.function, panels.params, stages, buffers)
    return finish(function, rule, panels.packings)


def _lies_as_tiles(product: Product, dot: Dot, rows: int) -> bool:
    """Whether whole tiles of A, `rows` in all, are rows of packed lanes at one distance from each other."""
    if not is_vnni_packed(product, dot) or product.depth % (SIDE * dot.group_size) or product.rows != rows:
        return False
    source = product.left.source
    axes = zip(product.left.indices[:-1], source.shape[:-1], strict=True)
    counted = [(index, int(extent)) for index, extent in axes if int(extent) > 1]
    iterators = [v for v in product.row if product.extent(v) > 1]
    return len(counted) == len(iterators) and all(
        index.same_as(v) and extent == product.extent(v)
        for (index, extent), v in zip(counted, iterators, strict=True)
    )


def _tile_in_place(product: Product, dot: Dot) -> Left:
    """Of A itself."""
    pitch = integer(ROW_BYTES // SIDE * product.depth // dot.group_size)

    def tile(depth: ir.Expr, row: ir.Expr) -> Address:
        return product.left_at(integer(0), row, depth * integer(SIDE * dot.group_size)), pitch

    return tile


def _tile_of(words: ir.Var) -> Left:
    return lambda depth, row: (tirx.BufferLoad(words, [depth, row, integer(0)]), integer(ROW_BYTES))


def _layout(product: Product, dot: Dot, threads: int) -> _Layout:
    vectors, tiles = ceil_div(product.columns, SIDE), ceil_div(product.rows, SIDE)
    rows, columns = tile_shape(vectors)
    rows = min(rows, tiles)
    depth = ceil_div(product.depth, SIDE * dot.group_size)
    return _Layout((rows, columns), ceil_div(tiles, rows), ceil_div(vectors, columns), depth, threads)


def tile_panels(product: Product, dot: Dot, vectors: int) -> Packing:
    """B as `[N / 16 / vectors, depth, vectors, 16 lanes, 16]`, zero behind its last row and column."""
    width, size = vectors * SIDE, SIDE * dot.group_size
    panels, depth = ceil_div(product.columns, width), ceil_div(product.depth, size)
    padded, split = (depth * size, panels * width), (depth, SIDE, dot.group_size, panels, vectors, SIDE)
    if product.right.indices[-1].same_as(product.k):
        transposed = (*split[3:], *split[:3])
        return Packing(padded[::-1], transposed, (0, 3, 1, 4, 2, 5), vnni_dtype=dot.operand_dtype)
    return Packing(padded, split, (3, 0, 4, 1, 5, 2), vnni_dtype=dot.operand_dtype)


def _filled(product: Product, dot: Dot, words: ir.Var, word: PackOne, vector: PackVector) -> tirx.Stmt:
    """Write the packed lanes, and zeros behind the last depth: weights are zero there, but times NaN that is
    NaN."""

    def place(row: ir.Expr, k: ir.Expr) -> list[ir.Expr]:
        return [tirx.floordiv(k, integer(SIDE)), row, tirx.floormod(k, integer(SIDE))]

    fill = pack_vnni(product, dot, words, word, vector, place)
    written, depth = ceil_div(product.depth, dot.group_size), int(words.shape[0])
    rest = depth * SIDE - written
    if rest == 0:
        return fill

    def zero(row: ir.Expr) -> tirx.Stmt:
        at = [integer(depth - 1), row, tirx.Ramp(integer(SIDE - rest), integer(1), rest)]
        nothing = tirx.Broadcast(tirx.const(0, "int32"), rest) if rest > 1 else tirx.const(0, "int32")
        return tirx.BufferStore(words, nothing, at if rest > 1 else [*at[:2], integer(SIDE - 1)])

    return tirx.SeqStmt([loop(product.rows, zero), fill])


def _tasks(product: Product, layout: _Layout, unit: TileUnit, left: Left, panels: ir.Var) -> tirx.Stmt:
    """A panel and some groups of rows each; tasks of a panel side by side."""
    each = layout.groups_per_task

    def task(point: Point) -> tirx.Stmt:
        panel, number = point
        first = number * integer(each)
        whole = layout.row_groups % each == 0
        extent = each if whole else tirx.min(integer(each), integer(layout.row_groups) - first)
        one = _Panel(product, layout, left, panels, panel)
        return unit.within(loop(extent, lambda i: one.kernel(unit, first + i, i)))

    tasks = (layout.panels, ceil_div(layout.row_groups, each))
    body = grid(tasks, task, parallel=product.multiply_adds >= PARALLEL_WORK)
    if isinstance(body, tirx.For):
        return body
    return tirx.For(tirx.Var("i", "int64"), integer(0), integer(1), tirx.ForKind.SERIAL, body)


@dataclass(frozen=True, slots=True)
class _Panel:
    product: Product
    layout: _Layout
    left: Left
    panels: ir.Var
    panel: ir.Expr

    def kernel(self, unit: TileUnit, group: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        """All depths of a group of tiles of rows, the task's group of this number."""
        rows, columns = self.layout.shape
        first = group * integer(rows * SIDE)

        def left(k: Point, i: int) -> Address:
            return self.left(k[0], first + integer(i * SIDE))

        def right(k: Point, j: int) -> Address:
            at = [self.panel, k[0], integer(j), integer(0), integer(0)]
            return tirx.BufferLoad(self.panels, at), integer(ROW_BYTES)

        def write(i: int, j: int, m: ir.Expr, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
            return self._row(first + integer(i * SIDE) + m, j, sum_at)

        count, panel_bytes = self.layout.groups_per_task, self.layout.depth * columns * SIDE * ROW_BYTES
        passes = Passes(number, count, panel_bytes) if count > 1 else None
        return tile_kernel(unit, self.layout.shape, (self.layout.depth,), left, right, write, passes)

    def _row(self, row: ir.Expr, j: int, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        """Store a row of sums of a tile if it exists, and those of its columns that do."""
        product, columns = self.product, self.layout.columns

        def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return product.store(integer(0), row, column, sum_at(lane))

        tile = Tile(SIDE, 1, self.layout.shape[1], SIDE)
        stored = write_columns(self.panel * integer(columns), product.columns, tile, integer(j), element)
        return when(
            row < integer(product.rows), stored, always=product.rows % (self.layout.shape[0] * SIDE) == 0
        )
