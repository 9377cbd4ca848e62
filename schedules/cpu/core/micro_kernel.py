"""The micro-kernel that convolution and matrix product share, and the loops around it.

A tile is `rows` x `vectors` accumulators that stay in registers while the whole reduction runs:

    for k:  for m in rows:  for c in vectors:  acc[m, c, :] += left(k, m) * right(k, c, :)

`left` is a scalar that is broadcast, `right` a contiguous vector, so each step costs `rows` + `vectors`
loads for `rows` * `vectors` multiply-adds (Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008). Rows are the outer loop and vectors the inner one: LLVM spills the other order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, s_tir, tirx

from hybridc.targets import Isa

INDEX = "int64"
Point = Sequence[ir.Expr]

CACHE_LINE_BYTES = 64
CACHE_LINE_FLOATS = CACHE_LINE_BYTES // 4
"""A cache line of every x86 processor: what a prefetch fetches, and how far apart those of a stream are."""
UNROLLED_MULTIPLY_ADDS = 96
"""A loop body is unrolled up to about this many vector instructions: enough to hide the loop, and LLVM
takes well below a second for it."""
PARALLEL_WORK = 1 << 15
"""Multiply-adds (or elements moved) below which a parallel region costs more than it saves."""


def integer(value: int) -> tirx.IntImm:
    """An index; 64 bits wide, as offsets into large tensors need."""
    return tirx.IntImm(INDEX, value)


def loop(
    extent: int | ir.Expr, body: Callable[[ir.Var], tirx.Stmt], kind: tirx.ForKind = tirx.ForKind.SERIAL
) -> tirx.Stmt:
    """A loop from zero; an extent of one makes none."""
    if isinstance(extent, int):
        # a constant index, where a loop of one iteration would have a variable one
        if extent == 1:
            return body(integer(0))
        extent = integer(extent)
    var = tirx.Var("i", INDEX)
    return tirx.For(var, integer(0), extent, kind, body(var))


def unrolled(extent: int, body: Callable[[ir.Var], tirx.Stmt]) -> tirx.Stmt:
    """A loop that TVM unrolls, for indices that have to be constants."""
    return loop(extent, body, tirx.ForKind.UNROLLED)


def vectorized(lanes: int, body: Callable[[ir.Var], tirx.Stmt]) -> tirx.Stmt:
    """One vector operation: `body(lane)` for each lane."""
    return loop(lanes, body, tirx.ForKind.VECTORIZED)


def grid(
    extents: Sequence[int], body: Callable[[tuple[ir.Expr, ...]], tirx.Stmt], *, parallel: bool = False
) -> tirx.Stmt:
    """A loop nest fused into one loop, so that threads share all of it evenly."""

    # one loop: TVM splits a parallel loop evenly, and nested ones only along the outermost
    kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
    return loop(math.prod(extents), lambda flat: body(unflattened(flat, extents)), kind)


def unflattened(flat: ir.Expr, extents: Sequence[int]) -> tuple[ir.Expr, ...]:
    """The point of a nest of these extents whose number is `flat`."""
    point: list[ir.Expr] = []
    for extent in reversed(extents):
        point.append(tirx.floormod(flat, integer(extent)) if extent > 1 else integer(0))
        flat = tirx.floordiv(flat, integer(extent))
    return tuple(reversed(point))


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators of one micro-kernel: `rows` scalars times `image_rows` x `width` vectors of `lanes`."""

    rows: int
    image_rows: int
    """Rows of an image that share the scalars; 1 for a matrix."""
    width: int
    lanes: int

    @property
    def vectors(self) -> int:
        """Of each scalar."""
        return self.image_rows * self.width

    @property
    def columns(self) -> int:
        """Elements of one image row, or of one row of a matrix."""
        return self.width * self.lanes


def ceil_div(value: int, step: int) -> int:
    """`value / step`, rounded up."""
    return -(-value // step)


def lanes_for(isa: Isa, columns: int) -> int:
    """Lanes of the vectors along rows of so many columns: half of AVX-512's where they hold a whole row."""
    # half of AVX2's would have but four lanes
    return isa.lanes() // 2 if columns * 2 <= isa.lanes() and isa.lanes() > 8 else isa.lanes()


def rank_tiles(
    isa: Isa,
    shape: tuple[int, int, int],
    *,
    divide_rows: bool = False,
    slowdown: Callable[[int], float] = lambda tiles: 1.0,
) -> tuple[Tile, ...]:
    """Tiles for an output of rows x image rows x columns, the one of the least predicted time first.

    Predicted time is padded work (tiles stick out at the edges) times the load of the pipeline: two
    vector loads or multiply-adds a cycle, of which each waits a few steps for its own result.
    `divide_rows` demands tiles that do not stick out in rows; `slowdown` is how many times longer so many
    tiles take because threads cannot share them evenly.
    """
    rows, image_rows, columns = shape
    lanes = lanes_for(isa, columns)
    row_vectors = ceil_div(columns, lanes)

    def cost(tile: Tile) -> float:
        # tiles stick out at the edges in each of the three directions
        tiles = (
            ceil_div(rows, tile.rows)
            * ceil_div(image_rows, tile.image_rows)
            * ceil_div(row_vectors, tile.width)
        )
        padded = tiles * tile.rows * tile.image_rows * tile.width
        sums = tile.rows * tile.vectors
        loads = (tile.rows + tile.vectors) / sums
        return padded * max(1.0, isa.sums_in_flight / sums) * (1.0 + 0.5 * loads) * slowdown(tiles)

    # accumulators, the right factor's vectors and a broadcast scalar have to fit the registers; the outer
    # limits only bound the search
    candidates = [
        Tile(m, d, w, lanes)
        for m in range(1, min(rows, 16) + 1)
        for d in range(1, min(image_rows, 8) + 1)
        for w in range(1, min(row_vectors, 8) + 1)
        if m * d * w + d * w + 1 <= isa.vector_registers and not (divide_rows and rows % m)
    ]
    return tuple(sorted(candidates, key=lambda tile: (cost(tile), tile.image_rows)))


def micro_kernel(
    tile: Tile,
    reduction: Sequence[int],
    left: Callable[[Point, ir.Expr], ir.Expr],
    right: Callable[[Point, ir.Expr, ir.Expr, ir.Expr], ir.Expr],
    write: Callable[[Callable[..., ir.Expr]], tirx.Stmt],
) -> tuple[tirx.Stmt, ir.Var]:
    """Zero the accumulators, run the reduction, write the result.

    `left(k, m)` and `right(k, image_row, vector, lane)` give the factors, `write(sum_at)` the statement that
    stores, where `sum_at(m, image_row, vector, lane)` is a finished sum. Returns the accumulators' buffer,
    which the function's root block must allocate, too.
    """
    # indices are constants once loops are unrolled, so that LLVM makes registers of it
    sums = tirx.decl_buffer((tile.rows, tile.vectors, tile.lanes), "float32", "sums", scope="local")

    def sum_indices(m: ir.Expr, y: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
        return [m, y * integer(tile.width) + vector, lane]

    def sum_at(m: ir.Expr, y: ir.Expr, vector: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(sums, sum_indices(m, y, vector, lane))

    def each_vector(body: Callable[..., tirx.Stmt]) -> tirx.Stmt:
        def row(m: ir.Expr) -> tirx.Stmt:
            return unrolled(tile.image_rows, lambda d: unrolled(tile.width, lambda w: vector(m, d, w)))

        def vector(m: ir.Expr, d: ir.Expr, w: ir.Expr) -> tirx.Stmt:
            return vectorized(tile.lanes, lambda lane: body(m, d, w, lane))

        return unrolled(tile.rows, row)

    def clear(m: ir.Expr, d: ir.Expr, w: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        return tirx.BufferStore(sums, tirx.FloatImm("float32", 0.0), sum_indices(m, d, w, lane))

    def accumulate(k: Point) -> tirx.Stmt:
        def step(m: ir.Expr, d: ir.Expr, w: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            product = left(k, m) * right(k, d, w, lane)
            return tirx.BufferStore(sums, sum_at(m, d, w, lane) + product, sum_indices(m, d, w, lane))

        return each_vector(step)

    body = tirx.SeqStmt(
        [each_vector(clear), _reduction_loops(reduction, tile.rows * tile.vectors, accumulate), write(sum_at)]
    )
    return body, sums


def _reduction_loops(
    extents: Sequence[int], multiply_adds: int, body: Callable[[Point], tirx.Stmt]
) -> tirx.Stmt:
    """The reduction's loops; the innermost ones are unrolled while the body stays small."""
    budget = max(UNROLLED_MULTIPLY_ADDS // multiply_adds, 1)
    steps: list[int] = []
    for extent in reversed(extents):
        # a divisor: the rest of a division would need a second copy of the body
        step = max(s for s in range(1, min(extent, budget) + 1) if extent % s == 0)
        steps.insert(0, step)
        # an outer axis is unrolled only around an inner one that is unrolled whole
        budget = budget // step if step == extent else 1

    def nest(axis: int, point: tuple[ir.Expr, ...]) -> tirx.Stmt:
        if axis == len(extents):
            return body(point)
        step = steps[axis]
        return loop(extents[axis] // step, lambda outer: unrolled(
            step, lambda inner: nest(axis + 1, (*point, outer * integer(step) + inner))))  # fmt: skip

    return nest(0, ())


def write_columns(
    start: ir.Expr, columns: int, tile: Tile, vector: ir.Expr, body: Callable[[ir.Expr, ir.Expr], tirx.Stmt]
) -> tirx.Stmt:
    """Write one vector that begins at column `start` of a row of `columns`: whole, or its part that exists.

    `body(column, lane)` writes one element. The part is cut in powers of two, each a vector of its own:
    an index that is only known at run time would force the accumulators out of the registers.
    """
    first = start + vector * integer(tile.lanes)
    whole = vectorized(tile.lanes, lambda lane: body(first + lane, lane))
    # how much exists of the vector that sticks out, which is known when compiling
    tail = columns % tile.lanes
    if columns % tile.columns == 0:
        return whole
    pieces = _powers_of_two(tail, lambda at: body(first + at, at))
    partial = tirx.SeqStmt(pieces) if len(pieces) > 1 else (pieces[0] if pieces else None)
    rest = None if partial is None else tirx.IfThenElse(first < integer(columns), partial, None)
    return tirx.IfThenElse(first + integer(tile.lanes) <= integer(columns), whole, rest)


def _powers_of_two(extent: int, body: Callable[[ir.Expr], tirx.Stmt]) -> list[tirx.Stmt]:
    """Vectors of 8, 4, 2 and 1 elements that add up to `extent`."""

    def piece(offset: int, size: int) -> tirx.Stmt:
        return vectorized(size, lambda lane: body(integer(offset) + lane))

    pieces, done = [], 0
    while done < extent:
        size = 1 << ((extent - done).bit_length() - 1)
        pieces.append(piece(done, size))
        done += size
    return pieces


def sequence(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """One statement after the other; one alone stays alone."""
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts))


def prefetch(load: ir.Expr, locality: int = 3, *, write: bool = False) -> tirx.Stmt:
    """Bring a cache line into L1 (locality 3) or L2 (2), to be written if `write`.

    The element may lie past the end of its buffer: an address that does not exist does no harm.
    """
    # the last operand of llvm.prefetch is the kind of cache: 1 for data
    hints = [tirx.IntImm("int32", value) for value in (int(write), locality, 1)]
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(load), *hints))


def when(condition: ir.Expr, body: tirx.Stmt, *, always: bool) -> tirx.Stmt:
    """`body` under a condition, which is left out where it is `always` true."""
    return body if always else tirx.IfThenElse(condition, body, None)


def clamp(index: ir.Expr, extent: int, *, inside: bool) -> ir.Expr:
    """An index that stays readable where a tile sticks out; what is computed there is never written."""
    return index if inside else tirx.min(index, integer(extent - 1))


def function_of(
    original: tirx.PrimFunc, params: Sequence[ir.Var], stages: Sequence[tirx.Stmt], buffers: Sequence[ir.Var]
) -> tirx.PrimFunc:
    """A function with new parameters and body; `buffers` are its intermediates."""
    body = tirx.SeqStmt(list(stages)) if len(stages) > 1 else stages[0]
    # an opaque root: no schedule primitive is applied any more
    root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=list(buffers))
    return tirx.PrimFunc(list(params), s_tir.SBlockRealize([], True, root), original.ret_type, original.attrs)
