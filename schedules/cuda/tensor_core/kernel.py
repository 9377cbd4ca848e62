"""The loop nest of a product on tensor cores.

A block of threads has a tile of results, a warp a part of it in registers, 16x8 a matrix instruction:

    begin to copy the first slices to shared memory, or load and store the first one
    for each slice of the depth:
        wait for the slice; barrier
        begin to copy a slice some turns ahead, or load the next one into registers
        multiply: fragments from shared memory, matrix instructions
        store what was loaded into registers to the other half of shared memory
    epilogue from registers

(CUTLASS's software pipelines, with asynchronous copies into several stages, and without.)
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm import ir, s_tir, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cuda.core.copies import awaited, committed
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import barrier, multiply_add
from hybridc.schedules.cuda.tensor_core.operands import operand
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct
from hybridc.schedules.cuda.tensor_core.results import Results, bound
from hybridc.schedules.cuda.tensor_core.staging import Operand, in_order, lane_of
from hybridc.schedules.cuda.tensor_core.tile import Way
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.storage import WIDE, WideFunction, retyped

_ROWS, _COLUMNS = 16, 8
"""Of the results of a matrix instruction."""


def tensor_core_kernel(original: tirx.PrimFunc, product: MatrixProduct, way: Way) -> tirx.PrimFunc:
    """The function as one launch, whose blocks of threads have a tile each; or as two, of which the second
    adds up sums over parts of the depth."""
    tile, block, thread = way.tile, tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    down, across = tile.counts(product.row.extent, product.column.extent)
    # neighbouring blocks share columns, and go through all rows
    row = tirx.floormod(block, integer(down)) * integer(tile.rows)
    rest = tirx.floordiv(block, integer(down))
    column = tirx.floormod(rest, integer(across)) * integer(tile.columns)
    rest = tirx.floordiv(rest, integer(across))
    batch = tirx.floormod(rest, integer(product.batch.extent)) if way.parts > 1 else rest
    part = tirx.floordiv(rest, integer(product.batch.extent)) if way.parts > 1 else integer(0)
    results = Results(product, way.parts)
    body, buffers = _Block(product, way, results, part, batch, row, column, thread).body()
    blocks = down * across * product.batch.extent * way.parts
    launches = [bound(block, "blockIdx.x", blocks, bound(thread, "threadIdx.x", tile.threads, body))]
    if way.parts > 1:
        launches.append(results.added_up())
        buffers.append(results.partial)
    wide = function_of(product.wide.function, product.parameters, launches, buffers)
    return narrowed(original, product.wide, product.dtype, wide)


class _Block:
    """One tile. Buffers of 16-bit operands are float32 here, as all tensors, and become narrow at last."""

    def __init__(
        self, product: MatrixProduct, way: Way, results: Results, part: ir.Expr, batch: ir.Expr,
        row: ir.Expr, column: ir.Expr, thread: ir.Var,
    ) -> None:  # fmt: skip
        self.product, self.way, self.tile, self.results = product, way, way.tile, results
        self.part, self.batch, tile = part, batch, way.tile
        self.row, self.column, self.thread = row, column, thread
        self.lane, warp = lane_of(thread), tirx.floordiv(thread, integer(WARP))
        self.warp_row = tirx.floordiv(warp, integer(tile.warps_across)) * integer(tile.warp_rows)
        self.warp_column = tirx.floormod(warp, integer(tile.warps_across)) * integer(tile.warp_columns)
        self.down, self.across = tile.warp_rows // _ROWS, tile.warp_columns // _COLUMNS
        self.neighbours = results.neighbours(self.across)
        is_spread = self.neighbours > 1
        point = product.batch.at(batch)
        self.left = operand(product, "left", point, tile.rows, tile.threads)
        self.right = operand(product, "right", point, tile.columns, tile.threads, in_pairs=is_spread)
        self.sums = _buffer("sums", self.down * self.across * 4, product.sum_dtype, "local")
        self.left_fragments = _buffer("left_fragments", self.down * 4, "uint32", "local")
        self.right_fragments = _buffer("right_fragments", self.across * 2, "uint32", "local")
        self.line = _buffer("line", 2 * self.neighbours, product.sum_dtype, "local")
        self.stored = _buffer("stored", 2 * self.neighbours, str(product.output.dtype), "local")
        self.copies = tuple(way.stages > 0 and o.can_be_copied for o in (self.left, self.right))
        self.stages = way.stages or 2
        # what is rounded later is the only one whose type stays
        names = [f"{o.name}_{'exact' if o.rounds else 'loaded'}" for o in (self.left, self.right)]
        self.loaded = tuple(
            _buffer(name, o.elements // tile.threads, o.dtype, "local")
            for name, o in zip(names, (self.left, self.right), strict=True)
        )
        self.joined = tuple(
            _buffer(f"{o.name}_joined", o.elements // tile.threads, o.dtype, "local") if o.joins else loaded
            for o, loaded in zip((self.left, self.right), self.loaded, strict=True)
        )
        self.shared = tuple(
            _buffer(f"{o.name}_shared", self.stages * o.elements, o.dtype, "shared")
            for o in (self.left, self.right)
        )

    def body(self) -> tuple[tirx.Stmt, list[ir.Var]]:
        """What a thread does, and the buffers it needs."""
        slices = self.product.slices // self.way.parts
        start, ahead = self.part * integer(slices), self.stages - 1

        def turn(number: ir.Expr) -> tirx.Stmt:
            later, stage = number + integer(ahead), tirx.floormod(number, integer(self.stages))
            into = tirx.floormod(later, integer(self.stages))
            # the stage that is filled was read in the turn before, which all have left behind the barrier
            waits = [awaited(ahead - 1)] if any(self.copies) else []
            if slices <= ahead:
                return tirx.SeqStmt([*waits, barrier(), self._multiply(stage), *self._commits()])
            more = later < integer(slices)
            begin, end = self._begin(start + later, into), self._end(into)
            return tirx.SeqStmt([
                *waits,
                barrier(),
                tirx.IfThenElse(more, sequence(begin), None),
                # of a turn that copies nothing, too, so that each wait leaves as many
                *self._commits(),
                self._multiply(stage),
                *([tirx.IfThenElse(more, sequence(end), None)] if end else []),
            ])  # fmt: skip

        statements = [self._clear()]
        for number in range(ahead):
            if number < slices:
                at, stage = start + integer(number), integer(number)
                statements += [*self._begin(at, stage), *self._end(stage)]
            statements += self._commits()
        body = sequence([*statements, loop(slices, turn), self._epilogue()])
        body = tirx.AttrStmt(integer(0), "pragma_unroll_explicit", tirx.const(0), body)
        registers = [self.sums, self.left_fragments, self.right_fragments, *self.loaded, *self._pairs()]
        buffers = [*registers, *self.shared]
        return body, [*buffers, self.line, self.stored] if self.neighbours > 1 else buffers

    def _clear(self) -> tirx.Stmt:
        """Zero the sums; and the fragments, and the end of shared memory that is copied to, as TVM does not
        see what instructions write, and would make their arrays shorter. nvcc drops the second; the third is
        of a stage that no thread copies to in front of the first barrier."""

        def cleared(buffer: ir.Var) -> tirx.Stmt:
            return unrolled(int(buffer.shape[0]), lambda i: tirx.BufferStore(buffer, _zero(buffer), [i]))

        ends = [
            tirx.BufferStore(shared, _zero(shared), [integer(int(shared.shape[0]) - 1)])
            for copies, shared in zip(self.copies, self.shared, strict=True)
            if copies
        ]
        arrays = (self.sums, self.left_fragments, self.right_fragments, *self._pairs())
        return tirx.SeqStmt([*(cleared(b) for b in arrays), *ends])

    def _begin(self, number: ir.Expr, stage: ir.Expr) -> list[tirx.Stmt]:
        """Copy a slice to a stage of shared memory, or load it into registers."""
        return [
            side.copy(shared, stage, first, number, self.thread)
            if copies
            else side.load(loaded, first, number, self.thread)
            for side, copies, first, loaded, shared in self._sides()
        ]

    def _end(self, stage: ir.Expr) -> list[tirx.Stmt]:
        """Store what was loaded into registers."""
        found: list[tirx.Stmt] = []
        for (side, copies, _, loaded, shared), pairs in zip(self._sides(), self.joined, strict=True):
            if side.joins:
                found.append(side.join(loaded, pairs))
            if not copies:
                found.append(side.store(pairs, shared, stage, self.thread))
        return found

    def _pairs(self) -> list[ir.Var]:
        """Registers that elements are joined to."""
        return [pairs for pairs, loaded in zip(self.joined, self.loaded, strict=True) if pairs is not loaded]

    def _commits(self) -> list[tirx.Stmt]:
        return [committed()] if any(self.copies) else []

    def _sides(self) -> Iterator[tuple[Operand, bool, ir.Expr, ir.Var, ir.Var]]:
        sides = (self.left, self.right), self.copies, (self.row, self.column), self.loaded, self.shared
        return zip(*sides, strict=True)

    def _multiply(self, stage: ir.Expr) -> tirx.Stmt:
        # an instruction multiplies two chunks of the depth
        chunks = 2 * self.left.chunk

        def step(number: ir.Expr) -> tirx.Stmt:
            depth = number * integer(chunks)

            def left(i: ir.Expr) -> tirx.Stmt:
                rows = in_order(self.warp_row + i * integer(16))
                return self.left.fragments(
                    self.left_fragments, i, self.shared[0], stage, rows, depth, self.lane, depth_first=False
                )

            def right(j: ir.Expr) -> tirx.Stmt:
                def position(across: ir.Expr, row: ir.Expr) -> ir.Expr:
                    return self.warp_column + self._column(j * integer(2) + across, row)

                return self.right.fragments(
                    self.right_fragments, j, self.shared[1], stage, position, depth, self.lane,
                    depth_first=True,
                )  # fmt: skip

            def multiplied(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
                return multiply_add(
                    tirx.BufferLoad(self.sums, [self._first_sum(i, j)]),
                    tirx.BufferLoad(self.left_fragments, [i * integer(4)]),
                    tirx.BufferLoad(self.right_fragments, [j * integer(2)]),
                    self.product.dtype,
                    (self.product.left.is_signed, self.product.right.is_signed),
                )

            return tirx.SeqStmt([
                unrolled(self.down, left),
                unrolled(self.across // 2, right),
                unrolled(self.down, lambda i: unrolled(self.across, lambda j: multiplied(i, j))),
            ])  # fmt: skip

        return unrolled(self.product.steps // chunks, step)

    def _column(self, instruction: ir.Expr, column: ir.Expr) -> ir.Expr:
        """Where a column of an instruction lies among those of the warp: pairs, which a lane has, of
        `neighbours` instructions side by side."""
        if self.neighbours == 1:
            return instruction * integer(_COLUMNS) + column
        group = tirx.floordiv(instruction, integer(self.neighbours)) * integer(_COLUMNS * self.neighbours)
        pair, side = tirx.floordiv(column, integer(2)), tirx.floormod(column, integer(2))
        within = tirx.floormod(instruction, integer(self.neighbours)) * integer(2)
        return group + pair * integer(2 * self.neighbours) + within + side

    def _first_sum(self, i: ir.Expr, j: ir.Expr) -> ir.Expr:
        return (i * integer(self.across) + j) * integer(4)

    def _epilogue(self) -> tirx.Stmt:
        """The neighbouring columns of a lane, in two rows of each instruction's results."""
        pair = tirx.floormod(self.lane, integer(4)) * integer(2)
        line = tirx.floordiv(self.lane, integer(4))

        def part(i: ir.Expr, j: ir.Expr, half: ir.Expr) -> tirx.Stmt:
            row = self.row + self.warp_row + i * integer(_ROWS) + half * integer(8) + line
            first = j * integer(self.neighbours)
            column = self.column + self.warp_column + self._column(first, pair)
            return self._guarded(row, column, self._first_sum(i, first) + half * integer(2))

        def rows(j: ir.Expr) -> tirx.Stmt:
            return unrolled(self.down, lambda i: unrolled(2, lambda half: part(i, j, half)))

        # rows inside, so that what the epilogue reads for columns is read once for all of them
        return unrolled(self.across // self.neighbours, rows)

    def _guarded(self, row: ir.Expr, column: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        product = self.product

        def at(lane: ir.Expr) -> tirx.Stmt:
            total = tirx.BufferLoad(self.sums, [first + lane])
            return self.results.store(self.part, self.batch, row, column + lane, total)

        if product.column.extent % 2:
            body = unrolled(
                2,
                lambda lane: tirx.IfThenElse(column + lane < integer(product.column.extent), at(lane), None),
            )
        else:
            pair = unrolled(2, at) if self.results.is_boolean else vectorized(2, at)
            body = pair if self.neighbours == 1 else self._bytes(row, column, first)
            if product.column.extent % self.tile.columns:
                body = tirx.IfThenElse(column < integer(product.column.extent), body, None)
        if product.row.extent % self.tile.rows:
            body = tirx.IfThenElse(row < integer(product.row.extent), body, None)
        return body

    def _bytes(self, row: ir.Expr, column: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        """Results of 8 bits of a lane by one access: computed four or two at a time, as TVM has vectors of as
        many numbers of 32 bits."""
        count = 2 * self.neighbours

        def sum_of(lane: ir.Expr) -> tirx.Stmt:
            at = first + tirx.floordiv(lane, integer(2)) * integer(4) + tirx.floormod(lane, integer(2))
            return tirx.BufferStore(self.line, tirx.BufferLoad(self.sums, [at]), [lane])

        def store(lane: ir.Expr) -> tirx.BufferStore:
            total = tirx.BufferLoad(self.line, [lane])
            return self.results.store(self.part, self.batch, row, column + lane, total)

        def computed(part: ir.Expr) -> tirx.Stmt:
            def one(lane: ir.Expr) -> tirx.Stmt:
                at = part * integer(4) + lane
                return tirx.BufferStore(self.stored, store(at).value, [at])

            return vectorized(4, one)

        def moved(lane: ir.Expr) -> tirx.Stmt:
            place = store(lane)
            return tirx.BufferStore(place.buffer, tirx.BufferLoad(self.stored, [lane]), place.indices)

        return tirx.SeqStmt([
            unrolled(count, sum_of),
            unrolled(count // 4, computed),
            vectorized(count, moved),
        ])  # fmt: skip


def narrowed(original: tirx.PrimFunc, wide: WideFunction, dtype: str, made: tirx.PrimFunc) -> tirx.PrimFunc:
    """What was made of the wide function, with the original function's parameters, but for packed ones, and
    operands of the type of 16 bits on their way."""
    if not wide.dtypes:
        return made
    new: dict[ir.Var, ir.Var] = {}
    for i, narrow in wide.dtypes.items():
        is_packed = not made.params[i].same_as(wide.function.params[i])
        if str(made.params[i].dtype) == WIDE:
            new[made.params[i]] = _like(made.params[i], narrow) if is_packed else original.params[i]
    root = made.body.block
    for buffer in root.alloc_buffers:
        if str(buffer.name).endswith(("_loaded", "_joined", "_shared")):
            new[buffer] = _like(buffer, dtype)
    buffers = [new.get(buffer, buffer) for buffer in root.alloc_buffers]
    block = s_tir.SBlock([], [], [], "root", retyped(root.body, new), alloc_buffers=buffers)
    realize = s_tir.SBlockRealize([], True, block)
    parameters = [new.get(p, p) for p in made.params]
    return tirx.PrimFunc(parameters, realize, original.ret_type, original.attrs)


def _like(buffer: ir.Var, dtype: str) -> ir.Var:
    return tirx.decl_buffer(buffer.shape, dtype, buffer.name, scope=buffer.scope(), layout=None)


def _zero(buffer: ir.Var) -> ir.Expr:
    return tirx.const(0, str(buffer.dtype))


def _buffer(name: str, elements: int, dtype: str, scope: str) -> ir.Var:
    return tirx.decl_buffer((integer(elements),), dtype, name, scope=scope)
