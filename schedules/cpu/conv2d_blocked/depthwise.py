"""Depthwise convolution of blocked activations `[N, C / b, H, W, b]`: each channel has a kernel of its own.

A pixel's block is a vector, so that nothing is broadcast: `sum[o] += data[tap, o] * weight[tap, o]`. There
are only KH * KW multiply-adds for an element that is read and one that is written, so memory is the limit: an
input is loaded once for all the sums of a tile that it is a tap of, and lines are fetched ahead of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.read import (
    BlockedAxis,
    BlockedConvolution,
    read_blocked_convolution,
)
from hybridc.schedules.cpu.core.micro_kernel import (
    PARALLEL_WORK,
    Point,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    prefetch,
    sequence,
    vectorized,
    when,
)
from hybridc.schedules.cpu.core.nest import finish
from hybridc.schedules.cpu.core.sharing import idleness
from hybridc.schedules.rule import Request, Scheduled, pick, schedule_rule

UNROLLED_TAPS = 200
"""Multiply-adds of a tile that are written out; LLVM takes a quarter of a second for it. A kernel for which
that is too few loops over its rows instead."""
OFFERED = 8
"""Tiles that a measured search may choose from."""


Write = Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr, ir.Expr, ir.Expr], tirx.BufferStore]
"""Writes an output, through the epilogue: image, block, row, column, lane, sum."""


@dataclass(frozen=True, slots=True)
class DepthwiseTile:
    """Outputs whose sums are in registers at the same time."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class _Columns:
    """`tiles` tiles of `columns` outputs side by side, of which the first begins at `start`."""

    start: int
    columns: int
    tiles: int
    taps: tuple[tuple[int, int], ...]
    """(tap, output) pairs, in this order, that read an input; all others read padding."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An input row of a tile: which sums it is added to, and whether it may lie above or below the image."""

    offset: int
    """From the first row that the tile's first output would read without padding."""
    uses: tuple[tuple[int, int], ...]
    """(output row, tap) pairs."""
    may_be_above: bool
    may_be_below: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """A tile's rows over the whole width: image, block and first output row, a multiple of these rows."""

    conv: BlockedConvolution
    tile: DepthwiseTile
    image: ir.Expr
    block: ir.Expr
    y: ir.Expr
    into: Write | None = None
    """Writes the results; None for the function's output, of which the next rows are fetched."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One tile: its rows, its first output column, and where its sums are."""

    rows: Rows
    columns: _Columns
    sums: ir.Var
    x: ir.Expr

    def sum_at(self, row: int, column: int, lane: ir.Expr) -> tuple[ir.Expr, list[ir.Expr]]:
        index = [integer(row), integer(column), lane]
        return tirx.BufferLoad(self.sums, index), index

    def input_at(self, row: ir.Expr, column: int, lane: ir.Expr) -> tirx.BufferLoad:
        """`column` counts from the tile's first output column, without padding."""
        rows, width = self.rows, self.rows.conv.width
        x = self.x * integer(width.stride) + integer(column - width.before)
        return rows.conv.input_at(rows.image, rows.block, row, x, lane)[0]


@schedule_rule(family="depthwise")
def depthwise_blocked(request: Request) -> Scheduled | None:
    """Accepts depthwise convolutions of blocked data, of any window.

    Tiling: up to 25 taps 7 or 8 rows x 1 column of sums, so that an input is loaded once for three rows of
    taps, and the work for a row's begin pays; above that 1 row x 14 columns, one row of taps after the other.
    Tasks are bands of a tile's rows. Padding is no memory: rows outside are skipped by a condition for the
    row, columns outside are left out of the tiles at the edges, which are code of their own.
    """
    conv = read_blocked_convolution(request)
    if conv is None or not conv.depthwise:
        return None
    ranked = {str(tile): tile for tile in rank_depthwise_tiles(conv, request.threads)[:OFFERED]}
    tile = pick(request, ranked)
    sums: list[ir.Var] = []

    def band(point: Point) -> tirx.Stmt:
        image, block, number = point
        return depthwise_rows(Rows(conv, tile, image, block, number * integer(tile.rows)), sums)

    bands = ceil_div(conv.height.outputs, tile.rows)
    inputs = conv.height.inputs * conv.width.inputs
    elements = conv.batches * conv.output_blocks * conv.output_lanes * inputs
    body = grid((conv.batches, conv.output_blocks, bands), band, parallel=elements >= PARALLEL_WORK)
    function = function_of(request.function, request.function.params, [body], sums)
    return finish(function, depthwise_blocked.__name__, choices=ranked)


def depthwise_rows(rows: Rows, sums: list[ir.Var]) -> tirx.Stmt:
    """Compute the rows, tile by tile. The tiles' sums are added to `sums`: the root block allocates them."""
    parts = []
    for columns in _column_tiles(rows.conv.width, rows.tile.columns):
        shape = (rows.tile.rows, columns.columns, rows.conv.output_lanes)
        sums.append(tirx.decl_buffer(shape, "float32", "sums", scope="local"))

        def one_tile(number: ir.Expr, columns: _Columns = columns) -> tirx.Stmt:
            x = integer(columns.start) + number * integer(columns.columns)
            return _micro_kernel(_Kernel(rows, columns, sums[-1], x))

        parts.append(loop(columns.tiles, one_tile))
    return sequence(parts)


def rank_depthwise_tiles(conv: BlockedConvolution, threads: int = 1) -> list[DepthwiseTile]:
    """The tiles that are predicted to take the least time first, if so many threads share them."""
    taps = conv.height.taps * conv.width.taps
    # 8 rows of sums hide the latency of a multiply-add (4 cycles, 2 ports)
    most_rows = 8 if 8 * taps <= UNROLLED_TAPS else 1
    columns = [DepthwiseTile(rows, 1) for rows in range(1, min(most_rows, conv.height.outputs) + 1)]
    # 14 sums and the weights of a column leave a register of AVX2's 16 for the input
    lines = [DepthwiseTile(1, count) for count in range(2, min(14, conv.width.outputs) + 1)]
    return sorted(columns + lines, key=lambda tile: depthwise_instructions(conv, tile, threads))


def depthwise_instructions(conv: BlockedConvolution, tile: DepthwiseTile, threads: int = 1) -> float:
    """Vector instructions for an output vector, those that idle threads could have done counted."""
    height, width = conv.height, conv.width
    taps = height.taps * width.taps
    outputs = tile.rows * tile.columns
    loads = _reach(height, tile.rows) * _reach(width, tile.columns) / outputs
    padded = ceil_div(height.outputs, tile.rows) * tile.rows / height.outputs
    per_band, per_tile = 60, 4
    in_registers = taps * (1.0 if tile.columns == 1 else 1.6)  # a row's inputs wait for all their taps
    work = padded * (in_registers + loads + per_tile / outputs)
    tasks = conv.batches * conv.output_blocks * ceil_div(height.outputs, tile.rows)
    return (work + per_band / (tile.rows * width.outputs)) * idleness(tasks, threads)


def _reach(axis: BlockedAxis, outputs: int) -> int:
    """Inputs that so many neighbouring outputs read."""
    return len({y * axis.stride + k * axis.dilation for y in range(outputs) for k in range(axis.taps)})


def _column_tiles(axis: BlockedAxis, columns: int) -> list[_Columns]:
    """Tiles that cover a line's outputs; neighbours that lack the same taps are one loop."""
    found: list[_Columns] = []
    for start in range(0, axis.outputs, columns):
        size = min(columns, axis.outputs - start)
        taps = tuple(
            (k, x)
            for k in range(axis.taps)
            for x in range(size)
            if 0 <= (start + x) * axis.stride + k * axis.dilation - axis.before < axis.inputs
        )
        if found and (found[-1].columns, found[-1].taps) == (size, taps):
            last = found.pop()
            found.append(_Columns(last.start, size, last.tiles + 1, taps))
        else:
            found.append(_Columns(start, size, 1, taps))
    return found


def _micro_kernel(kernel: _Kernel) -> tirx.Stmt:
    """Fetch ahead, sum up, write. Loops over lanes are innermost: one around everything would leave the sums
    a single lane each."""
    rows, columns = kernel.rows, kernel.columns
    conv, tile, lanes = rows.conv, rows.tile, rows.conv.output_lanes

    def clear(lane: ir.Expr) -> tirx.Stmt:
        places = [kernel.sum_at(r, c, lane)[1] for r in range(tile.rows) for c in range(columns.columns)]
        return sequence([tirx.BufferStore(kernel.sums, tirx.FloatImm("float32", 0.0), at) for at in places])

    def write(row: int) -> tirx.Stmt:
        y = rows.y + integer(row)

        def vectors(lane: ir.Expr) -> tirx.Stmt:
            sums = [kernel.sum_at(row, c, lane)[0] for c in range(columns.columns)]
            place = (rows.image, rows.block, y)
            store = rows.into or conv.store
            return sequence([store(*place, kernel.x + integer(c), lane, s) for c, s in enumerate(sums)])

        exists = y < integer(conv.height.outputs)
        return when(exists, vectorized(lanes, vectors), always=conv.height.outputs % tile.rows == 0)

    writes = [write(row) for row in range(tile.rows)]
    return sequence([*_prefetches(kernel), vectorized(lanes, clear), *_accumulate(kernel), *writes])


def _prefetches(kernel: _Kernel) -> list[tirx.Stmt]:
    """What the next rows read and write, into L2: up to twice as fast from memory, a tenth slower from L2.

    Rows are too many streams for hardware prefetchers, however long they are. Lines to be written are fetched
    as if to be read: the instruction that fetches for writing is slow.
    """
    rows, conv, tile = kernel.rows, kernel.rows.conv, kernel.rows.tile
    height, width = conv.height, conv.width
    next_row = (tile.rows - 1) * height.stride + (height.taps - 1) * height.dilation + 1 - height.before
    zero = integer(0)
    reads = [
        kernel.input_at(rows.y * integer(height.stride) + integer(next_row + r), width.before + c, zero)
        for r in range(tile.rows * height.stride)
        for c in range(kernel.columns.columns * width.stride)
    ]
    if rows.into is not None:
        return [prefetch(line, 2) for line in reads]
    output = conv.contraction.nest.blocks[-1].buffer
    writes = [
        tirx.BufferLoad(output, [rows.image, rows.block, rows.y + integer(tile.rows + r), kernel.x + c, zero])
        for r in range(tile.rows)
        for c in range(kernel.columns.columns)
    ]
    return [prefetch(line, 2) for line in [*reads, *writes]]


def _accumulate(kernel: _Kernel) -> list[tirx.Stmt]:
    """All multiply-adds of a tile, those under a condition first: LLVM moves others behind it, and spills."""
    conv, tile = kernel.rows.conv, kernel.rows.tile
    axis = conv.height
    top = kernel.rows.y * integer(axis.stride) - integer(axis.before)
    if tile.rows == 1 and kernel.columns.columns * axis.taps * conv.width.taps > UNROLLED_TAPS // 2:

        def tap_row(tap: ir.Expr) -> tirx.Stmt:
            row = top + tap * integer(axis.dilation)
            exists = tirx.all(row >= 0, row < integer(axis.inputs))
            return when(exists, _multiply_add(kernel, [(row, ((0, tap),))]), always=not axis.is_padded)

        return [loop(axis.taps, tap_row)]
    lines = _lines(axis, tile.rows)
    parts = []
    for line in lines:
        row = top + integer(line.offset)
        checks = [row >= 0] * line.may_be_above + [row < integer(axis.inputs)] * line.may_be_below
        if checks:
            parts.append(tirx.IfThenElse(tirx.all(*checks), _multiply_add(kernel, [(row, line.uses)]), None))
    certain = [line for line in lines if not (line.may_be_above or line.may_be_below)]
    if certain:
        parts.append(_multiply_add(kernel, [(top + integer(line.offset), line.uses) for line in certain]))
    return parts


def _lines(axis: BlockedAxis, rows: int) -> list[_Line]:
    """The input rows of a tile, wherever it lies."""
    last_top = (ceil_div(axis.outputs, rows) - 1) * rows * axis.stride - axis.before
    uses: dict[int, list[tuple[int, int]]] = {}
    for row in range(rows):
        for tap in range(axis.taps):
            uses.setdefault(row * axis.stride + tap * axis.dilation, []).append((row, tap))
    return [
        _Line(offset, tuple(pairs), offset < axis.before, last_top + offset >= axis.inputs)
        for offset, pairs in sorted(uses.items())
    ]


def _multiply_add(
    kernel: _Kernel, lines: Sequence[tuple[ir.Expr, Sequence[tuple[int, int | ir.Expr]]]]
) -> tirx.Stmt:
    """Add what input rows, with their (output row, tap) pairs, contribute: a column of weights at a time."""
    conv, width = kernel.rows.conv, kernel.rows.conv.width
    weight = conv.contraction.right.source

    def steps(lane: ir.Expr) -> tirx.Stmt:
        return sequence(
            [
                step(row, out, tap, column, x, lane)
                for column, x in kernel.columns.taps
                for row, uses in lines
                for out, tap in uses
            ]
            or [tirx.Evaluate(integer(0))]
        )

    def step(row: ir.Expr, out: int, tap: int | ir.Expr, column: int, x: int, lane: ir.Expr) -> tirx.Stmt:
        value = kernel.input_at(row, x * width.stride + column * width.dilation, lane)
        factor = tirx.BufferLoad(
            weight, [kernel.rows.block, integer(tap) if isinstance(tap, int) else tap, integer(column), lane]
        )
        total, at = kernel.sum_at(out, x, lane)
        return tirx.BufferStore(kernel.sums, total + value * factor, at)

    return vectorized(conv.output_lanes, steps)
