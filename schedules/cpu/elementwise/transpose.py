"""Outputs that an operand crosses: memory order of the one is not that of the other.

Three register tiles, by where the operand's contiguous loop lies:

    transpose    out[.., b, .., a] = in[.., a, .., b]    16 rows by 4 columns, shuffled into 4 vectors
    interleave   out[.., b, a] = in[a, .., b], a <= 8    a vector of each of `a` streams, dealt out in turn
    spread       out[.., a] = in[.., s * a], 2 <= |s| <= 8  vectors that hold s lanes' elements, and s = -1

The last tile of a loop is moved back so that it ends with the loop, and its first elements are
written twice; where the output may lie over an input that would read what it has just written, and such
an iteration space is left to contiguous runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tvm import ir, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.micro_kernel import (
    CACHE_LINE_FLOATS,
    ceil_div,
    integer,
    loop,
    prefetch,
    unrolled,
    vectorized,
)
from hybridc.schedules.cpu.core.shuffles import COLUMNS, picked, transposed
from hybridc.schedules.cpu.elementwise.index_maps import IterationSpace
from hybridc.schedules.cpu.elementwise.loops import TASK_ELEMENTS, Point, tasks, worth_threads
from hybridc.targets import Isa

Arranged = tuple[tirx.Stmt, list[ir.Var]]

BLOCK_ROWS = 256
BLOCK_COLUMNS = 64
"""A task of a transposition: long rows, so that stores come in few long streams."""
SIZES = (CACHE_LINE_FLOATS, 8, COLUMNS)
"""Rows and columns of a tile, best first: 16 floats are a cache line, read and written whole."""
STREAMS = 8
"""Interleaving more streams than this takes more shuffles than transposing does."""


def rearranged(space: IterationSpace, isa: Isa) -> tuple[tirx.Stmt, list[ir.Var]] | None:
    """Statements for a space with operands of 32 bits that shuffles bring in the output's order, and the
    registers they use; None for others."""
    if len(space.loops) == 0 or any(space.overwrites(k) for k in range(len(space.operands))):
        return None
    for arrange in (_transpose, _interleave, _spread):
        found = arrange(space, isa.lanes())
        if found is not None:
            return found
    return None


def _transpose(space: IterationSpace, lanes: int) -> Arranged | None:
    """Tiles of 16 rows and 4 columns, or up to 4 tiles side by side: 16 cache lines that are read whole.

    A task sweeps its rows, then those of the next columns. These are prefetched, and what the tile after the
    next writes, for these are too many streams for prefetchers in hardware: into L2, as rows a power of two
    apart fall into the same few sets of L1.
    """
    last = len(space.loops) - 1
    along = [_contiguous_loop(space, k) for k in range(len(space.operands))]
    column = next((b for b in along if b not in (None, last)), None)
    if column is None or any(space.depends_on_index(k) for k in (column, last)):
        return None
    # operands that lie across the output; others are read along its rows as they are
    crossing = [k for k, b in enumerate(along) if b == column and space.loops[last].strides[k]]
    rows, columns = space.loops[last].extent, space.loops[column].extent
    # a tile that sticks out is moved back, so it must not be larger than the loop
    height = next((n for n in SIZES if n <= rows), 0)
    if not height or not crossing or not all(_has_columns(space, k, columns) for k in crossing):
        return None
    width = next((n for n in SIZES if n <= columns), columns)
    registers = _registers(space, crossing, COLUMNS, height)

    def quad(point: Point) -> tirx.Stmt:
        statements: list[tirx.Stmt] = []
        for k in crossing:

            def piece(row: int, k: int = k) -> ir.Expr:
                return space.load(k, _moved(point, last, integer(row)), COLUMNS)

            made, vectors = transposed(piece, height, str(registers[k].dtype))
            statements += [*made, *_kept(registers[k], vectors)]
        moved = [_moved(point, column, integer(c)) for c in range(min(COLUMNS, width))]
        return tirx.SeqStmt([*statements, *_stores(space, moved, registers, height)])

    def tile(point: Point) -> tirx.Stmt:
        ahead = _moved(point, column, integer(width))
        reads = [space.load(k, _moved(ahead, last, integer(row))) for k in crossing for row in range(height)]
        # writes are prefetched two tiles ahead: the next one's are under way already
        after = _moved(point, last, integer(2 * height))
        writes = [space.element(_moved(after, column, integer(c))) for c in range(width)]
        fetched = [*(reads if columns > width else []), *writes]
        body = unrolled(ceil_div(width, COLUMNS), lambda q: quad(_moved(point, column, q * integer(COLUMNS))))
        return tirx.SeqStmt([*(prefetch(place, locality=2) for place in fetched), body])

    # columns outside: a task goes down its rows, so that stores are few long streams
    sizes = {column: (width, BLOCK_COLUMNS), last: (height, BLOCK_ROWS)}
    return _tiles(space, sizes, tile), list(registers.values())


def _interleave(space: IterationSpace, lanes: int) -> Arranged | None:
    """Vectors of each stream, dealt out in turn: pixel shuffle, and nearest-neighbour resizing of rows."""
    if len(space.loops) < 2:
        return None
    last = len(space.loops) - 1
    outer, inner = space.loops[-2:]
    streams = inner.extent
    steps = list(zip(outer.strides, inner.strides, strict=True))
    dealt = [k for k, step in enumerate(steps) if step not in ((streams, 1), (0, 0))]
    if streams > STREAMS or not dealt or any(steps[k][0] != 1 for k in dealt):
        return None
    if not _has_vectors(space, dealt):
        return None
    # narrower vectors are not worth the shuffles
    width = next((n for n in (lanes, 8, 4) if n <= min(outer.extent, lanes)), 0)
    if not width or any(space.depends_on_index(k) for k in (last - 1, last)):
        return None
    registers = _registers(space, dealt, streams, width)

    def tile(point: Point) -> tirx.Stmt:
        statements: list[tirx.Stmt] = []
        for k in dealt:
            count = streams if inner.strides[k] else 1
            vectors = [space.load(k, _moved(point, last, integer(s)), width) for s in range(count)]
            places = [divmod(element, streams) for element in range(streams * width)]
            picks = [(stream if count > 1 else 0, lane) for lane, stream in places]
            made = [picked(vectors, picks[v * width :][:width]) for v in range(streams)]
            statements += _kept(registers[k], made)
        moved = [_moved(point, last, integer(v * width)) for v in range(streams)]
        return tirx.SeqStmt([*statements, *_stores(space, moved, registers, width)])

    return _tiles(space, {last - 1: (width, TASK_ELEMENTS // streams), last: (streams, streams)}, tile), list(
        registers.values()
    )


def _spread(space: IterationSpace, lanes: int) -> Arranged | None:
    """Vectors that hold every element, or every second, third and so on, of a stretch of memory."""
    last = len(space.loops) - 1
    inner = space.loops[last]
    apart = [k for k, step in enumerate(inner.strides) if step not in (0, 1)]
    if not apart or any(not -STREAMS <= inner.strides[k] <= STREAMS for k in apart):
        return None
    if not _has_vectors(space, apart):
        return None
    width = next((n for n in (lanes, 8, 4) if n <= min(inner.extent, lanes)), 0)
    if not width or space.depends_on_index(last):
        return None
    registers = _registers(space, apart, 1, width)

    def tile(point: Point) -> tirx.Stmt:
        statements: list[tirx.Stmt] = []
        for k in apart:
            step = inner.strides[k]
            reach = (width - 1) * abs(step)
            shift = min(0, (width - 1) * step)
            # the last vector ends with the last element that is used, so nothing behind the buffer is read
            starts = [min(v * width, reach + 1 - width) for v in range(abs(step))]
            vectors = [space.load(k, point, width, shift + start) for start in starts]
            elements = [lane * step - shift for lane in range(width)]
            picks = [(v, e - starts[v]) for e in elements for v in [min(e // width, abs(step) - 1)]]
            statements += _kept(registers[k], [picked(vectors, picks)])
        return tirx.SeqStmt([*statements, *_stores(space, [point], registers, width)])

    body = _tiles(space, {last: (width, TASK_ELEMENTS)}, tile, along=apart[0])
    return body, list(registers.values())


def _contiguous_loop(space: IterationSpace, operand: int) -> int | None:
    found = (k for k, lp in enumerate(space.loops) if lp.strides[operand] == 1)
    is_word = dtype_bits(str(space.operands[operand].load.source.dtype)) == 32
    return next(found, None) if is_word else None


def _has_vectors(space: IterationSpace, operands: Sequence[int]) -> bool:
    """Whether elements of these can be shuffled: TVM makes bytes of booleans, but not of shuffled ones."""
    return all(str(space.operands[k].load.source.dtype) != "bool" for k in operands)


def _has_columns(space: IterationSpace, operand: int, columns: int) -> bool:
    """Whether `COLUMNS` elements can be read of every row, even if only `columns` of them are used."""
    read = space.operands[operand]
    size = math.prod(int(e) for e in read.load.source.shape)
    return columns >= COLUMNS or (not read.rest and read.offset.maximum - columns + COLUMNS < size)


def _registers(space: IterationSpace, operands: Sequence[int], vectors: int, lanes: int) -> dict[int, ir.Var]:
    """A buffer for each operand; LLVM keeps it in registers, as all indices are constants."""
    return {
        k: tirx.decl_buffer((vectors, lanes), str(space.operands[k].load.source.dtype), "part", scope="local")
        for k in operands
    }


def _kept(register: ir.Var, vectors: Sequence[ir.Expr]) -> list[tirx.Stmt]:
    lanes = int(register.shape[1])
    lane = tirx.Ramp(integer(0), integer(1), lanes)
    return [tirx.BufferStore(register, value, [integer(v), lane]) for v, value in enumerate(vectors)]


def _stores(
    space: IterationSpace, points: Sequence[Point], registers: Mapping[int, ir.Var], lanes: int
) -> list[tirx.Stmt]:
    """A vector along the last loop at each of the points, with operands that are in registers."""

    def vector(number: int, point: Point) -> tirx.Stmt:
        def element(lane: ir.Expr) -> tirx.Stmt:
            parts = {k: tirx.BufferLoad(r, [integer(number), lane]) for k, r in registers.items()}
            return space.store((*point[:-1], point[-1] + lane), parts)

        return vectorized(lanes, element)

    return [vector(number, point) for number, point in enumerate(points)]


def _moved(point: Point, loop: int, by: ir.Expr) -> Point:
    return (*point[:loop], point[loop] + by, *point[loop + 1 :])


def _tiles(
    space: IterationSpace,
    sizes: Mapping[int, tuple[int, int]],
    tile: Callable[[Point], tirx.Stmt],
    along: int | None = None,
) -> tirx.Stmt:
    """Tiles over all loops. `sizes` gives, for a loop, elements of a tile and, about, of a task; loops
    without advance by one, in the order of an operand's memory if one is named by `along`. Of tiles in a
    task the last loop of `sizes` is the innermost."""
    single = [k for k in range(len(space.loops)) if k not in sizes]
    if along is not None:
        # largest strides outside: the operand is then read in its own order
        single.sort(key=lambda k: -abs(space.loops[k].strides[along]))
    counts = {k: ceil_div(space.loops[k].extent, size) for k, (size, _) in sizes.items()}
    blocks = {k: ceil_div(counts[k], max(task // size, 1)) for k, (size, task) in sizes.items()}
    steps = {k: ceil_div(counts[k], blocks[k]) for k in sizes}
    extents = [space.loops[k].extent for k in single] + [ceil_div(counts[k], steps[k]) for k in sizes]

    def block(position: Point) -> tirx.Stmt:
        at = dict(zip([*single, *sizes], position, strict=True))

        def nest(left: Sequence[int], starts: Mapping[int, ir.Expr]) -> tirx.Stmt:
            if not left:
                return tile(tuple(starts.get(k, at[k]) for k in range(len(space.loops))))
            k, *inner = left
            first = at[k] * integer(steps[k])
            rest = integer(counts[k]) - first
            count = steps[k] if counts[k] % steps[k] == 0 else tirx.min(integer(steps[k]), rest)
            return loop(count, lambda t: nest(inner, {**starts, k: start(k, first + t)}))

        return nest(list(sizes), {})

    def start(k: int, number: ir.Expr) -> ir.Expr:
        size, extent = sizes[k][0], space.loops[k].extent
        at = number * integer(size)
        return tirx.min(at, integer(extent - size)) if extent % size else at

    elements = math.prod(steps[k] * size for k, (size, _) in sizes.items())
    return tasks(extents, elements, block, parallel=worth_threads(space))
