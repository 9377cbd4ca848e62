"""Convolutions of blocked activations with AMX tiles, of bf16 or 8-bit numbers.

A task copies the rows of input that it needs as packed lanes, `[channels / 16 lanes, rows, columns, 16
lanes]`: 16 pixels side by side are then one tile in memory. Of kernels with taps the copy's columns stand for
pixels too, so that a tile may run on from one line into the next; what is computed for the columns between
them is not stored. Where that would waste more, as with strides, each line has tiles of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.plan import BlockedConvPlan, divisors, source_of
from hybridc.schedules.cpu.conv2d_blocked.read import BlockedConvolution
from hybridc.schedules.cpu.conv2d_blocked.task import Buffers, Pass, Pixel, Place, copy_rows
from hybridc.schedules.cpu.core.dot_products import Dot
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.packed_weight import packed_weight
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
from hybridc.schedules.cpu.low_precision.vnni_matmul import PackOne, PackVector
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled, pick
from hybridc.targets import Isa

# of a 2.7 GHz server processor (Emerald Rapids) at about 3.6 GHz
STEP_CYCLES = 20
"""A product of two tiles, loaded from the second-level cache."""
LINE_CYCLES = 8
"""Reading a cache line of 64 bytes from the last-level cache, however far ahead: a core gets 30 GB/s."""
COPY_CYCLES = 3
"""Copying a row of a tile within the second-level cache."""
STORE_CYCLES = 5
"""Writing a row of sums through an epilogue."""
TASK_CYCLES = 700
"""Beginning a task; 190 of them are for the configuration of its tiles."""


@dataclass(frozen=True, slots=True)
class Pack:
    """How numbers become packed lanes."""

    word: PackOne
    vector: PackVector
    filler: int
    """The packed lane that stands for padding."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the pixels of a task, `lines` of `pitch` each, are counted through; `width` of each line exist."""

    lines: int
    pitch: int
    width: int

    @property
    def tiles(self) -> int:
        """Of 16 pixels, for all pixels of a task; the last one may stick out."""
        return ceil_div((self.lines - 1) * self.pitch + self.width, SIDE)


def schedule_tiles(request: Request, conv: BlockedConvolution, rule: str, pack: Pack) -> Scheduled:
    """Emit a convolution whose `conv.dot` tells which numbers it multiplies."""
    assert conv.dot is not None
    ranked = rank_tile_plans(conv, request.target.isa, request.threads)
    plan = pick(request, ranked)
    packing = tile_packing(conv, plan, conv.dot)
    weight = packed_weight(request, conv.weight, packing, "packed_weight")
    copy = tirx.decl_buffer(_copy_shape(conv, plan), "int32", "rows")
    buffers = Buffers(conv, plan, source_of(conv), weight.buffer, copy, None)
    body = with_tiles(conv.dot, _tasks(buffers, pack), _row_words(conv))
    function = function_of(request.function, weight.params, [*weight.stages, body], weight.buffers)
    return finish(function, rule, weight.packings, ranked)


def accepts_tiles(conv: BlockedConvolution, isa: Isa) -> bool:
    """Whether there are tiles, blocks of sums that fill their rows, and data of blocks or of few channels."""
    tiles = isa.has_tiles
    narrow = conv.plain and conv.input_lanes <= SIDE
    return tiles and (narrow or not conv.plain) and conv.output_lanes == SIDE


def _numbers(conv: BlockedConvolution) -> int:
    """Of a block of the data."""
    return int(conv.data.shape[-1])


def _blocks_per_row(conv: BlockedConvolution) -> int:
    """Blocks of the data that fill a row of a tile."""
    assert conv.dot is not None
    return SIDE * conv.dot.group_size // _numbers(conv)


def _depth(conv: BlockedConvolution) -> int:
    """Tiles of packed lanes of a pixel."""
    return 1 if conv.plain else ceil_div(conv.input_blocks, _blocks_per_row(conv))


def _pixel_words(conv: BlockedConvolution) -> int:
    """Packed lanes of a pixel of the copy at one depth."""
    return conv.input_lanes if conv.plain else SIDE


def _row_taps(conv: BlockedConvolution) -> int:
    """Taps side by side that a row of a tile holds: of few channels as many as fit and divide all."""
    if not conv.plain or conv.width.dilation > 1:
        return 1
    return max(t for t in divisors(conv.width.taps) if t * conv.input_lanes <= SIDE)


def _row_words(conv: BlockedConvolution) -> int:
    """Packed lanes in a row of a tile."""
    return _pixel_words(conv) * _row_taps(conv)


def _extents(conv: BlockedConvolution) -> tuple[int, int, int]:
    """Of the loops over products: depth, taps, and groups of taps side by side."""
    return _depth(conv), conv.height.taps, conv.width.taps // _row_taps(conv)


def tile_packing(conv: BlockedConvolution, plan: BlockedConvPlan, dot: Dot) -> Packing:
    """`[OB / vectors, depth, KH, KW / t, vectors, t, lanes, 16]` of weights `[OB, IB, KH, KW, i, o]`, with
    `t` taps in a row of a tile; of plain data's `[OB, KH, KW, C, o]`."""
    if conv.plain:
        return _narrow_packing(conv, plan, dot)
    taps, each, numbers = (conv.height.taps, conv.width.taps), _blocks_per_row(conv), _numbers(conv)
    padded = (conv.output_blocks, _depth(conv) * each, *taps, numbers, SIDE)
    groups = conv.output_blocks // plan.vectors
    split = (groups, plan.vectors, _depth(conv), each, *taps, numbers // dot.group_size, dot.group_size, SIDE)
    return Packing(padded, split, (0, 2, 4, 5, 1, 3, 6, 8, 7), vnni_dtype=dot.operand_dtype)


def _narrow_packing(conv: BlockedConvolution, plan: BlockedConvPlan, dot: Dot) -> Packing:
    words, groups = conv.input_lanes, conv.output_blocks // plan.vectors
    taps = (conv.height.taps, conv.width.taps // _row_taps(conv), _row_taps(conv))
    padded = (conv.output_blocks, conv.height.taps, conv.width.taps, words * dot.group_size, SIDE)
    split = (groups, plan.vectors, 1, *taps, words, dot.group_size, SIDE)
    return Packing(padded, split, (0, 2, 3, 4, 1, 5, 6, 8, 7), vnni_dtype=dot.operand_dtype)


# --------------------------------------------------------------------------------------------------- plans


def rank_tile_plans(conv: BlockedConvolution, isa: Isa, threads: int) -> dict[str, BlockedConvPlan]:
    """Divisions into tasks, by predicted time."""
    ranked = sorted(_plans(conv), key=lambda plan: predicted_tile_cycles(conv, plan, isa, threads))
    return {f"{plan.parts} parts of {plan.groups} groups": plan for plan in ranked[:4]}


def _plans(conv: BlockedConvolution) -> Iterator[BlockedConvPlan]:
    vectors = tile_shape(conv.output_blocks)[1]
    flat, width = source_of(conv).flat, conv.width.outputs
    for lines in divisors(conv.height.outputs):
        size = (1, lines * width) if flat else (lines, width)
        for groups in divisors(conv.output_blocks // vectors):
            parts = conv.height.outputs // lines
            yield BlockedConvPlan(parts, *size, 1, SIDE, vectors, SIDE, groups, conv.input_blocks)


def predicted_tile_cycles(conv: BlockedConvolution, plan: BlockedConvPlan, isa: Isa, threads: int) -> float:
    """Cycles of all threads together, idle ones counted, for comparing plans.

    Of a thread that has as many tasks as any: it takes input of each part and weights of each group once from
    the last-level cache, unless the second level cannot keep them.
    """
    geometry = geometry_of(conv, plan)
    steps = math.prod(_extents(conv))
    pixel_tiles = tile_shape(conv.output_blocks)[0]
    tiles = ceil_div(geometry.tiles, pixel_tiles) * pixel_tiles
    products = plan.groups * plan.vectors * tiles * (steps * STEP_CYCLES + SIDE * STORE_CYCLES)
    # few channels are packed one by one
    rows = (conv.input_lanes if conv.plain else _depth(conv)) * _copied_pixels(conv, plan)
    weight_rows = steps * SIDE * plan.groups * plan.vectors
    group_tasks = conv.output_blocks // (plan.vectors * plan.groups)
    tasks = ceil_div(plan.parts * conv.batches * group_tasks, threads)
    parts, groups = ceil_div(tasks, group_tasks), min(tasks, group_tasks)
    level2 = isa.l2_bytes // ROW_BYTES
    if rows > level2 // 2:
        products += (plan.groups - 1) * rows * LINE_CYCLES
    lines_per_row = _line_bytes(conv) / ROW_BYTES
    weights = groups * weight_rows * (1 if groups * weight_rows + rows <= level2 else parts)
    cold = LINE_CYCLES * (parts * rows * lines_per_row + weights)
    return threads * (cold + tasks * (products + COPY_CYCLES * rows + TASK_CYCLES))


def _line_bytes(conv: BlockedConvolution) -> int:
    """Of the data that fill a row of the copy."""
    numbers = 2 if conv.plain else _blocks_per_row(conv) * _numbers(conv)
    return numbers * np.dtype(str(conv.data.dtype)).itemsize


def _copied_extents(conv: BlockedConvolution, plan: BlockedConvPlan) -> tuple[int, int]:
    """Rows and columns of the copy."""
    if source_of(conv).flat:
        return plan.columns // conv.width.outputs, conv.width.outputs
    rows, columns = (
        (extent - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1
        for extent, axis in ((plan.lines, conv.height), (plan.columns, conv.width))
    )
    return rows, columns


def _copied_pixels(conv: BlockedConvolution, plan: BlockedConvPlan) -> int:
    rows, columns = _copied_extents(conv, plan)
    return rows * columns


def geometry_of(conv: BlockedConvolution, plan: BlockedConvPlan) -> Geometry:
    """One long line if flat; else lines joined or, if that is fewer tiles, each by itself."""
    if source_of(conv).flat:
        return Geometry(1, plan.columns, plan.columns)
    _, columns = _copied_extents(conv, plan)
    apart = Geometry(plan.lines, ceil_div(plan.columns, SIDE) * SIDE, plan.columns)
    pitch, rest = divmod(columns * conv.height.stride, conv.width.stride)
    joined = Geometry(plan.lines, pitch, plan.columns)
    return apart if rest or apart.tiles <= joined.tiles else joined


def _copy_shape(conv: BlockedConvolution, plan: BlockedConvPlan) -> tuple[int, ...]:
    """With room behind the last pixel for what the last tile reads too much."""
    rows, columns = _copied_extents(conv, plan)
    geometry = geometry_of(conv, plan)
    shape = tile_shape(conv.output_blocks)[0]
    stride = 1 if source_of(conv).flat else conv.width.stride
    last = _first_word(conv, plan, geometry, (ceil_div(geometry.tiles, shape) * shape - 1) * SIDE)
    reach = (conv.height.taps - 1) * conv.height.dilation * columns + (
        conv.width.taps - 1
    ) * conv.width.dilation
    beyond = last + reach + (SIDE - 1) * stride + 1 - rows * columns
    return (_depth(conv) + max(ceil_div(beyond, rows * columns), 0), rows, columns, _pixel_words(conv))


def _first_word(conv: BlockedConvolution, plan: BlockedConvPlan, geometry: Geometry, number: int) -> int:
    """Where in the copy, counted in pixels, that is which a pixel of the task reads first."""
    _, columns = _copied_extents(conv, plan)
    y, x = divmod(number, geometry.pitch)
    return number if source_of(conv).flat else y * conv.height.stride * columns + x * conv.width.stride


# ---------------------------------------------------------------------------------------------------- loops


def _tasks(buffers: Buffers, pack: Pack) -> tirx.Stmt:
    conv, plan = buffers.conv, buffers.plan
    group_tasks = conv.output_blocks // (plan.vectors * plan.groups)

    def task(point: Point) -> tirx.Stmt:
        n, part, number = point
        one = Pass(buffers, n, part, integer(0), number * integer(plan.groups))
        assert buffers.copy is not None
        pixel = (_narrow_pixel if conv.plain else _packed_pixel)(one, buffers.copy, pack)
        fill = copy_rows(one, buffers.copy, pixel, _depth(conv))
        return tirx.SeqStmt([tirx.AllocBuffer(buffers.copy), fill, _products(one)])

    return grid((conv.batches, plan.parts, group_tasks), task, parallel=conv.multiply_adds >= PARALLEL_WORK)


def _narrow_pixel(task: Pass, copy: ir.Var, pack: Pack) -> Pixel:
    """Writes the packed lanes of a pixel of plain data, a filler behind its last channel."""
    conv = task.buffers.conv
    assert conv.dot is not None
    size, channels = conv.dot.group_size, int(conv.data.shape[1])

    def pixel(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        def number(channel: int) -> ir.Expr:
            if place is None or channel >= channels:
                return tirx.const(0, str(conv.data.dtype))
            return tirx.BufferLoad(conv.data, [task.n, integer(channel), *place])

        def word(i: int) -> tirx.Stmt:
            value = pack.word([number(i * size + j) for j in range(size)])
            if place is None:
                value = tirx.const(pack.filler, "int32")
            return tirx.BufferStore(copy, value, [block, row, column, integer(i)])

        return sequence([word(i) for i in range(conv.input_lanes)])

    return pixel


def _packed_pixel(task: Pass, copy: ir.Var, pack: Pack) -> Pixel:
    """Writes the 16 packed lanes of a pixel, from several blocks of the data; behind the last block stand
    zeros."""
    conv = task.buffers.conv
    each, numbers = _blocks_per_row(conv), _numbers(conv)
    words = SIDE // each

    def pixel(block: ir.Expr, row: ir.Expr, column: ir.Expr, place: Place | None) -> tirx.Stmt:
        def part(i: int) -> tirx.Stmt:
            at = [block, row, column, tirx.Ramp(integer(i * words), integer(1), words)]
            number = block * integer(each) + integer(i)
            if place is None:
                return tirx.BufferStore(copy, tirx.Broadcast(tirx.const(pack.filler, "int32"), words), at)
            lanes = tirx.Ramp(integer(0), integer(1), numbers)
            value = pack.vector(tirx.BufferLoad(conv.data, [task.n, number, *place, lanes]))
            store = tirx.BufferStore(copy, value, at)
            if conv.input_blocks % each == 0:
                return store
            empty = tirx.BufferStore(copy, tirx.Broadcast(tirx.const(0, "int32"), words), at)
            return tirx.IfThenElse(number < integer(conv.input_blocks), store, empty)

        return sequence([part(i) for i in range(each)])

    return pixel


def _products(task: Pass) -> tirx.Stmt:
    """For each group of output vectors all tiles of pixels."""
    conv, plan = task.buffers.conv, task.buffers.plan
    assert conv.dot is not None
    unit, geometry = tile_unit(conv.dot, _row_words(conv)), geometry_of(conv, plan)
    most = tile_shape(conv.output_blocks)[0]
    whole, rest = divmod(geometry.tiles, most)

    def group(number: ir.Expr) -> tirx.Stmt:
        def kernel(first: ir.Expr, tiles: int) -> tirx.Stmt:
            return _kernel(_Tiles(task, unit, geometry, number, first, tiles))

        parts = [loop(whole, lambda i: kernel(i * integer(most), most))] if whole else []
        return sequence([*parts, kernel(integer(whole * most), rest)] if rest else parts)

    assert task.buffers.copy is not None
    return unit.within(tirx.SeqStmt([unit.whole(task.buffers.copy), loop(plan.groups, group)]))


@dataclass(frozen=True, slots=True)
class _Tiles:
    """`count` tiles of pixels, from number `first` on, of a group of output vectors."""

    task: Pass
    unit: TileUnit
    geometry: Geometry
    group: ir.Expr
    first: ir.Expr
    count: int

    def pixel(self, i: int, m: ir.Expr) -> ir.Expr:
        """Number of a pixel of a task."""
        return (self.first + integer(i)) * integer(SIDE) + m

    def place(self, pixel: ir.Expr) -> Place:
        """Its line and column in the task."""
        pitch = integer(self.geometry.pitch)
        return (integer(0), pixel) if self.geometry.lines == 1 else (pixel // pitch, pixel % pitch)

    def words(self, k: Point, i: int) -> Address:
        """Of tile `i`, at `k`: depth, taps."""
        buffers = self.task.buffers
        conv, flat = buffers.conv, buffers.source.flat
        y, x = self.place(self.pixel(i, integer(0)))
        steps = (1, 1) if flat else (conv.height.stride, conv.width.stride)
        row = y * integer(steps[0]) + k[1] * integer(conv.height.dilation)
        column = x * integer(steps[1]) + k[2] * integer(_row_taps(conv) * conv.width.dilation)
        assert buffers.copy is not None
        first = tirx.BufferLoad(buffers.copy, [k[0], row, column, integer(0)])
        return first, integer(4 * _pixel_words(conv) * steps[1])

    def weights(self, k: Point, j: int) -> Address:
        zeros = [integer(0)] * 3
        which = self.task.first_group + self.group
        return tirx.BufferLoad(self.task.buffers.weight, [which, *k, integer(j), *zeros]), integer(ROW_BYTES)

    def write(self, i: int, j: int, m: ir.Expr, sum_at: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
        """Store a row of sums if its pixel exists."""
        number, geometry = self.pixel(i, m), self.geometry
        y, x = self.place(number)

        def store(lane: ir.Expr) -> tirx.Stmt:
            return self.task.store(self.group, (y, x), integer(j), lane, sum_at(lane))

        exists = tirx.all(x < integer(geometry.width), y < integer(geometry.lines))
        return tirx.IfThenElse(exists, vectorized(SIDE, store), None)


def _kernel(tiles: _Tiles) -> tirx.Stmt:
    conv, plan = tiles.task.buffers.conv, tiles.task.buffers.plan
    shape, extents = (tiles.count, plan.vectors), _extents(conv)
    return tile_kernel(tiles.unit, shape, extents, tiles.words, tiles.weights, tiles.write, _passes(tiles))


def _passes(tiles: _Tiles) -> Passes | None:
    """Of all tiles of pixels over the weights of a group."""
    conv, plan = tiles.task.buffers.conv, tiles.task.buffers.plan
    most = tile_shape(conv.output_blocks)[0]
    count = ceil_div(tiles.geometry.tiles, most)
    if count == 1 or plan.groups == 1:
        return None
    group_bytes = math.prod(_extents(conv)) * plan.vectors * _row_words(conv) * ROW_BYTES
    return Passes(tirx.floordiv(tiles.first, integer(most)), count, group_bytes)
