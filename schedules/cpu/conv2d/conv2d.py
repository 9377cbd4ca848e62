"""Convolutions of two or three spatial axes on plain NC(D)HW tensors.

Vectors run along the output's last axis, so that results are stored, and residuals read, as they lie;
weights are the scalars. Stride, padding and dilation are dealt with once, by a copy of the input:

    lines[n, c, ph, pw, y, x] = padded[n, c, y * SH + ph, x * SW + pw]

in which every tap of the kernel is a contiguous vector: tap `kh` reads phase `kh * DH % SH`, line
`y + kh * DH // SH`. The copy costs one pass over the input; the convolution reads each element OC * KH
* KW times. With three axes, slices of the output are images, and a channel and a tap along the depth tell
which slice of the input is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d.read import Convolution, read_convolution
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    Tile,
    ceil_div,
    clamp,
    function_of,
    grid,
    integer,
    loop,
    micro_kernel,
    rank_tiles,
    unrolled,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.sharing import idleness
from hybridc.schedules.packing import Packing
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

_MOST_CHOICES = 8


@dataclass(frozen=True, slots=True)
class FactorSource:
    """Where a factor is read, and what has to run before and be allocated for it."""

    read: Callable[..., ir.Expr]
    stages: tuple[tirx.Stmt, ...] = ()
    buffers: tuple[ir.Var, ...] = ()
    parameter: tuple[int, ir.Var, Packing] | None = None


@schedule_rule(family="conv2d")
def conv2d(request: Request) -> Scheduled | None:
    """Accepts conv2d and conv3d of any stride, padding, dilation and groups of more than one input channel.

    Tiling (AVX-512): `rows` output channels x `depth` lines x `width` vectors of 16 columns, about 24
    accumulators. A 1x1 convolution without stride and padding is a matrix product over all H * W columns.
    """
    convolution = read_convolution(request.function, volumes=True)
    if convolution is None or (convolution.group_inputs == 1 and convolution.groups > 1):
        return None
    return schedule_convolution(request, convolution, conv2d.__name__)


def schedule_convolution(request: Request, conv: Convolution, rule: str) -> Scheduled:
    """Tile, pack and emit; shared with `depthwise`."""
    flat = is_pointwise(conv)
    lines, columns = tile_extents(conv)
    isa = request.target.isa
    images = conv.images * conv.groups
    shape, divide = (conv.group_outputs, lines, columns), conv.groups > 1
    tiles = rank_tiles(
        isa, shape, divide_rows=divide, slowdown=lambda count: idleness(images * count, request.threads)
    )
    if request.many_sizes:  # for any number of images weights are packed for the tile that is best for many
        best = rank_tiles(isa, shape, divide_rows=divide)[0]
        tiles = tuple(tile for tile in tiles if tile.rows == best.rows)
    tiles = tiles[:_MOST_CHOICES]
    ranked = {f"{tile.rows}x{tile.image_rows}x{tile.width} vectors": tile for tile in tiles}
    tile = pick(request, ranked)
    data = _flat_source(conv, tile, columns) if flat else _line_source(conv, tile)
    weight = weight_source(request, conv, tile.rows)
    body, sums = _ConvTiles(conv, tile, lines, columns, data, weight, flat).nest()
    params = list(request.function.params)
    packings = []
    if weight.parameter is not None:
        position, packed, packing = weight.parameter
        params[position] = packed
        packings.append((position, packing))
    function = function_of(
        request.function, params, [*weight.stages, *data.stages, body], [*weight.buffers, *data.buffers, sums]
    )
    return finish(function, rule, packings, ranked)


def tile_extents(conv: Convolution) -> tuple[int, int]:
    """Lines and columns of an image that tiles cover: lines are joined where taps do not tell them apart."""
    if is_pointwise(conv):
        return 1, conv.height.outputs * conv.width.outputs
    return conv.height.outputs, conv.width.outputs


def is_pointwise(conv: Convolution) -> bool:
    """Whether it is a matrix product over all pixels."""
    axes = (conv.depth, conv.height, conv.width)
    return all(a.taps == 1 and a.stride == 1 and a.padded == a.outputs for a in axes)


def _line_and_column(conv: Convolution, flat: ir.Expr) -> tuple[ir.Expr, ir.Expr]:
    """Where an element of joined lines lies."""
    width = integer(conv.width.outputs)
    if conv.height.outputs == 1:
        return integer(0), flat
    return tirx.floordiv(flat, width), tirx.floormod(flat, width)


def _flat_source(conv: Convolution, tile: Tile, columns: int) -> FactorSource:
    """Data of a 1x1 convolution, lines joined: read in place, or copied if the last vector sticks out."""

    def element(image: ir.Expr, plane: ir.Expr, j: ir.Expr) -> ir.Expr:
        n, c, z = conv.plane(image, plane)
        return conv.padded(n, c, *_line_and_column(conv, j), z)

    if columns % tile.columns == 0 and conv.contraction.nest.parameter(conv.data.source) is not None:

        def direct(image: ir.Expr, plane: ir.Expr, j: ir.Expr) -> ir.Expr:
            (n, c, z), (y, x) = conv.plane(image, plane), _line_and_column(conv, j)
            return tirx.BufferLoad(conv.data.source, conv.place(n, c, z, y, x))

        return FactorSource(lambda n, c, kh, kw, y, x: direct(n, c, x))
    channels = conv.groups * conv.group_inputs
    pitch = ceil_div(columns, tile.columns) * tile.columns
    copy = tirx.decl_buffer((conv.images, channels, pitch), "float32", "lines")

    def fill(point: Point) -> tirx.Stmt:
        n, c = point
        return loop(columns, lambda j: tirx.BufferStore(copy, element(n, c, j), [n, c, j]))

    stage = grid((conv.images, channels), fill, parallel=conv.images * channels * columns >= PARALLEL_WORK)
    return FactorSource(lambda n, c, kh, kw, y, x: tirx.BufferLoad(copy, [n, c, x]), (stage,), (copy,))


def _line_source(conv: Convolution, tile: Tile) -> FactorSource:
    """The padded copy in which every tap is contiguous; see the module's docstring."""
    height, width = conv.height, conv.width
    channels = conv.groups * conv.group_inputs
    rows = ceil_div(height.outputs, tile.image_rows) * tile.image_rows + height.reach
    pitch = ceil_div(width.outputs, tile.columns) * tile.columns + width.reach
    slices = conv.depth.padded
    shape = (conv.batches, channels, slices, height.phases, width.phases, rows, pitch)
    copy = tirx.decl_buffer(shape, "float32", "lines")

    def fill(point: Point) -> tirx.Stmt:
        n, c, z, ph, pw, y = point

        def element(x: ir.Expr) -> tirx.Stmt:
            from_y = y * integer(height.stride) + ph
            from_x = x * integer(width.stride) + pw
            return tirx.BufferStore(copy, conv.padded(n, c, from_y, from_x, z), [n, c, z, ph, pw, y, x])

        return loop(pitch, element)

    stage = grid(shape[:-1], fill, parallel=math.prod(shape) >= PARALLEL_WORK)

    def read(image: ir.Expr, plane: ir.Expr, kh: ir.Expr, kw: ir.Expr, y: ir.Expr, x: ir.Expr) -> ir.Expr:
        place = [height.phase(kh), width.phase(kw), y + height.shift(kh), x + width.shift(kw)]
        return tirx.BufferLoad(copy, [*conv.plane(image, plane), *place])

    return FactorSource(read, (stage,), (copy,))


def weight_source(request: Request, conv: Convolution, rows: int) -> FactorSource:
    """Weights as `[O / rows, I * KD, KH, KW, rows]`: the scalars of one step lie side by side."""
    outputs = conv.groups * conv.group_outputs
    inputs, kh, kw = conv.group_planes, conv.height.taps, conv.width.taps
    blocks = ceil_div(outputs, rows)
    packed = tirx.decl_buffer((blocks, inputs, kh, kw, rows), "float32", "packed_weight")

    def read(block: ir.Expr, m: ir.Expr, c: ir.Expr, i: ir.Expr, j: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(packed, [block, c, i, j, m])

    position = conv.contraction.nest.parameter(conv.weight.source)
    if position in request.constants:
        taps = [axis.taps for axis in (conv.depth, conv.height, conv.width) if axis.output is not None]
        packing = Packing(
            (blocks * rows, conv.group_inputs, *taps), (blocks, rows, inputs, kh, kw), (0, 2, 3, 4, 1)
        )
        return FactorSource(read, parameter=(position, packed, packing))

    def fill(point: Point) -> tirx.Stmt:
        block, c, i, j, m = point
        o = clamp(block * integer(rows) + m, outputs, inside=outputs % rows == 0)
        return tirx.BufferStore(packed, conv.weight_at(o, c, i, j), [block, c, i, j, m])

    shape = (blocks, inputs, kh, kw, rows)
    stage = grid(shape, fill, parallel=blocks * inputs * kh * kw * rows >= PARALLEL_WORK)
    return FactorSource(read, (stage,), (packed,))


def _weights_inside(conv: Convolution, lines: int, columns: int) -> bool:
    """Weights are fewer than data, so that they are swept for each block of data."""
    weights = conv.group_outputs * conv.group_planes * conv.height.taps * conv.width.taps
    return weights < conv.group_planes * lines * columns


@dataclass(frozen=True, slots=True)
class _ConvTiles:
    """All tiles of a convolution: `lines` x `columns` of output, whose lines are joined if `flat`."""

    conv: Convolution
    tile: Tile
    lines: int
    columns: int
    data: FactorSource
    weight: FactorSource
    flat: bool

    @property
    def row_blocks(self) -> int:
        return ceil_div(self.conv.group_outputs, self.tile.rows)

    def nest(self) -> tuple[tirx.Stmt, ir.Var]:
        """Tasks: what is smaller, weights or data, is swept by the inner loops and stays in cache.

        Returns the buffer of the sums too.
        """
        conv, tile = self.conv, self.tile
        weights_inside = _weights_inside(conv, self.lines, self.columns)
        lines, columns = ceil_div(self.lines, tile.image_rows), ceil_div(self.columns, tile.columns)
        order = (lines, columns, self.row_blocks) if weights_inside else (self.row_blocks, lines, columns)
        sums: list[ir.Var] = []

        def emit(at: _ConvTile) -> tirx.Stmt:
            body, buffer = at.emit()
            sums.append(buffer)
            return body

        def task(point: Point) -> tirx.Stmt:
            n, g, *rest = point
            return emit(_ConvTile(self, n, g, *(rest if weights_inside else (*rest[1:], rest[0]))))

        return grid(
            (conv.images, conv.groups, *order), task, parallel=conv.multiply_adds >= PARALLEL_WORK
        ), sums[0]


@dataclass(frozen=True, slots=True)
class _ConvTile:
    """A tile, by the number of its lines, of its columns and of its output channels in an image and group."""

    tiles: _ConvTiles
    n: ir.Expr
    g: ir.Expr
    line: ir.Expr
    column: ir.Expr
    block: ir.Expr

    def emit(self) -> tuple[tirx.Stmt, ir.Var]:
        conv = self.tiles.conv
        reduction = (conv.group_planes, conv.height.taps, conv.width.taps)
        return micro_kernel(self.tiles.tile, reduction, self._weight, self._data, self._write)

    def _weight(self, k: Point, m: ir.Expr) -> ir.Expr:
        return self.tiles.weight.read(self.g * integer(self.tiles.row_blocks) + self.block, m, *k)

    def _data(self, k: Point, line: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        (c, kh, kw), tile, conv = k, self.tiles.tile, self.tiles.conv
        y = self.line * integer(tile.image_rows) + line
        plane = self.g * integer(conv.group_planes) + c
        x = self.column * integer(tile.columns) + vector * integer(tile.lanes) + lane
        return self.tiles.data.read(self.n, plane, kh, kw, y, x)

    def _write(self, sum_at: Callable[..., ir.Expr]) -> tirx.Stmt:
        tile, outputs, lines = self.tiles.tile, self.tiles.conv.group_outputs, self.tiles.lines

        def row(m: ir.Expr) -> tirx.Stmt:
            channel = self.block * integer(tile.rows) + m
            depth = unrolled(tile.image_rows, lambda d: line(m, channel, d))
            return when(channel < integer(outputs), depth, always=outputs % tile.rows == 0)

        def line(m: ir.Expr, channel: ir.Expr, d: ir.Expr) -> tirx.Stmt:
            y = self.line * integer(tile.image_rows) + d
            vectors = unrolled(
                tile.width, lambda v: self._write_vector(channel, y, v, lambda lane: sum_at(m, d, v, lane))
            )
            return when(y < integer(lines), vectors, always=lines % tile.image_rows == 0)

        return unrolled(tile.rows, row)

    def _write_vector(
        self, channel: ir.Expr, y: ir.Expr, vector: ir.Expr, value: Callable[[ir.Expr], ir.Expr]
    ) -> tirx.Stmt:
        tiles, conv = self.tiles, self.tiles.conv

        def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            o = self.g * integer(conv.group_outputs) + channel
            at = _line_and_column(conv, column) if tiles.flat else (y, column)
            return conv.contraction.store(conv.point(self.n, o, *at), value(lane))

        start = self.column * integer(tiles.tile.columns)
        return write_columns(start, tiles.columns, tiles.tile, vector, element)
