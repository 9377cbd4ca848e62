"""A product of matrices as launches: tiles in registers, slices of the factors staged in shared memory.

    for each slice of the depth:
        store what the registers hold of it into shared memory                   barriers around it
        load the next slice into registers                                       which arrives while
        for each step of the slice: accumulators += rows x columns               this is computed
    store the results

The two levels of tiles are from Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008.
Where tiles are few, groups of threads of a block share the depth of each, and blocks do: then partial sums go
to memory, and a second launch adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import function_of, integer, loop, unrolled, vectorized
from hybridc.schedules.cuda.core.loops import launched
from hybridc.schedules.cuda.tile.access import WIDTH
from hybridc.schedules.cuda.tile.plan import Plan
from hybridc.schedules.cuda.tile.results import Results, results_of
from hybridc.schedules.cuda.tile.share import added_up, collected
from hybridc.schedules.safety.statements import sequence
from hybridc.schedules.shapes import index_shape


def scheduled_product(function: tirx.PrimFunc, plan: Plan) -> tirx.PrimFunc:
    """The launches of a plan, in place of what `function` computes."""
    product, tile = plan.product, plan.tile
    results = results_of(product)
    shared = [
        _buffer(f"shared_{n}", tile.groups * s.words, "shared")
        for n, s in (("a", plan.left), ("b", plan.right))
    ]
    local = _Locals(plan)
    buffers = [*shared, *local.all, *results.inputs]
    if tile.groups > 1:
        buffers.append(local.exchanged)
    packed = {weight.position: weight.buffer for weight in product.weights}
    parameters = [packed.get(i, p) for i, p in enumerate(function.params)]
    if tile.parts == 1:
        return function_of(function, parameters, [_main(plan, shared, local, results)], buffers)
    parts = results.partial(tile.parts)
    first = _main(plan, shared, local, results, parts)
    sums = _buffer("sums", WIDTH, "local")
    second = added_up(product, tile.parts, parts, sums, results)
    return function_of(function, parameters, [first, second], [*buffers, parts, sums])


class _Locals:
    """Registers of a thread."""

    def __init__(self, plan: Plan) -> None:
        tile = plan.tile
        self.sums = _buffer("sum", tile.accumulators, "local")
        self.loaded = [
            _buffer(f"loaded_{n}", s.registers, "local") for n, s in (("a", plan.left), ("b", plan.right))
        ]
        self.parts = [_buffer("rows", tile.down, "local"), _buffer("columns", tile.across, "local")]
        self.exchanged = _buffer("exchanged", tile.rows * tile.columns, "shared")
        """By which groups hand over their sums."""
        self.all = [self.sums, *self.loaded, *self.parts]


def _buffer(name: str, size: int, scope: str) -> ir.Var:
    return tirx.decl_buffer(index_shape((size,)), "float32", name, scope=scope, layout=None)


def _main(
    plan: Plan, shared: list[ir.Var], local: _Locals, results: Results, parts: ir.Var | None = None
) -> tirx.Stmt:
    """The launch of the tiles."""
    tile, product = plan.tile, plan.product
    down, across = plan.tiles

    def body(block: ir.Var, thread: ir.Var) -> tirx.Stmt:
        # blocks that run at the same time share columns, the larger operand of a convolution
        first_row = tirx.floormod(block, integer(down)) * integer(tile.rows)
        rest = tirx.floordiv(block, integer(down))
        first_column = tirx.floormod(rest, integer(across)) * integer(tile.columns)
        rest = tirx.floordiv(rest, integer(across))
        part = tirx.floormod(rest, integer(tile.parts))
        batch = tirx.floordiv(rest, integer(tile.parts))
        at = product.batch.at(batch)
        group = tirx.floordiv(thread, integer(tile.threads)) if tile.groups > 1 else integer(0)
        own = tirx.floormod(thread, integer(tile.threads)) if tile.groups > 1 else thread
        starts = [group * integer(s.words) for s in (plan.left, plan.right)]
        count = plan.turns
        uneven = plan.slices.count != count * tile.groups * tile.parts

        def load(turn: ir.Expr) -> tirx.Stmt:
            number = (part * integer(tile.groups) + group) * integer(count) + turn
            exists = number < integer(plan.slices.count) if uneven else None
            left = plan.left.load(local.loaded[0], own, first_row, number, at, exists)
            right = plan.right.load(local.loaded[1], own, first_column, number, at, exists)
            return tirx.SeqStmt([left, right])

        place = tile.place(own)

        def turn(number: ir.Expr) -> tirx.Stmt:
            steps = [
                plan.left.store(local.loaded[0], shared[0], starts[0], own),
                plan.right.store(local.loaded[1], shared[1], starts[1], own),
            ]
            if count > 1:
                more = number + integer(1) < integer(count)
                steps.append(tirx.IfThenElse(more, load(number + integer(1)), None))
            steps.append(_multiply(plan, shared, starts, local, place))
            return tirx.SeqStmt(steps)

        def clear(number: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(local.sums, tirx.FloatImm("float32", 0.0), [number])

        statements: list[tirx.Stmt] = [
            unrolled(tile.accumulators, clear),
            load(integer(0)),
            loop(count, turn),
        ]
        rows, columns = (first_row, place[0]), (first_column, place[1])
        if parts is None:
            stored = results.store_tile(tile, local.sums, at, rows, columns)
        else:
            slot = batch * integer(tile.parts) + part
            stored = results.store_partial(tile, local.sums, parts, slot, rows, columns)
        if tile.groups > 1:
            statements += collected(tile, local.sums, local.exchanged, group, own)
            stored = tirx.IfThenElse(tirx.EQ(group, integer(0)), stored, None)
        return sequence([*statements, stored])

    return launched(plan.blocks, tile.groups * tile.threads, body)


def _multiply(
    plan: Plan,
    shared: list[ir.Var],
    starts: list[ir.Expr],
    local: _Locals,
    place: tuple[ir.Expr, ir.Expr],
) -> tirx.Stmt:
    """A thread's share of the products of a slice."""
    tile = plan.tile
    sides = (
        (plan.left, tile.row, tile.down, place[0]),
        (plan.right, tile.column, tile.across, place[1]),
    )

    def step(number: ir.Expr) -> tirx.Stmt:
        statements: list[tirx.Stmt] = []
        for source, begin, into, (staged, first, size, own) in zip(
            shared, starts, local.parts, sides, strict=True
        ):
            start = begin + number * integer(staged.line)
            statements.append(_fragment(source, into, size, partial(first, own), start))

        def row(i: ir.Expr) -> tirx.Stmt:
            def column(j: ir.Expr) -> tirx.Stmt:
                at = [i * integer(tile.across) + j]
                product = tirx.BufferLoad(local.parts[0], [i]) * tirx.BufferLoad(local.parts[1], [j])
                return tirx.BufferStore(local.sums, tirx.BufferLoad(local.sums, at) + product, at)

            return unrolled(tile.across, column)

        statements.append(unrolled(tile.down, row))
        return sequence(statements)

    return unrolled(plan.slices.steps, step)


def _fragment(
    shared: ir.Var, into: ir.Var, size: int, first: Callable[[ir.Expr], ir.Expr], start: ir.Expr
) -> tirx.Stmt:
    """A thread's rows or columns of a step, which begins at `start`; `first` says where four of them do."""

    def quad(number: ir.Expr) -> tirx.Stmt:
        def one(lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(shared, [start + first(number) + lane])
            return tirx.BufferStore(into, value, [number * integer(WIDTH) + lane])

        return vectorized(WIDTH, one)

    return unrolled(size // WIDTH, quad)
