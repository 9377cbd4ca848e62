"""Sums along an axis that is not the last: of columns, and of a few rows times a matrix, read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx
from tvm.tirx.op import tvm_warp_shuffle_xor

from hybridc.ir.graph import dtype_bits
from hybridc.packed.layout import PackedLayout, read_layout
from hybridc.schedules.cpu.core.nest import (
    Nest,
    NestBlock,
    is_pointwise,
    loads,
    read_nest,
    store_at,
    substitute,
)
from hybridc.schedules.cuda.core.kernel import (
    KernelBuilder,
    Threads,
    integer,
    launch,
    loop,
    point_of,
    sequence,
    unrolled,
    vectorized,
    when,
)
from hybridc.schedules.cuda.core.launch import WARP, cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import VECTOR_BITS, VECTOR_DTYPES, Lanes, address_of
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

MOST_ROWS = 8
"""Sums of a thread for each column: more would wait for arithmetic rather than for the matrix."""
_MOST_SUMS = 64
"""Of a thread, in registers."""
_SHORTEST_PRODUCT, _SHORTEST_SUM = 128, 32
"""Depths from which on threads share a column: a mean over 7x7 pixels with channels last is one."""
_THREADS = 256
_ENOUGH_BLOCKS = 128
"""A block for each multiprocessor of all but the largest GPUs."""
_SECTOR_BITS = 256
_STEPS = 4
"""Of the depth that a thread goes at a time, so that as many loads are on their way."""


@schedule_rule(family="matmul")
def few_rows(request: Request) -> Scheduled | None:
    """Accepts a product of at most `MOST_ROWS` rows with a matrix, packed or not, whose columns lie side by
    side, and an element-wise epilogue.

    Tiling: that of `columns`, each number of the matrix is multiplied with all rows.
    """
    return _scheduled(request, few_rows.__name__, is_product=True)


@schedule_rule(family="reduction")
def columns(request: Request) -> Scheduled | None:
    """Accepts sums along an axis whose results lie side by side in memory, as their operands do.

    Tiling: a thread has a vector of 128 bits of neighbouring columns and a share of the depth. What the
    threads of a warp have is added up by shuffles, what warps have in shared memory.
    """
    return _scheduled(request, columns.__name__, is_product=False)


def _scheduled(request: Request, rule: str, *, is_product: bool) -> Scheduled | None:
    found = attempt(rule, lambda: _read(request.function))
    if found is None or found.is_product != is_product:
        return None
    builder = KernelBuilder(request.function)
    writer = _Writer(builder, found)
    blocks = math.prod(found.grid_extents) * found.tiles
    threads = (found.across, _THREADS // found.across)
    function = builder.function([launch(blocks, threads, writer.of_thread)])
    return finish_function(function, rule, cuda_target(request.target))


@dataclass(frozen=True, slots=True)
class _Columns:
    """`result[grid, rows, column] = epilogue(sum over depth of summand)`.

    The depth is `outer * steps * codes`; `summands` has one for each code, of the variables `outer`, `step`,
    those of the grid and rows, and a lane.
    """

    nest: Nest
    anchor: NestBlock
    is_product: bool
    grid: tuple[ir.Var, ...]
    rows: tuple[ir.Var, ...]
    column: ir.Var
    lanes: Lanes
    outer: ir.Var
    step: ir.Var
    turns: int
    steps: int
    summands: tuple[ir.Expr, ...]

    def extents(self, axes: Sequence[ir.Var]) -> list[int]:
        return [self.anchor.extents[axis] for axis in axes]

    def row(self, number: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """The indices of a row, by its number."""
        return dict(zip(self.rows, point_of(number, self.extents(self.rows)), strict=True))

    @property
    def grid_extents(self) -> list[int]:
        return self.extents(self.grid)

    @property
    def row_count(self) -> int:
        return math.prod(self.extents(self.rows))

    @property
    def vectors(self) -> int:
        return self.anchor.extents[self.column] // self.lanes.width

    @property
    def across(self) -> int:
        """Threads of a block side by side: 8 if that leaves enough blocks, a sector at least."""
        bits = min(dtype_bits(str(load.source.dtype)) for load in self.vector_loads())
        least = max(1, _SECTOR_BITS // (bits * self.lanes.width))
        across = 8
        while across > least and math.prod(self.grid_extents) * -(-self.vectors // across) < _ENOUGH_BLOCKS:
            across //= 2
        return across

    @property
    def tiles(self) -> int:
        return -(-self.vectors // self.across)

    @property
    def at_once(self) -> int:
        """Steps of the depth that follow each other without a jump."""
        return _STEPS if self.steps % _STEPS == 0 else 1

    def vector_loads(self) -> list[ir.TensorLoad]:
        """Distinct loads whose lanes are neighbours in memory."""
        return [load for load in self._distinct() if not self.lanes.is_uniform(address_of(load))]

    def loads_along(self) -> list[ir.TensorLoad]:
        """Distinct loads that all lanes make, and whose steps are aligned neighbours in memory."""
        uniform = (load for load in self._distinct() if self.lanes.is_uniform(address_of(load)))
        return [load for load in uniform if self._is_along(load)]

    def _distinct(self) -> list[ir.TensorLoad]:
        found: list[ir.TensorLoad] = []
        for load in (load for value in self.summands for load in loads(value)):
            if not any(tvm_ffi.structural_equal(load, other) for other in found):
                found.append(load)
        return found

    def _is_along(self, load: ir.TensorLoad) -> bool:
        if self.at_once == 1 or str(load.source.dtype) not in VECTOR_DTYPES:
            return False
        analyzer, begin = self.lanes.analyzer, tirx.Var("begin", "int64")
        first = analyzer.simplify(substitute(address_of(load), {self.step: begin * integer(self.at_once)}))
        follows = analyzer.can_prove_equal(
            address_of(load) - self.step, substitute(address_of(load), {self.step: integer(0)})
        )
        return follows and analyzer.can_prove_equal(tirx.floormod(first, integer(self.at_once)), integer(0))


def _read(function: tirx.PrimFunc) -> _Columns | None:
    nest = read_nest(function)
    if nest is None or len(nest.reductions) != 1:
        return None
    anchor = nest.reductions[0]
    depth = math.prod(anchor.extents[axis] for axis in anchor.reduce)
    if depth < _SHORTEST_SUM or str(anchor.buffer.dtype) != "float32" or not is_pointwise(nest, anchor):
        return None
    value, spatial = anchor.value, [axis for axis in anchor.spatial if anchor.extents[axis] > 1]
    if not isinstance(value, tirx.Add) or not isinstance(value.a, ir.TensorLoad) or not spatial:
        return None
    if not value.a.source.same_as(anchor.buffer) or str(nest.blocks[-1].buffer.dtype) not in VECTOR_DTYPES:
        return None
    summand, column = nest.inlined(value.b), spatial[-1]
    layouts = [read_layout(dict(block.annotations)) for block in nest.blocks]
    packed = [layout for layout in layouts if layout is not None]
    if len(packed) > 1 or (packed and len(anchor.reduce) > 1):
        return None
    layout = packed[0] if packed else PackedLayout(8, _STEPS if depth % _STEPS == 0 else 1, 0)
    is_product = isinstance(value.b, tirx.Mul) and len(loads(summand)) > 1
    if is_product and depth < _SHORTEST_PRODUCT:
        return None
    bits = [dtype_bits(str(load.source.dtype)) for load in loads(summand) if _uses(load, column)]
    for width in (VECTOR_BITS // b for b in sorted(set(bits))):
        found = _by_lanes(nest, anchor, summand, (spatial, column), layout, width, depth, is_product)
        if found is not None:
            return found
    return None


def _by_lanes(
    nest: Nest,
    anchor: NestBlock,
    summand: ir.Expr,
    axes: tuple[list[ir.Var], ir.Var],
    layout: PackedLayout,
    width: int,
    depth: int,
    is_product: bool,
) -> _Columns | None:
    """By vectors of `width` columns; None if what varies among them does not lie side by side."""
    spatial, column = axes
    count = anchor.extents[column]
    if count % width:
        return None
    lanes, (outer, step) = Lanes.of(count, width), (tirx.Var(name, "int64") for name in ("outer", "step"))
    codes = layout.codes_in_byte
    steps = layout.span // codes
    lanes.analyzer.bind(outer, ir.Range(integer(0), integer(depth // layout.span)))
    lanes.analyzer.bind(step, ir.Range(integer(0), integer(steps)))
    for axis in spatial[:-1]:
        lanes.analyzer.bind(axis, ir.Range(integer(0), integer(anchor.extents[axis])))
    unit = {axis: integer(0) for axis in anchor.spatial if axis not in spatial}
    at = {column: lanes.vector * integer(width) + lanes.lane}
    extents = [anchor.extents[axis] for axis in anchor.reduce]

    def of_code(code: int) -> ir.Expr:
        position = outer * integer(layout.span) + integer(code * steps) + step
        place = dict(zip(anchor.reduce, point_of(position, extents), strict=True))
        return lanes.simplified(substitute(summand, unit | at | place))

    summands = tuple(of_code(code) for code in range(codes))
    varying = [load for value in summands for load in loads(value) if not lanes.is_uniform(address_of(load))]
    if not varying or not all(
        lanes.is_contiguous(v) and str(v.source.dtype) in VECTOR_DTYPES for v in varying
    ):
        return None
    grid = tuple(axis for axis in spatial[:-1] if any(_uses(load, axis) for load in varying))
    rows = tuple(axis for axis in spatial[:-1] if axis not in grid)
    turns = depth // layout.span
    found = _Columns(nest, anchor, is_product, grid, rows, column, lanes, outer, step, turns, steps, summands)
    return found if found.row_count <= MOST_ROWS and found.row_count * width <= _MOST_SUMS else None


def _uses(load: ir.TensorLoad, axis: ir.Var) -> bool:
    found: list[ir.Var] = []
    for index in load.indices:
        tvm_ffi.structural_walk(index, (ir.Var, found.append))
    return any(var.same_as(axis) for var in found)


_Held = Sequence[tuple[ir.TensorLoad, ir.Var]]
"""Loads, and the registers that hold what they load."""


@dataclass(frozen=True, slots=True)
class _Writer:
    builder: KernelBuilder
    found: _Columns

    def of_thread(self, thread: Threads) -> tirx.Stmt:
        """Its sums, what its warp makes of them, and results."""
        found, builder, width = self.found, self.builder, self.found.lanes.width
        size, slices = found.row_count * width, _THREADS // found.across
        sums = builder.registers((size,), "float32", "sums")
        warps = _THREADS // WARP
        in_block = found.across * size
        shared = builder.shared((warps * in_block,), "float32", "of_warps")
        tile = tirx.floormod(thread.block, integer(found.tiles))
        at = point_of(tirx.floordiv(thread.block, integer(found.tiles)), found.grid_extents)
        fixed: dict[ir.Var, ir.Expr] = dict(zip(found.grid, at, strict=True))
        vector = tile * integer(found.across) + thread.x
        zero = tirx.const(0, "float32")

        def turn(number: ir.Expr) -> tirx.Stmt:
            outer = number * integer(slices) + thread.y
            body = substitute(self._turn(sums), fixed | {found.outer: outer, found.lanes.vector: vector})
            return when(outer < integer(found.turns), body, always=found.turns % slices == 0)

        flat = thread.y * integer(found.across) + thread.x
        lane, warp = tirx.floormod(flat, integer(WARP)), tirx.floordiv(flat, integer(WARP))

        def share(row: ir.Expr) -> tirx.Stmt:
            begin = (warp * integer(found.row_count) + row) * integer(found.across * width) + lane * integer(
                width
            )
            part = min(width, 4)

            def vector_of(number: ir.Expr) -> tirx.Stmt:
                def element(e: ir.Expr) -> tirx.Stmt:
                    own = number * integer(part) + e
                    return tirx.BufferStore(shared, sums[row * integer(width) + own], [begin + own])

                return vectorized(part, element)

            return unrolled(width // part, vector_of)

        total = builder.registers((1,), "float32", "total")

        def result(number: ir.Expr) -> tirx.Stmt:
            place = number * integer(_THREADS) + flat
            row, column = (
                tirx.floordiv(place, integer(found.across * width)),
                tirx.floormod(place, integer(found.across * width)),
            )
            own = tile * integer(found.across * width) + column
            point = fixed | found.row(row)
            point |= {axis: integer(0) for axis in found.anchor.spatial if axis not in (*point, found.column)}

            def add(w: ir.Expr) -> tirx.Stmt:
                value = total[integer(0)] + shared[w * integer(in_block) + place]
                return tirx.BufferStore(total, value, [integer(0)])

            body = sequence(
                [
                    tirx.BufferStore(total, zero, [integer(0)]),
                    unrolled(warps, add),
                    store_at(found.nest, found.anchor, point | {found.column: own}, total[integer(0)]),
                ]
            )
            exists = tirx.all(place < integer(in_block), own < integer(found.anchor.extents[found.column]))
            return when(exists, body, always=in_block % _THREADS == 0 and found.vectors % found.across == 0)

        exists = vector < integer(found.vectors)
        return sequence(
            [
                unrolled(size, lambda i: tirx.BufferStore(sums, zero, [i])),
                when(exists, loop(-(-found.turns // slices), turn), always=found.vectors % found.across == 0),
                *(
                    [unrolled(size, lambda i: sequence(self._of_warp(sums, i)))]
                    if found.across < WARP
                    else []
                ),
                when(lane < integer(found.across), unrolled(found.row_count, share)),
                unrolled(-(-in_block // _THREADS), result),
            ]
        )

    def _of_warp(self, sums: ir.Var, index: ir.Expr) -> list[tirx.Stmt]:
        """Add what the threads of a warp have that work on the same columns."""
        statements: list[tirx.Stmt] = []
        distance = WARP // 2
        while distance >= self.found.across:
            mask, warp = tirx.const(0xFFFFFFFF, "uint32"), tirx.const(WARP, "int32")
            own = tirx.BufferLoad(sums, [index])
            other = tvm_warp_shuffle_xor(mask, own, tirx.const(distance, "int32"), warp, warp)
            statements.append(tirx.BufferStore(sums, own + other, [index]))
            distance //= 2
        return statements

    def _turn(self, sums: ir.Var) -> tirx.Stmt:
        """All steps of a turn: what is the same in each of them is loaded once."""
        found, lanes = self.found, self.found.lanes
        places = [
            (v, self.builder.registers((lanes.width,), str(v.source.dtype), "vector"))
            for v in found.vector_loads()
        ]
        once = [_loaded(lanes, v, place) for v, place in places if not _uses(v, found.step)]
        each = [_loaded(lanes, v, place) for v, place in places if _uses(v, found.step)]

        count, at_once = found.row_count, found.at_once
        along = [
            (v, self.builder.registers((count * at_once,), str(v.source.dtype), "along"))
            for v in found.loads_along()
        ]

        def ahead(load: ir.TensorLoad, place: ir.Var, begin: ir.Expr) -> tirx.Stmt:
            def of_row(row: ir.Expr) -> tirx.Stmt:
                def element(e: ir.Expr) -> tirx.Stmt:
                    at = found.row(row) | {found.step: begin + e}
                    return tirx.BufferStore(place, substitute(load, at), [row * integer(at_once) + e])

                return vectorized(at_once, element)

            return unrolled(count, of_row)

        def step(begin: ir.Expr, number: ir.Expr) -> tirx.Stmt:
            added = (self._added(value, sums, (places, along), number) for value in found.summands)
            return substitute(sequence([*each, *added]), {found.step: begin + number})

        def steps(number: ir.Expr) -> tirx.Stmt:
            begin = number * integer(at_once)
            first = [ahead(load, place, begin) for load, place in along]
            return sequence([*first, unrolled(at_once, lambda j: step(begin, j))])

        return sequence([*once, loop(found.steps // at_once, steps)])

    def _added(self, value: ir.Expr, sums: ir.Var, held: tuple[_Held, _Held], number: ir.Expr) -> tirx.Stmt:
        """Add a summand, whose vectors and values along the depth registers hold, for all rows and lanes."""
        found, lanes = self.found, self.found.lanes
        row_number = tirx.Var("row", "int64")

        def replaced(node: ir.TensorLoad) -> ir.Expr:
            for places, index in zip(
                held, (lanes.lane, row_number * integer(found.at_once) + number), strict=True
            ):
                for load, place in places:
                    if tvm_ffi.structural_equal(node, load):
                        return tirx.BufferLoad(place, [index])
            return node

        in_registers = tvm_ffi.structural_map(value, (ir.TensorLoad, replaced))

        def add(row: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            place = row * integer(lanes.width) + lane
            own = substitute(in_registers, found.row(row) | {lanes.lane: lane, row_number: row})
            return tirx.BufferStore(sums, sums[place] + own, [place])

        return unrolled(found.row_count, lambda r: unrolled(lanes.width, lambda e: add(r, e)))


def _loaded(lanes: Lanes, load: ir.TensorLoad, place: ir.Var) -> tirx.Stmt:
    """A vector of registers, by accesses of at most 128 bits."""
    part = min(lanes.width, VECTOR_BITS // dtype_bits(str(load.source.dtype)))

    def access(number: ir.Expr) -> tirx.Stmt:
        def element(e: ir.Expr) -> tirx.Stmt:
            lane = number * integer(part) + e
            return tirx.BufferStore(place, substitute(load, {lanes.lane: lane}), [lane])

        return vectorized(part, element)

    return unrolled(lanes.width // part, access)
