"""The loop nest of a product on tensor cores.

A block of threads has a tile of results, a warp a part of it in registers, 16x8 a matrix instruction:

    load slice 0, store it to shared memory
    for each slice of the depth:
        load the next slice into registers
        multiply: fragments from shared memory, matrix instructions
        store the next slice to the other half of shared memory
        barrier
    epilogue from registers

(CUTLASS's software pipeline for GPUs without asynchronous copies.)
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, s_tir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import ceil_div, function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cpu.core.nest import substitute
from hybridc.schedules.cuda.core.launch import WARP
from hybridc.schedules.cuda.tensor_core.instructions import barrier, multiply_add
from hybridc.schedules.cuda.tensor_core.read import MatrixProduct, flattened, offset_of
from hybridc.schedules.cuda.tensor_core.staging import lane_of, operand
from hybridc.schedules.cuda.tensor_core.tile import DEPTH, Tile
from hybridc.schedules.storage import retyped

_ROWS, _COLUMNS = 16, 8
"""Of the results of a matrix instruction."""
_FLOAT = "float32"


def tensor_core_kernel(original: tirx.PrimFunc, product: MatrixProduct, tile: Tile) -> tirx.PrimFunc:
    """The function as one launch, whose blocks of threads have a tile each."""
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    tiles_down = ceil_div(product.row.extent, tile.rows)
    tiles_across = ceil_div(product.column.extent, tile.columns)
    # neighbouring blocks share columns, and go through all rows
    row = tirx.floormod(block, integer(tiles_down)) * integer(tile.rows)
    rest = tirx.floordiv(block, integer(tiles_down))
    column = tirx.floormod(rest, integer(tiles_across)) * integer(tile.columns)
    batch = product.batch.at(tirx.floordiv(rest, integer(tiles_across)))
    body, buffers = _Block(product, tile, batch, row, column, thread).body()
    nest = _bound(block, "blockIdx.x", tiles_down * tiles_across * product.batch.extent, _bound(
        thread, "threadIdx.x", tile.threads, body))  # fmt: skip
    wide = function_of(product.wide.function, product.wide.function.params, [nest], buffers)
    return _narrowed(original, product, wide)


class _Block:
    """One tile. Buffers of operands are float32 here, as all tensors, and become narrow with them."""

    def __init__(
        self, product: MatrixProduct, tile: Tile, batch: dict[ir.Var, ir.Expr],
        row: ir.Expr, column: ir.Expr, thread: ir.Var,
    ) -> None:  # fmt: skip
        self.product, self.tile, self.batch = product, tile, batch
        self.row, self.column, self.thread = row, column, thread
        self.lane, warp = lane_of(thread), tirx.floordiv(thread, integer(WARP))
        self.warp_row = tirx.floordiv(warp, integer(tile.warps_across)) * integer(tile.warp_rows)
        self.warp_column = tirx.floormod(warp, integer(tile.warps_across)) * integer(tile.warp_columns)
        shape = ((product.left, product.row, tile.rows), (product.right, product.column, tile.columns))
        self.left, self.right = (
            operand(name, value, axis, product.depth, batch, extent, DEPTH, tile.threads)
            for name, (value, axis, extent) in zip(("left", "right"), shape, strict=True)
        )
        self.down, self.across = tile.warp_rows // _ROWS, tile.warp_columns // _COLUMNS
        self.sums = _buffer("sums", self.down * self.across * 4, _FLOAT, "local")
        self.left_fragments = _buffer("left_fragments", self.down * 4, "uint32", "local")
        self.right_fragments = _buffer("right_fragments", self.across * 2, "uint32", "local")
        self.loaded = tuple(
            _buffer(f"{o.name}_loaded", o.pieces * o.width, _FLOAT, "local") for o in (self.left, self.right)
        )
        self.shared = tuple(
            _buffer(f"{o.name}_shared", 2 * o.elements, _FLOAT, "shared") for o in (self.left, self.right)
        )

    def body(self) -> tuple[tirx.Stmt, list[ir.Var]]:
        """What a thread does, and the buffers it needs."""
        slices = ceil_div(self.product.depth.extent, DEPTH)

        def turn(number: ir.Expr) -> tirx.Stmt:
            following = number + integer(1)
            stage = tirx.floormod(number, integer(2))
            if slices == 1:
                return self._multiply(stage)
            more = following < integer(slices)
            return tirx.SeqStmt([
                tirx.IfThenElse(more, self._load(following), None),
                self._multiply(stage),
                tirx.IfThenElse(more, self._store(tirx.floormod(following, integer(2))), None),
                barrier(),
            ])  # fmt: skip

        statements = [
            self._clear(),
            self._load(integer(0)),
            self._store(integer(0)),
            barrier(),
            loop(slices, turn),
            self._epilogue(),
        ]
        body = tirx.AttrStmt(integer(0), "pragma_unroll_explicit", tirx.const(0), tirx.SeqStmt(statements))
        return body, [self.sums, self.left_fragments, self.right_fragments, *self.loaded, *self.shared]

    def _clear(self) -> tirx.Stmt:
        """Zero the sums; and the fragments, as TVM does not see what instructions write, and would make their
        arrays shorter. nvcc drops the latter."""

        def cleared(buffer: ir.Var) -> tirx.Stmt:
            zero = tirx.const(0, str(buffer.dtype))
            return unrolled(int(buffer.shape[0]), lambda i: tirx.BufferStore(buffer, zero, [i]))

        return tirx.SeqStmt([cleared(b) for b in (self.sums, self.left_fragments, self.right_fragments)])

    def _load(self, number: ir.Expr) -> tirx.Stmt:
        at = number * integer(DEPTH)
        left, right = self.loaded
        return tirx.SeqStmt([
            self.left.load(left, self.row, at, self.thread),
            self.right.load(right, self.column, at, self.thread),
        ])  # fmt: skip

    def _store(self, stage: ir.Expr) -> tirx.Stmt:
        parts = zip((self.left, self.right), self.loaded, self.shared, strict=True)
        return tirx.SeqStmt([o.store(loaded, shared, stage, self.thread) for o, loaded, shared in parts])

    def _multiply(self, stage: ir.Expr) -> tirx.Stmt:
        def step(number: ir.Expr) -> tirx.Stmt:
            depth = number * integer(16)

            def left(i: ir.Expr) -> tirx.Stmt:
                return self.left.fragments(
                    self.left_fragments, i, self.shared[0], stage, self.warp_row + i * integer(16), depth,
                    self.lane, depth_first=False,
                )  # fmt: skip

            def right(j: ir.Expr) -> tirx.Stmt:
                return self.right.fragments(
                    self.right_fragments, j, self.shared[1], stage, self.warp_column + j * integer(16), depth,
                    self.lane, depth_first=True,
                )  # fmt: skip

            def multiplied(i: ir.Expr, j: ir.Expr) -> tirx.Stmt:
                return multiply_add(
                    tirx.BufferLoad(self.sums, [self._first_sum(i, j)]),
                    tirx.BufferLoad(self.left_fragments, [i * integer(4)]),
                    tirx.BufferLoad(self.right_fragments, [j * integer(2)]),
                    self.product.dtype,
                )

            return tirx.SeqStmt([
                unrolled(self.down, left),
                unrolled(self.across // 2, right),
                unrolled(self.down, lambda i: unrolled(self.across, lambda j: multiplied(i, j))),
            ])  # fmt: skip

        return unrolled(DEPTH // 16, step)

    def _first_sum(self, i: ir.Expr, j: ir.Expr) -> ir.Expr:
        return (i * integer(self.across) + j) * integer(4)

    def _epilogue(self) -> tirx.Stmt:
        """Two neighbouring columns of a lane at a time, in two rows of each instruction's results."""
        pair = tirx.floormod(self.lane, integer(4)) * integer(2)
        line = tirx.floordiv(self.lane, integer(4))

        def part(i: ir.Expr, j: ir.Expr, half: ir.Expr) -> tirx.Stmt:
            row = self.row + self.warp_row + i * integer(_ROWS) + half * integer(8) + line
            column = self.column + self.warp_column + j * integer(_COLUMNS) + pair
            first = self._first_sum(i, j) + half * integer(2)
            return self._guarded(row, column, first)

        return unrolled(
            self.down,
            lambda i: unrolled(self.across, lambda j: unrolled(2, lambda half: part(i, j, half))),
        )

    def _guarded(self, row: ir.Expr, column: ir.Expr, first: ir.Expr) -> tirx.Stmt:
        product, tile = self.product, self.tile
        r, c = tirx.Var("row", "int64"), tirx.Var("column", "int64")
        store = self._stored(r, c, first)

        def at(lane: ir.Expr) -> tirx.Stmt:
            return store(row, column + lane, lane)

        in_row = row < integer(product.row.extent)
        if product.column.extent % 2:
            inside = lambda lane: column + lane < integer(product.column.extent)  # noqa: E731
            body = unrolled(2, lambda lane: tirx.IfThenElse(inside(lane), at(lane), None))
        else:
            body = vectorized(2, at)
            if product.column.extent % tile.columns:
                body = tirx.IfThenElse(column < integer(product.column.extent), body, None)
        return tirx.IfThenElse(in_row, body, None) if product.row.extent % tile.rows else body

    def _stored(
        self, row: ir.Var, column: ir.Var, first: ir.Expr
    ) -> Callable[[ir.Expr, ir.Expr, ir.Expr], tirx.Stmt]:
        """Writes the result of a row and column; elements by their offsets, so that pairs are seen to be
        neighbours."""
        product = self.product
        known = sym.Analyzer()
        known.bind(row, ir.Range.from_min_extent(integer(0), integer(product.row.extent)))
        known.bind(column, ir.Range.from_min_extent(integer(0), integer(product.column.extent)))
        number = tirx.Var("number", "int64")
        point = {**self.batch, **product.row.at(row), **product.column.at(column)}
        store = product.store(point, tirx.BufferLoad(self.sums, [first + number]))
        value = flattened(store.value, known)
        indices = offset_of(store.buffer, store.indices, known)

        def at(r: ir.Expr, c: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            values = {row: r, column: c, number: lane}
            return tirx.BufferStore(
                store.buffer, substitute(value, values), [substitute(i, values) for i in indices]
            )

        return at


def _narrowed(original: tirx.PrimFunc, product: MatrixProduct, wide: tirx.PrimFunc) -> tirx.PrimFunc:
    """With the parameters of the original function, and operands of 16 bits on their way."""
    new = {wide.params[i]: original.params[i] for i in product.wide.dtypes}
    root = wide.body.block
    buffers = []
    for buffer in root.alloc_buffers:
        is_operand = str(buffer.name).endswith(("_loaded", "_shared"))
        if is_operand:
            new[buffer] = _buffer(buffer.name, int(buffer.shape[0]), product.dtype, buffer.scope())
        buffers.append(new.get(buffer, buffer))
    block = s_tir.SBlock([], [], [], "root", retyped(root.body, new), alloc_buffers=buffers)
    realize = s_tir.SBlockRealize([], True, block)
    return tirx.PrimFunc(list(original.params), realize, original.ret_type, original.attrs)


def _buffer(name: str, elements: int, dtype: str, scope: str) -> ir.Var:
    return tirx.decl_buffer((integer(elements),), dtype, name, scope=scope)


def _bound(variable: ir.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.For:
    zero, count = integer(0), integer(extent)
    index = tirx.IterVar(ir.Range(zero, count), tirx.Var(tag, "int64"), tirx.IterVar.ThreadIndex, tag)
    return tirx.For(variable, zero, count, tirx.ForKind.THREAD_BINDING, body, index)
