"""Signals cut into overlapping segments, one for each lane of a vector, and put together again.

Convolution with dilation d never mixes positions x = d * p + phase of different phases: they are d signals of
their own. A signal is cut into segments of N inputs that give `valid` outputs each ("overlap-save"). The one
half of an image's segments are real parts of complex signals and the other half imaginary parts, which real
weights do not mix. A lane has one such pair; tasks are as many pairs, of one or several images, as lanes.

With several phases, segments of different phases are neighbours in memory and are copied sample by sample.
Without dilation the samples of a segment are neighbours: they are copied as a line, and lines are transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.conv1d.fourier.dft import Plane
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    ceil_div,
    integer,
    loop,
    prefetch,
    sequence,
    vectorized,
)
from hybridc.schedules.cpu.core.nest import loads

_PARTS = 2
_SEGMENT_COST = 40.0
"""Operations that beginning and ending a contiguous segment takes, in or out."""
_LOCALITY = 2
"""Prefetch into the second level of cache: the work plane fills most of the first."""
_LARGE_ELEMENTS = 1 << 16
"""Tensors of more elements are in no near cache, and worth prefetching."""

Element = Callable[[ir.Expr, ir.Expr], tirx.Stmt]
"""`element(p, lane)` copies sample p of a piece's segment `lane`."""
Output = Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr], tirx.BufferStore]
"""`output(batch, channel, x, value)` writes a sample, through the epilogue."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Segments that are neighbours in memory; sample p of the first lies at x = start + p * phases."""

    part: ir.Expr
    lane: ir.Expr
    exists: ir.Expr
    batch: ir.Expr
    start: ir.Expr


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a task has one channel's segments."""

    work: Plane
    """Sample by sample, as transforms want them: `[1, N, 2, lanes]`, N rounded up to full vectors."""
    lines: ir.Var
    """Segment by segment, `[2, lanes, N]`, where segments are contiguous."""
    buffers: tuple[ir.Var, ...]
    """Those of them that are used."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What segments are read from, a parameter `[N, C, X]` or `[N, C, 1, X]` without padding."""

    data: ir.Var
    before: int
    """Zeros in front of it."""
    samples: int
    """Samples of a segment that are read; those behind them count as zero."""

    @property
    def end(self) -> int:
        """Where it ends, the zeros in front of it counted."""
        return self.before + int(self.data.shape[-1])

    def at(self, batch: ir.Expr, channel: ir.Expr, x: ir.Expr) -> tirx.BufferLoad:
        """The sample at padded position x, which has to exist."""
        line = [integer(0)] * (len(self.data.shape) - 3)
        return tirx.BufferLoad(self.data, [batch, channel, *line, x - integer(self.before)])


@dataclass(frozen=True, slots=True)
class Segments:
    """How the signals of a convolution along one axis, without stride, are cut."""

    batches: int
    outputs: int
    taps: int
    phases: int
    """Its dilation."""
    points: int
    """Inputs of a segment."""
    lanes: int

    @property
    def valid(self) -> int:
        """Outputs of a segment: those of a cyclic convolution that do not wrap around."""
        return self.points - self.taps + 1

    @property
    def per_signal(self) -> int:
        """Segments of one phase of an image's signal."""
        return ceil_div(ceil_div(self.outputs, self.phases), self.valid)

    @property
    def per_image(self) -> int:
        """Segment s of a phase is number `s * phases + phase`."""
        return self.per_signal * self.phases

    @property
    def piece(self) -> int:
        """Segments, and lanes, that are neighbours in memory."""
        return math.gcd(self.phases, self.lanes)

    @property
    def pairs(self) -> int:
        """Pairs of an image: pieces are not divided."""
        return ceil_div(self.per_image, _PARTS * self.piece) * self.piece

    @property
    def tasks(self) -> int:
        """Of all images: each fills the lanes of a vector with pairs of segments."""
        return ceil_div(self.batches * self.pairs, self.lanes)

    @property
    def blocks(self) -> int:
        """Vectors of samples of a segment."""
        return ceil_div(self.points, self.lanes)

    @property
    def contiguous(self) -> bool:
        """Whether the samples of a segment are neighbours in memory, which dilation prevents."""
        return self.phases == 1

    @property
    def copy_operations(self) -> float:
        """Loads, stores and shuffles of a sample of all lanes, in and out."""
        if not self.contiguous:
            return 4.0 * self.lanes / self.piece
        return 16.0 + 2 * _PARTS * self.lanes * _SEGMENT_COST / self.points

    def scratch(self) -> Scratch:
        """Buffers of a task for the segments of one channel."""
        samples = self.blocks * self.lanes
        work = tirx.decl_buffer((1, samples, _PARTS, self.lanes), "float32", "work")
        lines = tirx.decl_buffer((_PARTS, self.lanes, samples), "float32", "lines")
        used = (work, lines) if self.contiguous else (work,)
        return Scratch(Plane(work, integer(0)), lines, used)


def gather(cut: Segments, signal: Signal, scratch: Scratch, task: ir.Expr, channel: ir.Expr) -> tirx.Stmt:
    """Copy the segments of a task and channel to `scratch.work`, zero where there is no input."""

    def read(piece: Piece) -> tirx.Stmt:
        def position(p: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return piece.start + p * integer(cut.phases) + lane

        def store(p: ir.Expr, lane: ir.Expr, value: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(*_sample(cut, scratch, piece, p, lane, value))

        def whole(p: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return store(p, lane, signal.at(piece.batch, channel, position(p, lane)))

        def edge(p: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            x = position(p, lane)
            inside = tirx.all(piece.exists, x >= integer(signal.before), x < integer(signal.end))
            value = signal.at(piece.batch, channel, x)
            return store(p, lane, tirx.if_then_else(inside, value, tirx.FloatImm("float32", 0.0)))

        def zero(p: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            return store(p, lane, tirx.FloatImm("float32", 0.0))

        # samples that all segments of the piece read inside
        low = _steps(cut, integer(signal.before) - piece.start, signal.samples)
        high = _steps(cut, integer(signal.end - cut.piece + 1) - piece.start, signal.samples)
        high = tirx.Select(piece.exists, tirx.max(low, high), low)
        samples, points = integer(signal.samples), integer(cut.points)
        return sequence([
            _one_by_one(cut, integer(0), low, edge),
            _by_vectors(cut, low, high, whole),
            _one_by_one(cut, high, samples, edge),
            *([_by_vectors(cut, samples, points, zero)] if signal.samples < cut.points else []),
        ])  # fmt: skip

    copied = _pieces(cut, task, read)
    return tirx.SeqStmt([copied, _transpose(cut, scratch, forward=True)]) if cut.contiguous else copied


def scatter(cut: Segments, output: Output, scratch: Scratch, task: ir.Expr, channel: ir.Expr) -> tirx.Stmt:
    """Write the outputs of a task and channel from `scratch.work`."""

    def write(piece: Piece) -> tirx.Stmt:
        def whole(p: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            zero = tirx.FloatImm("float32", 0.0)
            buffer, _, at = _sample(cut, scratch, piece, p, lane, zero)
            x = piece.start + p * integer(cut.phases) + lane
            return output(piece.batch, channel, x, tirx.BufferLoad(buffer, at))

        def edge(p: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            exists = piece.start + p * integer(cut.phases) + lane < integer(cut.outputs)
            return tirx.IfThenElse(exists, whole(p, lane), None)

        full = _steps(cut, integer(cut.outputs - cut.piece + 1) - piece.start, cut.valid)
        some = _steps(cut, integer(cut.outputs) - piece.start, cut.valid)
        stores = tirx.SeqStmt([_by_vectors(cut, integer(0), full, whole), _one_by_one(cut, full, some, edge)])
        return tirx.IfThenElse(piece.exists, stores, None)

    copied = _pieces(cut, task, write)
    return tirx.SeqStmt([_transpose(cut, scratch, forward=False), copied]) if cut.contiguous else copied


def prefetch_inputs(
    cut: Segments, signal: Signal, task: ir.Expr, channel: ir.Expr, first: ir.Expr, count: int
) -> tirx.Stmt:
    """Prefetch `count` samples of every segment, from sample `first` on."""

    def fetch(piece: Piece, x: ir.Expr) -> list[tirx.Stmt]:
        return [prefetch(signal.at(piece.batch, channel, x), _LOCALITY)]

    return _each_line(cut, task, first, count, fetch)


def prefetch_outputs(
    cut: Segments, output: Output, task: ir.Expr, channel: ir.Expr, first: ir.Expr, count: int
) -> tirx.Stmt:
    """Prefetch where samples will be written, and what the epilogue reads there."""

    def fetch(piece: Piece, x: ir.Expr) -> list[tirx.Stmt]:
        store = output(piece.batch, channel, x, tirx.FloatImm("float32", 0.0))
        read = [load for load in loads(store.value) if _elements(load.source) > _LARGE_ELEMENTS]
        target = tirx.BufferLoad(store.buffer, store.indices)
        return [prefetch(load, _LOCALITY) for load in (*read, target)]

    return _each_line(cut, task, first, count, fetch)


def _pieces(cut: Segments, task: ir.Expr, body: Callable[[Piece], tirx.Stmt]) -> tirx.Stmt:
    """A loop over the pieces of a task."""

    def piece(index: ir.Expr) -> tirx.Stmt:
        first = index * integer(cut.piece)
        part, lane = tirx.floordiv(first, integer(cut.lanes)), tirx.floormod(first, integer(cut.lanes))
        pair = task * integer(cut.lanes) + lane
        batch = tirx.floordiv(pair, integer(cut.pairs))
        number = part * integer(cut.pairs) + tirx.floormod(pair, integer(cut.pairs))
        exists = tirx.all(batch < integer(cut.batches), number < integer(cut.per_image))
        segment, phase = (f(number, integer(cut.phases)) for f in (tirx.floordiv, tirx.floormod))
        return body(Piece(part, lane, exists, batch, segment * integer(cut.valid * cut.phases) + phase))

    return loop(_PARTS * cut.lanes // cut.piece, piece)


def _sample(
    cut: Segments, scratch: Scratch, piece: Piece, p: ir.Expr, lane: ir.Expr, value: ir.Expr
) -> tuple[ir.Var, ir.Expr, list[ir.Expr]]:
    """Arguments of a store of sample p of a piece's segment `lane`."""
    if cut.contiguous:
        return scratch.lines, value, [piece.part, piece.lane, p]
    return scratch.work.buffer, value, [integer(0), p, piece.part, piece.lane + lane]


def _steps(cut: Segments, distance: ir.Expr, most: int) -> ir.Expr:
    """How many samples begin within a distance, at most `most`."""
    steps = tirx.floordiv(distance + integer(cut.phases - 1), integer(cut.phases))
    return tirx.max(integer(0), tirx.min(steps, integer(most)))


def _one_by_one(cut: Segments, first: ir.Expr, last: ir.Expr, element: Element) -> tirx.Stmt:
    return loop(last - first, lambda i: loop(cut.piece, lambda lane: element(first + i, lane)))


def _by_vectors(cut: Segments, first: ir.Expr, last: ir.Expr, element: Element) -> tirx.Stmt:
    """Vectors across segments, or along contiguous ones."""
    if not cut.contiguous:
        return loop(last - first, lambda i: vectorized(cut.piece, lambda lane: element(first + i, lane)))
    lanes = integer(cut.lanes)
    vectors = tirx.floordiv(last - first, lanes)

    def vector(i: ir.Expr) -> tirx.Stmt:
        return vectorized(cut.lanes, lambda lane: element(first + i * lanes + lane, integer(0)))

    return tirx.SeqStmt([loop(vectors, vector), _one_by_one(cut, first + vectors * lanes, last, element)])


def _transpose(cut: Segments, scratch: Scratch, *, forward: bool) -> tirx.Stmt:
    """Between segments and samples, `lanes` x `lanes` at a time: from lines to work, or back."""
    lanes = cut.lanes

    def block(part: ir.Expr, number: ir.Expr) -> tirx.Stmt:
        first = number * integer(lanes)
        lines = [[part, integer(i), tirx.Ramp(first, integer(1), lanes)] for i in range(lanes)]
        samples = [
            [integer(0), first + integer(i), part, tirx.Ramp(integer(0), integer(1), lanes)]
            for i in range(lanes)
        ]
        work = scratch.work.buffer
        places = (scratch.lines, lines, work, samples) if forward else (work, samples, scratch.lines, lines)
        return transpose_square(*places)

    return loop(_PARTS, lambda part: loop(cut.blocks, lambda number: block(part, number)))


def transpose_square(
    source: ir.Var, sources: Sequence[list[ir.Expr]], target: ir.Var, targets: Sequence[list[ir.Expr]]
) -> tirx.Stmt:
    """Store the columns of as many vectors as each of them has elements."""
    lanes = len(sources)
    statements: list[tirx.Stmt] = []

    def bind(value: ir.Expr) -> ir.Var:
        statements.append(tirx.Bind(var := tirx.Var("row", f"float32x{lanes}"), value))
        return var

    rows = _transposed([bind(tirx.BufferLoad(source, at)) for at in sources], bind)
    stores = [tirx.BufferStore(target, row, at) for row, at in zip(rows, targets, strict=True)]
    return tirx.SeqStmt([*statements, *stores])


def _transposed(rows: list[ir.Var], bind: Callable[[ir.Expr], ir.Var]) -> list[ir.Var]:
    """Exchange one bit of the row's with the same bit of the column's number, bit by bit."""
    lanes = len(rows)
    span = lanes // 2
    while span:
        low = [k if not k & span else lanes + k - span for k in range(lanes)]
        high = [k + span if not k & span else lanes + k for k in range(lanes)]
        pairs = {i: (rows[i & ~span], rows[i | span]) for i in range(lanes)}
        rows = [bind(tirx.Shuffle(list(pairs[i]), high if i & span else low)) for i in range(lanes)]
        span //= 2
    return rows


def _each_line(
    cut: Segments,
    task: ir.Expr,
    first: ir.Expr,
    count: int,
    fetch: Callable[[Piece, ir.Expr], list[tirx.Stmt]],
) -> tirx.Stmt:
    """`fetch(piece, x)` for about each cache line of `count` samples of every piece."""
    step = max(CACHE_LINE_FLOATS // cut.phases, 1)

    def line(piece: Piece, i: ir.Expr) -> tirx.Stmt:
        p = first + i * integer(step)
        return sequence(fetch(piece, piece.start + p * integer(cut.phases)))

    return _pieces(cut, task, lambda piece: loop(ceil_div(count, step), lambda i: line(piece, i)))


def _elements(buffer: ir.Var) -> int:
    return math.prod(int(extent) for extent in buffer.shape)
