"""A convolution of float16 with 3x3 taps on tensor cores, by Winograd's algorithm.

    for each slice of 16 channels:
        at each of the 16 points: sums += taps x patches                             a barrier in front
        meanwhile transform the patches of the next slice, round them, store them to shared memory
        load patches of the slice after that into registers (`patches.py`)
    transform the sums back, store results

A warp has the sums of 16 output channels and 16 tiles at all points, so that it transforms them back in its
registers. Taps lie in memory as fragments: each lane loads its own, and transforms them two at a time.
Patches are transformed in float32, divided by four, so that no sum of four elements leaves the range of
float16, and rounded once.
"""

from __future__ import annotations

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.core.loops import launched
from hybridc.schedules.cuda.tensor_core.instructions import (
    barrier,
    load_matrices,
    multiply_add,
    taps_transformed,
)
from hybridc.schedules.cuda.tensor_core.kernel import narrowed
from hybridc.schedules.cuda.tensor_core_winograd.arrays import (
    POINT_WORDS,
    REGISTERS,
    STAGES,
    Arrays,
    buffer,
    word_at,
)
from hybridc.schedules.cuda.tensor_core_winograd.patches import SCALE, patches_of, place_of
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
from hybridc.schedules.cuda.winograd.kernel import result_transformed, stores
from hybridc.schedules.cuda.winograd.plan import OUTPUTS, SIDE
from hybridc.schedules.cuda.winograd.read import TAPS
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.storage import WideFunction


def tensor_core_convolution(
    original: tirx.PrimFunc, wide: WideFunction, plan: TensorCorePlan
) -> tirx.PrimFunc:
    """The launches of a plan, in place of what `original` computes, of which `wide` is the function in
    float32; its weights are packed."""
    conv = plan.conv
    weights, results = plan.packed_weights(), results_of(conv.product)
    parameters = [weights if i == conv.position else p for i, p in enumerate(wide.function.params)]
    arrays = Arrays()
    partial = results.partial(plan.parts) if plan.parts > 1 else None

    def body(block: ir.Var, thread: ir.Var) -> tirx.Stmt:
        return _Block(plan, weights, results, partial, arrays, block, thread).body()

    launches, buffers = [launched(plan.blocks, THREADS, body)], [*arrays.all, *results.inputs]
    if partial is not None:
        total = buffer("total", WIDTH, "float32", "local")
        launches.append(added_up(conv.product, plan.parts, partial, total, results))
        buffers += [partial, total]
    made = function_of(wide.function, parameters, launches, buffers)
    return narrowed(original, wide, "float16", made)


class _Block:
    """What a thread of a block does."""

    def __init__(
        self, plan: TensorCorePlan, weights: ir.Var, results: Results, partial: ir.Var | None,
        arrays: Arrays, block: ir.Var, thread: ir.Var,
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
        self.patches = patches_of(plan, arrays, self.first_pair, thread)

    def body(self) -> tirx.Stmt:
        count, begin = self.plan.turns, integer(0)

        def if_exists(number: ir.Expr, statement: tirx.Stmt) -> tirx.Stmt:
            return tirx.IfThenElse(number < integer(count), statement, None)

        def turn(number: ir.Expr) -> tirx.Stmt:
            stage, into = (tirx.floormod(number + integer(n), integer(STAGES)) for n in range(2))
            # after the last slice what lies in registers is stored once more, where nobody reads it
            columns, words = (self.patches.columns(), self.patches.words(into)) if count > 1 else ([], [])
            middle = len(words) // 2
            return sequence([
                # all threads have left behind the turn that read the stage which is stored to
                barrier(),
                self._load_taps(number, 1, TAPS),
                *self._multiply_line(stage, 0, self._taps(0), []),
                *self._transformed_taps(),
                *columns,
                *self._multiply_line(stage, 1, self._transformed(self.arrays.plus), words[:middle]),
                *self._multiply_line(stage, 2, self._transformed(self.arrays.minus), words[middle:]),
                if_exists(number + integer(1), self._load_taps(number + integer(1), 0, 1)),
                *self._multiply_line(stage, 3, self._taps(2), []),
                if_exists(number + integer(2), self._load_patches(number + integer(2))),
            ])  # fmt: skip

        return sequence([
            *(self._clear(array) for array in self.arrays.written_by_instructions),
            *([self._clear(self.arrays.taps)] if self.conv.outputs % ROWS else []),
            *self.patches.note_place(),
            self._load_patches(begin),
            self._load_taps(begin, 0, 1),
            *self.patches.columns(),
            *self.patches.words(begin),
            *([self._load_patches(integer(1))] if count > 1 else []),
            loop(count, turn),
            self._results(),
        ])  # fmt: skip

    def _clear(self, array: ir.Var) -> tirx.Stmt:
        """TVM does not see what instructions write, and would make their arrays shorter."""
        zero = tirx.const(0, str(array.dtype))
        return unrolled(int(array.shape[0]), lambda i: tirx.BufferStore(array, zero, [i]))

    def _slice(self, number: ir.Expr) -> ir.Expr:
        return self.part * integer(self.plan.turns) + number

    def _load_patches(self, number: ir.Expr) -> tirx.Stmt:
        return self.patches.load(self._slice(number))

    def _load_taps(self, number: ir.Expr, first: int, end: int) -> tirx.Stmt:
        """A lane's part of some lines of taps, of all their columns."""
        channels = self.conv.channels // CHANNELS
        begin = self.fragment_row * integer(channels) + self._slice(number)

        def tap(which: ir.Expr) -> tirx.Stmt:
            at = ((begin * integer(TAPS * TAPS) + which) * integer(WARP) + self.lane) * integer(REGISTERS)

            def register(n: ir.Expr) -> tirx.Stmt:
                zeros = [integer(0)] * (len(self.weights.shape) - 1)
                value = tirx.Cast("uint32", tirx.BufferLoad(self.weights, [*zeros, at + n]))
                return tirx.BufferStore(self.arrays.taps, value, [which * integer(REGISTERS) + n])

            return vectorized(REGISTERS, register)

        loads = unrolled((end - first) * TAPS, lambda n: tap(integer(first * TAPS) + n))
        fragments = self.conv.outputs // FRAGMENT
        if self.conv.outputs % ROWS:
            return tirx.IfThenElse(self.fragment_row < integer(fragments), loads, None)
        return loads

    def _taps(self, line: int) -> list[ir.TensorLoad]:
        registers = [integer((line * TAPS + b) * REGISTERS) for b in range(TAPS)]
        return [tirx.BufferLoad(self.arrays.taps, [register]) for register in registers]

    def _transformed(self, array: ir.Var) -> list[ir.TensorLoad]:
        return [tirx.BufferLoad(array, [integer(b * REGISTERS)]) for b in range(TAPS)]

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
        place = word_at(stage, channel, chunk)
        for column, left in enumerate((taps[0], plus, minus, taps[2])):
            point = line * SIDE + column
            source = tirx.BufferLoad(arrays.shared, [place + integer(point * POINT_WORDS)])
            into = tirx.BufferLoad(arrays.data, [integer(0)])
            statements.append(load_matrices(into, source, transposed=True))
            for n in range(2):
                sums = tirx.BufferLoad(arrays.sums, [integer((point * 2 + n) * REGISTERS)])
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
            own = self.warp_column * integer(COLUMNS // WARPS_ACROSS // 2) + across * integer(REGISTERS)
            pair = self.first_pair + own + tirx.floormod(self.lane, integer(4))
            return self._store(down, across, output, pair)

        return unrolled(4, half)

    def _store(self, down: ir.Expr, across: ir.Expr, output: ir.Expr, pair: ir.Expr) -> tirx.Stmt:
        plan, conv, arrays = self.plan, self.conv, self.arrays
        image, top, left = place_of(self.plan, pair)
        scale = tirx.FloatImm("float32", SCALE)

        def tile(side: ir.Expr) -> tirx.Stmt:
            def column(j: ir.Expr) -> tirx.Stmt:
                def at(i: int) -> ir.Expr:
                    point = integer(i * SIDE) + j
                    number = (point * integer(2) + across) * integer(REGISTERS) + down * integer(2) + side
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
