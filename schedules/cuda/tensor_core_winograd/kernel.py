"""A convolution of float16 with 3x3 taps on tensor cores, by Winograd's algorithm.

    for each slice of 16 channels:
        at each of the 16 points: sums += taps x patches                             a barrier in front
        meanwhile transform the patches of the next slice, round them, store them to shared memory
        load patches of the slice after that into registers, of two neighbouring tiles each
    transform the sums back, store results

A warp has the sums of 16 output channels and 16 tiles at all points, so that it transforms them back in its
registers. Taps lie in memory as fragments: each lane loads its own, and transforms them two at a time.
Patches are transformed in float32, divided by four, so that no sum of four elements leaves the range of
float16, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute, uses
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.core.loops import launched
from hybridc.schedules.cuda.tensor_core.instructions import (
    barrier,
    load_matrices,
    multiply_add,
    packed,
    taps_transformed,
)
from hybridc.schedules.cuda.tensor_core.kernel import narrowed
from hybridc.schedules.cuda.tensor_core.read import element_of, flattened
from hybridc.schedules.cuda.tensor_core.staging import either
from hybridc.schedules.cuda.tensor_core_winograd.plan import (
    CHANNELS,
    COLUMNS,
    FRAGMENT,
    PAIRS,
    ROWS,
    THREADS,
    WARPS_ACROSS,
    TensorCorePlan,
)
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.results import Results, results_of
from hybridc.schedules.cuda.tile.share import added_up
from hybridc.schedules.cuda.winograd.kernel import data_transformed, result_transformed, stores
from hybridc.schedules.cuda.winograd.plan import OUTPUTS, POINTS, SIDE
from hybridc.schedules.cuda.winograd.read import TAPS
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.shapes import index_shape
from hybridc.schedules.storage import WideFunction

Read = tuple[Callable[[ir.Expr], ir.Expr], Sequence[ir.Expr]]
"""Neighbouring elements, and the conditions under which they are read; else they are zero."""
Quads = Callable[[ir.Expr, ir.Expr, ir.Expr, ir.Expr], Read]
"""By channel, image, row of the padded images, and pair across."""
_SPAN = SIDE + OUTPUTS
"""Columns that two neighbouring tiles read."""
_REGISTERS = 4
"""Of a lane: a fragment of taps, or two of patches."""
_CHUNK = 4
"""Words of a row of a matrix, which `ldmatrix` reads at a time."""
_LINE = PAIRS // _CHUNK
"""Chunks of a channel at a point: half of the banks."""
_POINT_WORDS = CHANNELS * PAIRS
_STAGES = 2
_SCALE = 4.0
"""By which transformed patches are divided."""


def tensor_core_convolution(
    original: tirx.PrimFunc, wide: WideFunction, plan: TensorCorePlan
) -> tirx.PrimFunc:
    """The launches of a plan, in place of what `original` computes, of which `wide` is the function in
    float32; its weights are packed."""
    conv = plan.conv
    weights, results = plan.packed_weights(), results_of(conv.product)
    parameters = [weights if i == conv.position else p for i, p in enumerate(wide.function.params)]
    arrays = _Arrays()
    partial = results.partial(plan.parts) if plan.parts > 1 else None

    def body(block: ir.Var, thread: ir.Var) -> tirx.Stmt:
        return _Block(plan, weights, results, partial, arrays, block, thread).body()

    launches, buffers = [launched(plan.blocks, THREADS, body)], [*arrays.all, *results.inputs]
    if partial is not None:
        total = _buffer("total", WIDTH, "float32", "local")
        launches.append(added_up(conv.product, plan.parts, partial, total, results))
        buffers += [partial, total]
    made = function_of(wide.function, parameters, launches, buffers)
    return narrowed(original, wide, "float16", made)


def _buffer(name: str, size: int, dtype: str, scope: str) -> ir.Var:
    return tirx.decl_buffer(index_shape((size,)), dtype, name, scope=scope, layout=None)


class _Arrays:
    """Of a thread in registers, and of a block in shared memory."""

    def __init__(self) -> None:
        self.sums = _buffer("sums", POINTS * 2 * _REGISTERS, "float32", "local")
        self.patches = _buffer("patches_loaded", SIDE * 2 * WIDTH, "float32", "local")
        self.half = _buffer("half", SIDE * _SPAN, "float32", "local")
        self.line = _buffer("line", OUTPUTS, "float32", "local")
        self.word = _buffer("word", 1, "uint32", "local")
        self.taps = _buffer("taps", TAPS * TAPS * _REGISTERS, "uint32", "local")
        self.plus = _buffer("plus", TAPS * _REGISTERS, "uint32", "local")
        self.minus = _buffer("minus", TAPS * _REGISTERS, "uint32", "local")
        self.plus_twice = _buffer("plus_twice", _REGISTERS, "uint32", "local")
        self.minus_twice = _buffer("minus_twice", _REGISTERS, "uint32", "local")
        self.data = _buffer("data", _REGISTERS, "uint32", "local")
        self.results = _buffer("outputs", OUTPUTS * 2 * OUTPUTS, "float32", "local")
        self.shared = _buffer("points", _STAGES * POINTS * _POINT_WORDS, "uint32", "shared")

    @property
    def written_by_instructions(self) -> list[ir.Var]:
        return [self.sums, self.word, self.plus, self.minus, self.plus_twice, self.minus_twice, self.data]

    @property
    def all(self) -> list[ir.Var]:
        return [*vars(self).values()]


class _Block:
    """What a thread of a block does."""

    def __init__(
        self, plan: TensorCorePlan, weights: ir.Var, results: Results, partial: ir.Var | None,
        arrays: _Arrays, block: ir.Var, thread: ir.Var,
    ) -> None:  # fmt: skip
        self.plan, self.conv, self.arrays = plan, plan.conv, arrays
        self.weights, self.results, self.partial = weights, results, partial
        rows, columns = plan.grid
        # blocks that run at the same time share patches
        first_row = tirx.floormod(block, integer(rows)) * integer(ROWS // FRAGMENT)
        rest = tirx.floordiv(block, integer(rows))
        self.first_pair = tirx.floormod(rest, integer(columns)) * integer(PAIRS)
        self.part = tirx.floordiv(rest, integer(columns)) if plan.parts > 1 else integer(0)
        self.lane, warp = tirx.floormod(thread, integer(WARP)), tirx.floordiv(thread, integer(WARP))
        self.fragment_row = first_row + tirx.floordiv(warp, integer(WARPS_ACROSS))
        self.warp_column = tirx.floormod(warp, integer(WARPS_ACROSS))
        self.own_pair = tirx.floormod(thread, integer(PAIRS))
        self.own_channel = tirx.floordiv(thread, integer(PAIRS))
        self.inner = _inner_quads(plan)
        self.place = [tirx.Var(name, "int64") for name in ("image", "top", "left")]

    def body(self) -> tirx.Stmt:
        count, begin = self.plan.turns, integer(0)

        def if_exists(number: ir.Expr, statement: tirx.Stmt) -> tirx.Stmt:
            return tirx.IfThenElse(number < integer(count), statement, None)

        def turn(number: ir.Expr) -> tirx.Stmt:
            stage, into = (tirx.floormod(number + integer(n), integer(_STAGES)) for n in range(2))
            # after the last slice what lies in registers is stored once more, where nobody reads it
            columns, words = (self._columns(), self._words(into)) if count > 1 else ([], [])
            return sequence([
                # all threads have left behind the turn that read the stage which is stored to
                barrier(),
                self._load_taps(number, 1, TAPS),
                *self._multiply_line(stage, 0, self._taps(0), []),
                *self._transformed_taps(),
                *columns,
                *self._multiply_line(stage, 1, self._transformed(self.arrays.plus), words[: POINTS // 2]),
                *self._multiply_line(stage, 2, self._transformed(self.arrays.minus), words[POINTS // 2 :]),
                if_exists(number + integer(1), self._load_taps(number + integer(1), 0, 1)),
                *self._multiply_line(stage, 3, self._taps(2), []),
                if_exists(number + integer(2), self._load_patches(number + integer(2))),
            ])  # fmt: skip

        return sequence([
            *(self._clear(array) for array in self.arrays.written_by_instructions),
            *([self._clear(self.arrays.taps)] if self.conv.outputs % ROWS else []),
            *self._note_place(),
            self._load_patches(begin),
            self._load_taps(begin, 0, 1),
            *self._columns(),
            *self._words(begin),
            *([self._load_patches(integer(1))] if count > 1 else []),
            loop(count, turn),
            self._results(),
        ])  # fmt: skip

    def _clear(self, array: ir.Var) -> tirx.Stmt:
        """TVM does not see what instructions write, and would make their arrays shorter."""
        zero = tirx.const(0, str(array.dtype))
        return unrolled(int(array.shape[0]), lambda i: tirx.BufferStore(array, zero, [i]))

    def _place(self, pair: ir.Expr) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
        """Image, and the first row and column of the output, of a pair of tiles."""
        across, down = integer(self.plan.across), integer(self.plan.down)
        rest = tirx.floordiv(pair, across)
        image = tirx.floordiv(rest, down) if self.conv.images > 1 else integer(0)
        line = tirx.floormod(rest, down) if self.conv.images > 1 else rest
        return image, line * integer(OUTPUTS), tirx.floormod(pair, across) * integer(2 * OUTPUTS)

    def _slice(self, number: ir.Expr) -> ir.Expr:
        return self.part * integer(self.plan.turns) + number

    def _note_place(self) -> list[tirx.Stmt]:
        """Where a thread's patches are, once for all slices."""
        place = self._place(self.first_pair + self.own_pair)
        return [tirx.Bind(variable, at) for variable, at in zip(self.place, place, strict=True)]

    def _load_patches(self, number: ir.Expr) -> tirx.Stmt:
        """What two tiles read of a channel, into registers; zero where there is nothing."""
        conv = self.conv
        pair = self.first_pair + self.own_pair
        image, top, left = self.place
        channel = self._slice(number) * integer(CHANNELS) + self.own_channel
        guards = [pair < integer(self.plan.pairs)] if self.plan.pairs % PAIRS else []

        def ends(i: ir.Expr, j: int, width: int) -> list[ir.Expr]:
            # the last tiles may reach beyond the padded images
            down = [top + i < integer(conv.height + TAPS - 1)] if conv.height % OUTPUTS else []
            return down + (
                [left + integer(j) < integer(conv.width + TAPS - 1)] if width % (2 * OUTPUTS) else []
            )

        def loaded(i: ir.Expr, j: int, read: Read, ends: Sequence[ir.Expr], width: int) -> tirx.Stmt:
            """Neighbours. Where no branch stores zeros nvcc makes a predicate of the conditions."""

            def stored(value: Callable[[ir.Expr], ir.Expr]) -> tirx.Stmt:
                first = _patch_at(i, j)
                return vectorized(
                    width, lambda n: tirx.BufferStore(self.arrays.patches, value(n), [first + n])
                )

            load, conditions = read
            zeros = stored(lambda n: tirx.FloatImm("float32", 0.0))
            conditions = [*guards, *ends, *conditions]
            return sequence([*([zeros] if conditions else []), either(conditions, stored(load), None)])

        def element(i: ir.Expr, j: int) -> tirx.Stmt:
            read = element_of(conv.read(channel, image, top + i, left + integer(j)), sym.Analyzer())
            return loaded(i, j, (lambda _: read.load, read.conditions), ends(i, j, conv.width), 1)

        def line(i: ir.Expr) -> tirx.Stmt:
            if self.inner is None:
                return sequence([element(i, j) for j in range(_SPAN)])
            read = self.inner(channel, image, top + i, tirx.floordiv(left, integer(WIDTH)))
            inner = loaded(i, 1, read, ends(i, 1, WIDTH), WIDTH)
            return sequence([inner, element(i, 0), element(i, _SPAN - 1)])

        return unrolled(SIDE, line)

    def _columns(self) -> list[tirx.Stmt]:
        """`B^T d` of both tiles."""
        arrays, quarter = self.arrays, tirx.FloatImm("float32", 1 / _SCALE)

        def column(j: int) -> tirx.Stmt:
            lines = [tirx.BufferLoad(arrays.patches, [_patch_at(integer(i), j)]) for i in range(SIDE)]
            values = [value * quarter for value in data_transformed(lines)]
            return stores(arrays.half, [([integer(i * _SPAN + j)], v) for i, v in enumerate(values)])

        return [column(j) for j in range(_SPAN)]

    def _words(self, stage: ir.Expr) -> list[tirx.Stmt]:
        """`B^T d B` of both tiles, rounded, to shared memory, side by side: point by point."""
        arrays = self.arrays
        chunk = tirx.floordiv(self.own_pair, integer(_CHUNK))
        place = self._word_at(stage, self.own_channel, chunk) + tirx.floormod(self.own_pair, integer(_CHUNK))
        word, first = (tirx.BufferLoad(a, [integer(0)]) for a in (arrays.word, arrays.line))

        def row(i: int) -> list[tirx.Stmt]:
            line = [tirx.BufferLoad(arrays.half, [integer(i * _SPAN + j)]) for j in range(_SPAN)]
            tiles = [data_transformed(line[start : start + SIDE]) for start in (0, OUTPUTS)]
            return [
                tirx.SeqStmt([
                    stores(arrays.line, [([integer(n)], tile[j]) for n, tile in enumerate(tiles)]),
                    packed(word, first, "float16"),
                    tirx.BufferStore(arrays.shared, word, [place + integer((i * SIDE + j) * _POINT_WORDS)]),
                ])
                for j in range(SIDE)
            ]  # fmt: skip

        return [statement for i in range(SIDE) for statement in row(i)]

    def _word_at(self, stage: ir.Expr, channel: ir.Expr, chunk: ir.Expr) -> ir.Expr:
        """Where a chunk of a channel begins at the first point: chunks of two lines, which lie side by side
        in the banks, are rotated by their number."""
        turned = tirx.floormod(chunk + tirx.floordiv(channel, integer(2)), integer(_LINE))
        line = stage * integer(POINTS * _POINT_WORDS) + channel * integer(PAIRS)
        return line + turned * integer(_CHUNK)

    def _load_taps(self, number: ir.Expr, first: int, end: int) -> tirx.Stmt:
        """A lane's part of some lines of taps, of all their columns."""
        channels = self.conv.channels // CHANNELS
        begin = self.fragment_row * integer(channels) + self._slice(number)

        def tap(which: ir.Expr) -> tirx.Stmt:
            at = ((begin * integer(TAPS * TAPS) + which) * integer(WARP) + self.lane) * integer(_REGISTERS)

            def register(n: ir.Expr) -> tirx.Stmt:
                zeros = [integer(0)] * (len(self.weights.shape) - 1)
                value = tirx.Cast("uint32", tirx.BufferLoad(self.weights, [*zeros, at + n]))
                return tirx.BufferStore(self.arrays.taps, value, [which * integer(_REGISTERS) + n])

            return vectorized(_REGISTERS, register)

        loads = unrolled((end - first) * TAPS, lambda n: tap(integer(first * TAPS) + n))
        fragments = self.conv.outputs // FRAGMENT
        if self.conv.outputs % ROWS:
            return tirx.IfThenElse(self.fragment_row < integer(fragments), loads, None)
        return loads

    def _taps(self, line: int) -> list[ir.TensorLoad]:
        registers = [integer((line * TAPS + b) * _REGISTERS) for b in range(TAPS)]
        return [tirx.BufferLoad(self.arrays.taps, [register]) for register in registers]

    def _transformed(self, array: ir.Var) -> list[ir.TensorLoad]:
        return [tirx.BufferLoad(array, [integer(b * _REGISTERS)]) for b in range(TAPS)]

    def _transformed_taps(self) -> list[tirx.Stmt]:
        """Along one axis."""
        found = (self._transformed(array) for array in (self.arrays.plus, self.arrays.minus))
        columns = zip(*found, *(self._taps(line) for line in range(TAPS)), strict=True)
        return [taps_transformed(*column) for column in columns]

    def _multiply_line(
        self, stage: ir.Expr, line: int, taps: list[ir.TensorLoad], between: list[tirx.Stmt]
    ) -> list[tirx.Stmt]:
        """At four points, of taps that are transformed along one axis. What stands `between` takes place
        while tensor cores multiply."""
        arrays = self.arrays
        plus, minus = (tirx.BufferLoad(a, [integer(0)]) for a in (arrays.plus_twice, arrays.minus_twice))
        statements = [taps_transformed(plus, minus, *taps)]
        row, matrix = tirx.floormod(self.lane, integer(8)), tirx.floordiv(self.lane, integer(8))
        channel = row + tirx.floormod(matrix, integer(2)) * integer(8)
        chunk = self.warp_column * integer(2) + tirx.floordiv(matrix, integer(2))
        place = self._word_at(stage, channel, chunk)
        for column, left in enumerate((taps[0], plus, minus, taps[2])):
            point = line * SIDE + column
            source = tirx.BufferLoad(arrays.shared, [place + integer(point * _POINT_WORDS)])
            into = tirx.BufferLoad(arrays.data, [integer(0)])
            statements.append(load_matrices(into, source, transposed=True))
            for n in range(2):
                sums = tirx.BufferLoad(arrays.sums, [integer((point * 2 + n) * _REGISTERS)])
                right = tirx.BufferLoad(arrays.data, [integer(2 * n)])
                statements.append(multiply_add(sums, left, right, "float16"))
            share = (column * len(between) // SIDE, (column + 1) * len(between) // SIDE)
            statements += between[slice(*share)]
        return statements

    def _results(self) -> tirx.Stmt:
        """`A^T m A` of both tiles of a pair, and what becomes of them."""

        def half(number: ir.Expr) -> tirx.Stmt:
            down, across = tirx.floordiv(number, integer(2)), tirx.floormod(number, integer(2))
            output = self.fragment_row * integer(FRAGMENT) + down * integer(8)
            output = output + tirx.floordiv(self.lane, integer(4))
            own = self.warp_column * integer(COLUMNS // WARPS_ACROSS // 2) + across * integer(_REGISTERS)
            pair = self.first_pair + own + tirx.floormod(self.lane, integer(4))
            return self._store(down, across, output, pair)

        return unrolled(4, half)

    def _store(self, down: ir.Expr, across: ir.Expr, output: ir.Expr, pair: ir.Expr) -> tirx.Stmt:
        plan, conv, arrays = self.plan, self.conv, self.arrays
        image, top, left = self._place(pair)
        scale = tirx.FloatImm("float32", _SCALE)

        def tile(side: ir.Expr) -> tirx.Stmt:
            def column(j: ir.Expr) -> tirx.Stmt:
                def at(i: int) -> ir.Expr:
                    point = integer(i * SIDE) + j
                    number = (point * integer(2) + across) * integer(_REGISTERS) + down * integer(2) + side
                    return tirx.BufferLoad(arrays.sums, [number])

                values = result_transformed([at(i) for i in range(SIDE)])
                return stores(arrays.half, [([integer(i * SIDE) + j], v) for i, v in enumerate(values)])

            def line(i: ir.Expr) -> tirx.Stmt:
                values = result_transformed(
                    [tirx.BufferLoad(arrays.half, [i * integer(SIDE) + integer(j)]) for j in range(SIDE)]
                )
                first = i * integer(2 * OUTPUTS) + side * integer(OUTPUTS)
                places = [[first + integer(j)] for j in range(OUTPUTS)]
                return stores(arrays.results, [(p, v * scale) for p, v in zip(places, values, strict=True)])

            return tirx.SeqStmt([unrolled(SIDE, column), unrolled(OUTPUTS, line)])

        result = tirx.SeqStmt([
            unrolled(2, tile),
            unrolled(OUTPUTS, lambda i: self._store_line(output, image, top + i, left, i)),
        ])  # fmt: skip
        guards = []
        if plan.pairs % PAIRS:
            guards.append(pair < integer(plan.pairs))
        if conv.outputs % ROWS:
            guards.append(output < integer(conv.outputs))
        return tirx.IfThenElse(tirx.all(*guards), result, None) if guards else result

    def _store_line(
        self, output: ir.Expr, image: ir.Expr, y: ir.Expr, left: ir.Expr, i: ir.Expr
    ) -> tirx.Stmt:
        """A line of both tiles' results."""
        conv, width = self.conv, 2 * OUTPUTS

        def lane(j: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(self.arrays.results, [i * integer(width) + j])
            if self.partial is not None:
                flat = (image * integer(conv.height) + y) * integer(conv.width) + left + j
                return tirx.BufferStore(self.partial, total, [self.part, output, flat])
            point = {conv.product.rows.axes[0]: output, **conv.columns_at(image, y, left + j)}
            return self.results.stored(point, total)

        if conv.width % width == 0 and (self.partial is not None or self.results.wide):
            line = vectorized(width, lane)
        elif conv.width % width == 0:
            line = unrolled(width, lane)
        else:
            exists = [left + integer(j) < integer(conv.width) for j in range(width)]
            line = sequence([tirx.IfThenElse(exists[j], lane(integer(j)), None) for j in range(width)])
        return tirx.IfThenElse(y < integer(conv.height), line, None) if conv.height % OUTPUTS else line


def _patch_at(line: ir.Expr, column: int) -> ir.Expr:
    """Where a patch has an element: the inner four of a line come first, as they may be loaded at once."""
    return line * integer(2 * WIDTH) + integer((4, 0, 1, 2, 3, 5)[column])


def _inner_quads(plan: TensorCorePlan) -> Quads | None:
    """The inner four elements of a line of a patch, if they lie side by side in memory, from a multiple of
    four elements on, and are read under one condition."""
    conv = plan.conv
    if conv.width % WIDTH:
        return None
    known, zero = sym.Analyzer(), integer(0)
    extents = {
        "channel": conv.channels,
        "image": conv.images,
        "y": conv.height + TAPS - 1,
        "across": plan.across,
    }
    variables = [tirx.Var(name, "int64") for name in extents]
    lane = tirx.Var("lane", "int64")
    for variable, extent in zip((*variables, lane), (*extents.values(), WIDTH), strict=True):
        known.bind(variable, ir.Range.from_min_extent(zero, integer(extent)))
    channel, image, y, across = variables
    value = conv.read(channel, image, y, across * integer(WIDTH) + integer(1) + lane)
    element = element_of(flattened(value, known), known)
    conditions = [c for c in element.conditions if not known.can_prove(c)]
    offset = element.load.indices[-1]
    start = known.simplify(substitute(offset, {lane: zero}))
    if any(uses(condition, lane) for condition in conditions) or not (
        known.can_prove_equal(known.simplify(offset - start), lane)
        and known.can_prove_equal(tirx.floormod(start, integer(WIDTH)), zero)
    ):
        return None

    def quads(*at: ir.Expr) -> Read:
        place = dict(zip(variables, at, strict=True))
        zeros = [zero] * (len(element.load.indices) - 1)

        def load(n: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(element.load.source, [*zeros, substitute(start, place) + n])

        return load, [substitute(condition, place) for condition in conditions]

    return quads
