"""Convolutions of one or two spatial axes on plain NC(H)W tensors.

Vectors run along the output's last axis, so that results are stored, and residuals read, as they lie;
weights are the scalars. Stride, padding and dilation are dealt with once, by a copy of the input:

    lines[n, c, ph, pw, y, x] = padded[n, c, y * SH + ph, x * SW + pw]

in which every tap of the kernel is a contiguous vector: tap `kh` reads phase `kh * DH % SH`, line
`y + kh * DH // SH`. The copy costs one pass over the input; the convolution reads each element OC * KH
* KW times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, sym, tirx

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
class Axis:
    """One spatial axis: output index `y` and tap `k` read padded position `y * stride + k * dilation`."""

    output: ir.Var | None
    tap: ir.Var | None
    outputs: int
    taps: int
    stride: int
    dilation: int
    padded: int
    """Extent of the padded input."""

    @property
    def phases(self) -> int:
        return 1 + max(k * self.dilation % self.stride for k in range(self.taps))

    @property
    def reach(self) -> int:
        """Lines behind an output's own that its taps read, within a phase."""
        return (self.taps - 1) * self.dilation // self.stride

    def phase(self, tap: ir.Expr) -> ir.Expr:
        return tirx.floormod(tap * integer(self.dilation), integer(self.stride))

    def shift(self, tap: ir.Expr) -> ir.Expr:
        return tirx.floordiv(tap * integer(self.dilation), integer(self.stride))


@dataclass(frozen=True, slots=True)
class Convolution:
    """What an anchor says: `sum over c, kh, kw of data[n, c', h', w'] * weight[o, c, kh, kw]`."""

    contraction: Contraction
    data: ir.TensorLoad
    weight: ir.TensorLoad
    batch: ir.Var
    channel: ir.Var
    inner: ir.Var
    height: Axis
    width: Axis
    batches: int
    groups: int
    group_outputs: int
    group_inputs: int

    @property
    def multiply_adds(self) -> int:
        outputs = self.batches * self.groups * self.group_outputs * self.height.outputs * self.width.outputs
        return outputs * self.group_inputs * self.height.taps * self.width.taps

    def point(self, n: ir.Expr, o: ir.Expr, y: ir.Expr, x: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """The anchor's spatial iterators at an output element."""
        point = {self.batch: n, self.channel: o, self.width.output: x}
        if self.height.output is not None:
            point[self.height.output] = y
        return point

    def padded(self, n: ir.Expr, c: ir.Expr, y: ir.Expr, x: ir.Expr) -> ir.Expr:
        """The padded input's element, zero outside it."""
        indices = [n, c, x] if self.height.output is None else [n, c, y, x]
        value = self.contraction.nest.inlined(tirx.BufferLoad(self.data.source, indices))
        inside = tirx.all(y < integer(self.height.padded), x < integer(self.width.padded))
        return tirx.if_then_else(inside, value, tirx.FloatImm("float32", 0.0))

    def weight_at(self, o: ir.Expr, c: ir.Expr, kh: ir.Expr, kw: ir.Expr) -> ir.Expr:
        indices = [o, c, kw] if self.height.output is None else [o, c, kh, kw]
        return self.contraction.nest.inlined(tirx.BufferLoad(self.weight.source, indices))


def read_convolution(function: tirx.PrimFunc) -> Convolution | None:
    """The convolution a function computes, or None."""
    contraction = read_contraction(function)
    if contraction is None:
        return None
    anchor, data, weight = contraction.anchor, contraction.left, contraction.right
    rank = len(anchor.spatial)
    if rank not in (3, 4) or len(anchor.reduce) != rank - 1:
        return None
    if len(data.indices) != rank or len(weight.indices) != rank:
        return None
    batch, channel, *outputs = anchor.spatial
    inner, *taps = anchor.reduce
    if not all(i.same_as(v) for i, v in zip(weight.indices, (channel, inner, *taps), strict=True)):
        return None
    shape = [int(e) for e in data.source.shape]
    axes = []
    for index, output, tap, extent in zip(data.indices[2:], outputs, taps, shape[2:], strict=True):
        axis = _read_axis(contraction, index, output, tap, extent)
        if axis is None:
            return None
        axes.append(axis)
    if not data.indices[0].same_as(batch):
        return None
    group_inputs, total_outputs = anchor.extents[inner], anchor.extents[channel]
    groups = shape[1] // group_inputs
    if not _reads_groups(contraction, data.indices[1], channel, inner, total_outputs // groups, group_inputs):
        return None
    height, width = axes if rank == 4 else (Axis(None, None, 1, 1, 1, 1, 1), axes[0])
    return Convolution(
        contraction, data, weight, batch, channel, inner, height, width,
        anchor.extents[batch], groups, total_outputs // groups, group_inputs,
    )  # fmt: skip


def _read_axis(
    contraction: Contraction, index: ir.Expr, output: ir.Var, tap: ir.Var, padded: int
) -> Axis | None:
    analyzer = sym.Analyzer()

    def at(y: int, k: int) -> int | None:
        value = analyzer.simplify(substitute(index, {output: integer(y), tap: integer(k)}))
        return int(value) if isinstance(value, tirx.IntImm) else None

    if at(0, 0) != 0:
        return None
    stride, dilation = at(1, 0), at(0, 1)
    extents = contraction.anchor.extents
    affine = output * integer(stride or 0) + tap * integer(dilation or 0)
    if not stride or not dilation or not analyzer.can_prove_equal(index, affine):
        # an iterator of extent one is often left out of the index
        if at(extents[output] - 1, extents[tap] - 1) is None:
            return None
        stride, dilation = stride or 1, dilation or 1
        ends = (extents[output] - 1) * stride + (extents[tap] - 1) * dilation
        if at(extents[output] - 1, extents[tap] - 1) != ends:
            return None
    return Axis(output, tap, extents[output], extents[tap], stride, dilation, padded)


def _reads_groups(
    contraction: Contraction, index: ir.Expr, channel: ir.Var, inner: ir.Var, outputs: int, inputs: int
) -> bool:
    if outputs == 0 or uses(index, contraction.anchor.spatial[0]):
        return False
    analyzer = sym.Analyzer()
    for o in {0, outputs - 1, outputs, contraction.anchor.extents[channel] - 1}:
        if o >= contraction.anchor.extents[channel]:
            continue
        for c in {0, inputs - 1}:
            value = analyzer.simplify(substitute(index, {channel: integer(o), inner: integer(c)}))
            if not isinstance(value, tirx.IntImm) or int(value) != o // outputs * inputs + c:
                return False
    return True


@dataclass(frozen=True, slots=True)
class Source:
    """Where a factor is read, and what has to run before and be allocated for it."""

    read: Callable[..., ir.Expr]
    stages: tuple[tirx.Stmt, ...] = ()
    buffers: tuple[ir.Var, ...] = ()
    parameter: tuple[int, ir.Var, Packing] | None = None


def conv2d(request: Request) -> Scheduled | None:
    """Accepts conv1d and conv2d of any stride, padding, dilation and groups of more than one input channel.

    Tiling (AVX-512): `rows` output channels x `depth` lines x `width` vectors of 16 columns, about 24
    accumulators. A 1x1 convolution without stride and padding is a matrix product over all H * W columns.
    """
    convolution = read_convolution(request.function)
    if convolution is None or (convolution.group_inputs == 1 and convolution.groups > 1):
        return None
    return schedule_convolution(request, convolution, conv2d.__name__)


def schedule_convolution(request: Request, conv: Convolution, rule: str) -> Scheduled:
    """Tile, pack and emit; shared with `depthwise`."""
    flat = _is_pointwise(conv)
    lines = 1 if flat else conv.height.outputs
    columns = conv.height.outputs * conv.width.outputs if flat else conv.width.outputs
    isa = request.target.isa
    tile = choose_tile(isa, conv.group_outputs, lines, columns, divide_rows=conv.groups > 1)
    data = _flat_source(conv, tile, columns) if flat else _line_source(conv, tile)
    weight = _weight_source(request, conv, tile)
    body, sums = _tiles(conv, tile, lines, columns, data.read, weight.read, flat=flat)
    params = list(request.function.params)
    packings = []
    if weight.parameter is not None:
        position, packed, packing = weight.parameter
        params[position] = packed
        packings.append((position, packing))
    function = function_of(
        request.function, params, [*weight.stages, *data.stages, body], [*weight.buffers, *data.buffers, sums]
    )
    return finish(function, rule, packings)


def _is_pointwise(conv: Convolution) -> bool:
    axes = (conv.height, conv.width)
    return all(a.taps == 1 and a.stride == 1 and a.padded == a.outputs for a in axes)


def _flat_source(conv: Convolution, tile: Tile, columns: int) -> Source:
    """Data of a 1x1 convolution, lines joined: read in place, or copied if the last vector sticks out."""
    width = conv.width.outputs

    def element(n: ir.Expr, c: ir.Expr, j: ir.Expr) -> ir.Expr:
        return conv.padded(n, c, tirx.floordiv(j, integer(width)), tirx.floormod(j, integer(width)))

    if columns % tile.columns == 0 and conv.contraction.nest.parameter(conv.data.source) is not None:

        def direct(n: ir.Expr, c: ir.Expr, j: ir.Expr) -> ir.Expr:
            y, x = tirx.floordiv(j, integer(width)), tirx.floormod(j, integer(width))
            indices = [n, c, x] if conv.height.output is None else [n, c, y, x]
            return tirx.BufferLoad(conv.data.source, indices)

        return Source(lambda n, c, kh, kw, y, x: direct(n, c, x))
    channels = conv.groups * conv.group_inputs
    pitch = ceil_div(columns, tile.columns) * tile.columns
    copy = tirx.decl_buffer((conv.batches, channels, pitch), "float32", "lines")

    def fill(point: Point) -> tirx.Stmt:
        n, c = point
        return loop(columns, lambda j: tirx.BufferStore(copy, element(n, c, j), [n, c, j]))

    stage = grid((conv.batches, channels), fill, parallel=conv.batches * channels * columns >= PARALLEL_WORK)
    return Source(lambda n, c, kh, kw, y, x: tirx.BufferLoad(copy, [n, c, x]), (stage,), (copy,))


def _line_source(conv: Convolution, tile: Tile) -> Source:
    """The padded copy in which every tap is contiguous; see the module's docstring."""
    height, width = conv.height, conv.width
    channels = conv.groups * conv.group_inputs
    rows = ceil_div(height.outputs, tile.depth) * tile.depth + height.reach
    pitch = ceil_div(width.outputs, tile.columns) * tile.columns + width.reach
    shape = (conv.batches, channels, height.phases, width.phases, rows, pitch)
    copy = tirx.decl_buffer(shape, "float32", "lines")

    def fill(point: Point) -> tirx.Stmt:
        n, c, ph, pw, y = point

        def element(x: ir.Expr) -> tirx.Stmt:
            from_y = y * integer(height.stride) + ph
            from_x = x * integer(width.stride) + pw
            return tirx.BufferStore(copy, conv.padded(n, c, from_y, from_x), [n, c, ph, pw, y, x])

        return loop(pitch, element)

    work = conv.batches * channels * height.phases * width.phases * rows * pitch
    stage = grid(shape[:-1], fill, parallel=work >= PARALLEL_WORK)

    def read(n: ir.Expr, c: ir.Expr, kh: ir.Expr, kw: ir.Expr, y: ir.Expr, x: ir.Expr) -> ir.Expr:
        indices = [n, c, height.phase(kh), width.phase(kw), y + height.shift(kh), x + width.shift(kw)]
        return tirx.BufferLoad(copy, indices)

    return Source(read, (stage,), (copy,))


def _weight_source(request: Request, conv: Convolution, tile: Tile) -> Source:
    """Weights as `[O / rows, I, KH, KW, rows]`: the scalars of one step lie side by side."""
    outputs = conv.groups * conv.group_outputs
    inputs, kh, kw = conv.group_inputs, conv.height.taps, conv.width.taps
    blocks = ceil_div(outputs, tile.rows)
    packed = tirx.decl_buffer((blocks, inputs, kh, kw, tile.rows), "float32", "packed_weight")

    def read(block: ir.Expr, m: ir.Expr, c: ir.Expr, i: ir.Expr, j: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(packed, [block, c, i, j, m])

    position = conv.contraction.nest.parameter(conv.weight.source)
    if position in request.constants:
        taps = (kw,) if conv.height.output is None else (kh, kw)
        packing = Packing(
            (blocks * tile.rows, inputs, *taps), (blocks, tile.rows, inputs, kh, kw), (0, 2, 3, 4, 1)
        )
        return Source(read, parameter=(position, packed, packing))

    def fill(point: Point) -> tirx.Stmt:
        block, c, i, j, m = point
        o = clamp(block * integer(tile.rows) + m, outputs, inside=outputs % tile.rows == 0)
        return tirx.BufferStore(packed, conv.weight_at(o, c, i, j), [block, c, i, j, m])

    shape = (blocks, inputs, kh, kw, tile.rows)
    stage = grid(shape, fill, parallel=blocks * inputs * kh * kw * tile.rows >= PARALLEL_WORK)
    return Source(read, (stage,), (packed,))


def _tiles(
    conv: Convolution, tile: Tile, lines: int, columns: int,
    data_at: Callable[..., ir.Expr], weight_at: Callable[..., ir.Expr], *, flat: bool,
) -> tuple[tirx.Stmt, ir.Var]:  # fmt: skip
    """Tasks: what is smaller, weights or data, is swept by the inner loops and stays in cache."""
    row_blocks = ceil_div(conv.group_outputs, tile.rows)
    places = (ceil_div(lines, tile.depth), ceil_div(columns, tile.columns))
    weight_elements = conv.group_outputs * conv.group_inputs * conv.height.taps * conv.width.taps
    weights_inside = weight_elements < conv.group_inputs * lines * columns
    sums: list[ir.Var] = []

    def task(point: Point) -> tirx.Stmt:
        n, g = point[:2]
        line_block, column_block, block = point[2:] if weights_inside else (*point[3:], point[2])

        def channel(m: ir.Expr) -> ir.Expr:
            return block * integer(tile.rows) + m

        def left(k: Point, m: ir.Expr) -> ir.Expr:
            return weight_at(g * integer(row_blocks) + block, m, *k)

        def right(k: Point, line: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
            c, kh, kw = k
            y = line_block * integer(tile.depth) + line
            x = column_block * integer(tile.columns) + vector * integer(tile.lanes) + lane
            return data_at(n, g * integer(conv.group_inputs) + c, kh, kw, y, x)

        def write(sum_at: Callable[..., ir.Expr]) -> tirx.Stmt:
            def row(m: ir.Expr) -> tirx.Stmt:
                exists = channel(m) < integer(conv.group_outputs)
                always = conv.group_outputs % tile.rows == 0
                return when(exists, unrolled(tile.depth, lambda d: line(m, d)), always=always)

            def line(m: ir.Expr, d: ir.Expr) -> tirx.Stmt:
                y = line_block * integer(tile.depth) + d
                vectors = unrolled(tile.width, lambda v: vector(m, d, v, y))
                return when(y < integer(lines), vectors, always=lines % tile.depth == 0)

            def vector(m: ir.Expr, d: ir.Expr, v: ir.Expr, y: ir.Expr) -> tirx.Stmt:
                def element(column: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                    o = g * integer(conv.group_outputs) + channel(m)
                    width = integer(conv.width.outputs)
                    at = (tirx.floordiv(column, width), tirx.floormod(column, width)) if flat else (y, column)
                    return conv.contraction.store(conv.point(n, o, *at), sum_at(m, d, v, lane))

                return write_columns(column_block * integer(tile.columns), columns, tile, v, element)

            return unrolled(tile.rows, row)

        reduction = (conv.group_inputs, conv.height.taps, conv.width.taps)
        body, buffer = micro_kernel(tile, reduction, left, right, write)
        sums.append(buffer)
        return body

    order = (*places, row_blocks) if weights_inside else (row_blocks, *places)
    tasks = (conv.batches, conv.groups, *order)
    return grid(tasks, task, parallel=conv.multiply_adds >= PARALLEL_WORK), sums[0]
