"""The three stages of a Winograd convolution as loop nests: transform the input, multiply, transform back.

    V[xi][ib][tile][i]  = B^T d B           points * points values for each tile and input channel
    M[xi][ob][tile][o]  = sum over ib, i of V[xi][ib][tile][i] * U[xi][ob][ib][i][o]
    out                 = epilogue(A^T M A)

(Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016.) A vector holds channels of one
pixel, so that transforms need no shuffles, and padding is a condition on whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.conv2d_blocked.read import BlockedAxis, BlockedConvolution
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_BYTES,
    CACHE_LINE_FLOATS,
    UNROLLED_MULTIPLY_ADDS,
    Tile,
    ceil_div,
    clamp,
    integer,
    loop,
    prefetch,
    sequence,
    unrolled,
    vectorized,
    when,
)
from hybridc.schedules.cpu.winograd.toom_cook import ToomCook


@dataclass(frozen=True, slots=True)
class Planes:
    """Scratch memory `[xi][block][tile][lane]` for some tiles and channel blocks, a plane for each xi.

    Planes are an odd number of cache lines apart: writing one element of each would otherwise fall into few
    sets of the cache.
    """

    buffer: ir.Var
    tiles: int
    lanes: int

    @staticmethod
    def of(name: str, count: int, blocks: int, tiles: int, lanes: int) -> Planes:
        """Scratch memory for `count` planes of so many channel blocks, tiles and lanes."""
        lines = ceil_div(blocks * tiles * lanes * 4, CACHE_LINE_BYTES) | 1
        return Planes(tirx.decl_buffer((count, lines * CACHE_LINE_FLOATS), "float32", name), tiles, lanes)

    def index(self, xi: ir.Expr, block: ir.Expr, tile: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        """Where a lane of a tile and channel block is in plane xi."""
        return [xi, (block * integer(self.tiles) + tile) * integer(self.lanes) + lane]

    def load(self, xi: ir.Expr, block: ir.Expr, tile: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """Its value."""
        return tirx.BufferLoad(self.buffer, self.index(xi, block, tile, lane))

    def store(self, xi: ir.Expr, block: ir.Expr, tile: ir.Expr, lane: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        """A statement that writes it."""
        return tirx.BufferStore(self.buffer, value, self.index(xi, block, tile, lane))


@dataclass(frozen=True, slots=True)
class Weight:
    """U of one pass and point: `[pass, k, q, group, IB, i, vector, o]`, where a group has `width` vectors.

    Apart from each other, `[OB, k, q, 1, IB, i, 1, o]`, vectors are read in as many streams.
    """

    buffer: ir.Var
    at: tuple[ir.Expr, ir.Expr, ir.Expr]
    """Pass, k and q."""
    shares: int
    """Micro-kernels that share a group."""
    groups: int
    """Of a pass."""
    width: int
    are_apart: bool = False

    def load(self, group: ir.Expr, ib: ir.Expr, i: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """The weight of input channel i of block ib for a lane of a group's vector."""
        if self.are_apart:
            return tirx.BufferLoad(self.buffer, [*self._stream(group, vector), ib, i, integer(0), lane])
        return tirx.BufferLoad(self.buffer, [*self.at, group, ib, i, vector, lane])

    def _stream(self, group: ir.Expr, vector: ir.Expr) -> list[ir.Expr]:
        """Where the stream of a vector begins; of one behind the last block, which nobody stores, another."""
        index, k, q = self.at
        blocks, together = int(self.buffer.shape[0]), self.groups * self.width
        block = (index * integer(self.groups) + group) * integer(self.width) + vector
        return [clamp(block, blocks, inside=blocks % together == 0), k, q, integer(0)]

    @property
    def step_bytes(self) -> int:
        """What a micro-kernel reads for one input channel."""
        return self.width * int(self.buffer.shape[-1]) * 4

    def prefetch(self, group: ir.Expr, chunk: ir.Expr, steps: int) -> list[tirx.Stmt]:
        """Share of the `chunk`-th `steps` steps, of all micro-kernels of a group, in what lies behind it."""
        zero = integer(0)
        if self.are_apart:
            count = ceil_div(steps * self.step_bytes, CACHE_LINE_BYTES * self.shares * self.width)
            streams = [self._stream(group + integer(1), integer(vector)) for vector in range(self.width)]
        else:
            count = ceil_div(steps * self.step_bytes, CACHE_LINE_BYTES * self.shares)
            streams = [[*self.at, group]]
        start = 0 if self.are_apart else math.prod(int(e) for e in self.buffer.shape[-4:])
        lines = [integer(start) + (chunk * integer(count) + integer(n)) * integer(CACHE_LINE_FLOATS)
                 for n in range(count)]  # fmt: skip
        places = [[*stream, zero, zero, zero, line] for stream in streams for line in lines]
        return [prefetch(tirx.BufferLoad(self.buffer, place), 2) for place in places]


def tile_counts(conv: BlockedConvolution, algorithm: ToomCook) -> tuple[int, int, int]:
    """Images, and rows and columns of tiles that cover the outputs of one."""
    rows, columns = (ceil_div(axis.outputs, algorithm.outputs) for axis in (conv.height, conv.width))
    return conv.batches, rows, columns


@dataclass(frozen=True, slots=True)
class Stages:
    """Emits the stages of one convolution; tiles are numbered through all images, row by row."""

    conv: BlockedConvolution
    algorithm: ToomCook
    patch: list[ir.Var]
    """The inputs of a tile that sticks out. This and the next two are small enough to stay in registers."""
    half: list[ir.Var]
    """A tile after the first pass of the input transform."""
    half_out: list[ir.Var]
    """A tile after the first pass of the output transform."""
    sums: list[ir.Var]
    """Accumulators of the micro-kernels emitted so far."""

    @staticmethod
    def of(conv: BlockedConvolution, algorithm: ToomCook) -> Stages:
        """Declare the registers of a convolution's stages."""
        points, outputs = algorithm.points, algorithm.outputs

        def lines(name: str, count: int, lanes: int) -> list[ir.Var]:
            return [tirx.decl_buffer((points, lanes), "float32", f"{name}{i}") for i in range(count)]

        patch, half = (lines(name, points, conv.input_lanes) for name in ("patch", "half"))
        half_out = lines("half_out", outputs, conv.output_lanes)
        return Stages(conv, algorithm, patch, half, half_out, [])

    @property
    def buffers(self) -> list[ir.Var]:
        """What the root block has to allocate."""
        return [*self.patch, *self.half, *self.half_out, *self.sums]

    def _place(self, tile: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
        """Image, and first output line and column, of a tile."""
        _, rows, columns = tile_counts(self.conv, self.algorithm)
        row, outputs = tirx.floordiv(tile, integer(columns)), integer(self.algorithm.outputs)
        n = tirx.floordiv(row, integer(rows)) if self.conv.batches > 1 else integer(0)
        line = tirx.floormod(row, integer(rows)) if self.conv.batches > 1 else row
        return n, line * outputs, tirx.floormod(tile, integer(columns)) * outputs

    def input_transform(self, v: Planes, block: ir.Expr, tile: ir.Expr, slot: ir.Expr) -> tirx.Stmt:
        """V of one tile and channel block, written to tile `slot` of the planes.

        A tile inside the image reads without conditions; another one reads zero where there is padding.
        """
        points, lanes = self.algorithm.points, self.conv.input_lanes
        n, line, column = self._place(tile)
        y0, x0 = line - integer(self.conv.height.before), column - integer(self.conv.width.before)
        inside = [*self._inside(y0, self.conv.height), *self._inside(x0, self.conv.width)]

        def copy(y: int, x: ir.Expr) -> tirx.Stmt:
            def vector(lane: ir.Expr) -> tirx.Stmt:
                value = self._read_padded(n, block, y0 + integer(y), x0 + x, lane)
                return tirx.BufferStore(self.patch[y], value, [x, lane])

            return vectorized(lanes, vector)

        def direct(y: int, x: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return self._read(n, block, y0 + integer(y), x0 + x, lane)

        def copied(y: int, x: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(self.patch[y], [x, lane])

        def across(k: int, q: int) -> tirx.Stmt:
            def vector(lane: ir.Expr) -> tirx.Stmt:
                inputs = [tirx.BufferLoad(self.half[k], [integer(x), lane]) for x in range(points)]
                value = self.algorithm.transform_input(inputs)[q]
                return v.store(integer(k * points + q), block, slot, lane, value)

            return vectorized(lanes, vector)

        first = self._columns_of_input(direct)
        if inside:
            copies = unrolled(points, lambda x: tirx.SeqStmt([copy(y, x) for y in range(points)]))
            padded = tirx.SeqStmt([copies, self._columns_of_input(copied)])
            first = tirx.IfThenElse(tirx.all(*inside), first, padded)
        return sequence([first, *(across(k, q) for k in range(points) for q in range(points))])

    def _columns_of_input(self, read: Callable[[int, ir.Expr, ir.Expr], ir.Expr]) -> tirx.Stmt:
        """The first pass, into `half`: the columns of a tile whose elements are `read(y, x, lane)`."""
        points = self.algorithm.points

        def element(x: ir.Expr, k: int) -> tirx.Stmt:
            def vector(lane: ir.Expr) -> tirx.Stmt:
                inputs = [read(y, x, lane) for y in range(points)]
                value = self.algorithm.transform_input(inputs)[k]
                return tirx.BufferStore(self.half[k], value, [x, lane])

            return vectorized(self.conv.input_lanes, vector)

        return unrolled(points, lambda x: tirx.SeqStmt([element(x, k) for k in range(points)]))

    def _read(self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return self.conv.input_at(n, block, y, x, lane)[0]

    def _read_padded(self, n: ir.Expr, block: ir.Expr, y: ir.Expr, x: ir.Expr, lane: ir.Expr) -> ir.Expr:
        """Zero outside the image, be it padding or an input of outputs that do not exist."""
        height, width = integer(self.conv.height.inputs), integer(self.conv.width.inputs)
        exists = tirx.all(y >= 0, y < height, x >= 0, x < width)
        return tirx.if_then_else(exists, self._read(n, block, y, x, lane), tirx.FloatImm("float32", 0.0))

    def _inside(self, start: ir.Expr, axis: BlockedAxis) -> list[ir.Expr]:
        """Conditions under which a tile that starts there lies within the image."""
        last = (ceil_div(axis.outputs, self.algorithm.outputs) - 1) * self.algorithm.outputs - axis.before
        below = [start >= 0] if axis.before > 0 else []
        reach = axis.inputs - self.algorithm.points
        return [*below, start <= integer(reach)] if last > reach else below

    def multiply(
        self, v: Planes, m: Planes, kernel: Tile, weight: Weight, at: tuple[ir.Expr, ir.Expr, ir.Expr]
    ) -> tirx.Stmt:
        """M at `at`: plane xi, the group-th `kernel.width` output blocks, the rows-th `kernel.rows` tiles.

        The micro-kernel runs over all input channels. Beside it weights of the next group are prefetched:
        else the first of the micro-kernels that share a group would wait for them, and for long.
        """
        xi, group, rows = at
        blocks, lanes = self.conv.input_blocks, self.conv.input_lanes
        first_tile, first_block = rows * integer(kernel.rows), group * integer(kernel.width)
        # a buffer each row: what exceeds 1 KiB is not on the stack, and leaves the registers at a prefetch
        sums = [
            tirx.decl_buffer((kernel.width, kernel.lanes), "float32", f"sums{r}") for r in range(kernel.rows)
        ]
        self.sums.extend(sums)

        def each(body: Callable[[int, ir.Expr, ir.Expr], tirx.Stmt]) -> list[tirx.Stmt]:
            def vector(r: int, c: ir.Expr) -> tirx.Stmt:
                return vectorized(kernel.lanes, lambda lane: body(r, c, lane))

            return [unrolled(kernel.width, partial(vector, r)) for r in range(kernel.rows)]

        def clear(r: int, c: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(sums[r], tirx.FloatImm("float32", 0.0), [c, lane])

        def write(r: int, c: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(sums[r], [c, lane])
            return m.store(xi, first_block + c, first_tile + integer(r), lane, value)

        def step(ib: ir.Expr, i: ir.Expr) -> tirx.Stmt:
            def add(r: int, c: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
                product = v.load(xi, ib, first_tile + integer(r), i) * weight.load(group, ib, i, c, lane)
                return tirx.BufferStore(sums[r], tirx.BufferLoad(sums[r], [c, lane]) + product, [c, lane])

            return sequence(each(add))

        steps = _steps_together(lanes, kernel, weight)

        def some(ib: ir.Expr, i: ir.Expr) -> tirx.Stmt:
            chunk = (rows * integer(blocks) + ib) * integer(lanes // steps) + i
            body = unrolled(steps, lambda t: step(ib, i * integer(steps) + t))
            return sequence([*weight.prefetch(group, chunk, steps), body])

        reduction = loop(blocks, lambda ib: loop(lanes // steps, lambda i: some(ib, i)))
        return sequence([*each(clear), reduction, *each(write)])

    def output_transform(
        self, m: Planes, slot_block: ir.Expr, slot: ir.Expr, block: ir.Expr, tile: ir.Expr
    ) -> tirx.Stmt:
        """Outputs of a tile and output block, whose products are at (`slot_block`, `slot`) of the planes."""
        algorithm, conv = self.algorithm, self.conv
        points, outputs, lanes = algorithm.points, algorithm.outputs, conv.output_lanes
        n, line, column = self._place(tile)

        def down(x: ir.Expr, y: int) -> tirx.Stmt:
            def vector(lane: ir.Expr) -> tirx.Stmt:
                products = [m.load(integer(k * points) + x, slot_block, slot, lane) for k in range(points)]
                value = algorithm.transform_output(products)[y]
                return tirx.BufferStore(self.half_out[y], value, [x, lane])

            return vectorized(lanes, vector)

        def store(y: int, x: int) -> tirx.Stmt:
            def vector(lane: ir.Expr) -> tirx.Stmt:
                sums = [tirx.BufferLoad(self.half_out[y], [integer(q), lane]) for q in range(points)]
                value = algorithm.transform_output(sums)[x]
                return conv.store(n, block, line + integer(y), column + integer(x), lane, value)

            exists = column + integer(x) < integer(conv.width.outputs)
            return when(exists, vectorized(lanes, vector), always=conv.width.outputs % outputs == 0)

        def store_line(y: int) -> tirx.Stmt:
            whole = tirx.SeqStmt([store(y, x) for x in range(outputs)])
            exists = line + integer(y) < integer(conv.height.outputs)
            return when(exists, whole, always=conv.height.outputs % outputs == 0)

        first = unrolled(points, lambda x: tirx.SeqStmt([down(x, y) for y in range(outputs)]))
        return tirx.SeqStmt([first, *(store_line(y) for y in range(outputs))])


def _steps_together(lanes: int, kernel: Tile, weight: Weight) -> int:
    """Steps to unroll: two, or as many as share out whole cache lines to prefetch, while code stays small."""
    steps = 2
    while (
        steps * weight.step_bytes < CACHE_LINE_BYTES * weight.shares
        and 2 * steps * kernel.rows * kernel.width <= 2 * UNROLLED_MULTIPLY_ADDS
    ):
        steps *= 2
    return math.gcd(lanes, steps)
