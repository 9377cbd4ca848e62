"""Large products with a constant B by Strassen's algorithm: seven products of half the size instead of eight.

With A, B and C in quarters, Winograd's form (Strassen, "Gaussian elimination is not optimal", 1969; Higham,
"Accuracy and Stability of Numerical Algorithms", 23.1) computes, here in this order and with P5 negated:

    P1 = A11 B11                        C11 = P1 + P2
    P2 = A12 B21                        C21 = P1 + P3 + P4 + P5
    P3 = (A21 + A22 - A11) T            C22 = P1 + P3 + P4 + P6     T = B22 - B12 + B11
    P4 = (A11 - A21) (B22 - B12)        C12 = P1 + P3 + P6 + P7
    P5 = A22 (B21 - T)
    P6 = (A21 + A22) (B12 - B11)
    P7 = (A12 - A21 - A22 + A11) B22
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import (
    Point,
    Tile,
    ceil_div,
    function_of,
    grid,
    integer,
    loop,
    sequence,
    unrolled,
    vectorized,
    when,
    write_columns,
)
from hybridc.schedules.cpu.core.sharing import at_least_one_each
from hybridc.schedules.cpu.matmul.kernel import ZERO, Element, GemmAccess, gemm_kernel, prefetch_next
from hybridc.schedules.cpu.matmul.read import Product, is_constant_matrix
from hybridc.schedules.packing import LinearMap, Packing
from hybridc.schedules.rule import Request

LEFT = (
    (1, 0, 0, 0),
    (0, 1, 0, 0),
    (-1, 0, 1, 1),
    (1, 0, -1, 0),
    (0, 0, 0, 1),
    (0, 0, 1, 1),
    (1, 1, -1, -1),
)
"""The left factor of each product, as a combination of A11, A12, A21 and A22."""
RIGHT = (
    (1, 0, 0, 0),
    (0, 0, 1, 0),
    (1, -1, 0, 1),
    (0, -1, 0, 1),
    (-1, 1, 1, -1),
    (-1, 1, 0, 0),
    (0, 0, 0, 1),
)
"""The right factor, of B11, B12, B21 and B22."""

FEWEST_ROWS = 112
"""Below this many rows reading 7/4 of the weights takes the time that fewer multiply-adds save."""
FEWEST_TASKS = 8
"""Pairs of panels, or one for each thread; a product of fewer leaves cores without work."""
SUMS_SHARE = 2
"""The sums of a task, which every product reads and writes, may take this fraction of L2."""


@dataclass(frozen=True, slots=True)
class _StrassenPlan:
    """B is stored as `[panels, 7, K/2, NR]`; a task makes two neighbouring panels of C, which stand for
    a panel of its left and one of its right half."""

    product: Product
    tile: Tile
    position: int
    """Which parameter B is."""

    @property
    def half_rows(self) -> int:
        return ceil_div(self.product.rows, 2)

    @property
    def half_depth(self) -> int:
        return self.product.depth // 2

    @property
    def blocks(self) -> int:
        return ceil_div(self.half_rows, self.tile.rows)

    @property
    def panels(self) -> int:
        return ceil_div(self.product.columns, 2 * self.tile.columns)

    @property
    def packing(self) -> Packing:
        depth, columns, width = self.product.depth, self.panels * 2 * self.tile.columns, self.tile.columns
        combined = LinearMap(RIGHT, (1,))
        if self.product.right.indices[-1].same_as(self.product.k):
            shape = (self.panels, 2, width, 2, self.half_depth)
            return Packing((columns, depth), shape, (0, 3, 1, 4, 2), combined=combined)
        shape = (2, self.half_depth, self.panels, 2, width)
        return Packing((depth, columns), shape, (2, 0, 3, 1, 4), combined=combined)


@dataclass(frozen=True, slots=True)
class _StrassenBuffers:
    lefts: ir.Var
    """The left factors `[7, rows, K/2]`; rows are padded, so that eight of them do not share a set of L1."""
    right: ir.Var
    running: ir.Var
    """The sum being made, `[rows, NR]`, and two that are kept."""
    first: ir.Var
    second: ir.Var


def accepts_strassen(request: Request, product: Product, tile: Tile) -> bool:
    """Whether larger rounding errors are allowed, and the shape has halves that are worth it."""
    return (
        request.winograd
        # products of few rows could not read its weights, and would have their own: it gains a tenth at most
        and not request.many_sizes
        and is_constant_matrix(request, product)
        and product.left.indices[-1].same_as(product.k)
        and product.rows >= FEWEST_ROWS
        # halves of A are combined in whole vectors
        and product.depth % (2 * tile.lanes) == 0
        and ceil_div(product.columns, 2 * tile.columns) >= at_least_one_each(FEWEST_TASKS, request.threads)
        # three sums of half the rows, 4 bytes each
        and 3 * ceil_div(product.rows, 2) * tile.columns * 4 <= request.target.isa.l2_bytes // SUMS_SHARE
    )


def strassen_cost(product: Product, steps: float) -> float:
    """Predicted multiply-adds, where a direct product has `steps` (with padding) for each of its depth.

    Between products each element of C takes the time of about 40 multiply-adds, of A that of 12 (fitted to
    measured products of depth 128 to 3072).
    """
    # bytes moved, which is why they grow with the matrices and not with the product
    passes = 40 * product.rows * product.columns + 12 * product.rows * product.depth
    return 7 / 8 * steps * product.depth + passes


def strassen(request: Request, product: Product, tile: Tile) -> tuple[tirx.PrimFunc, tuple[int, Packing]]:
    """The product as a first stage that combines quarters of A and tasks that make a panel of each half of C.

    A task runs the seven products one after the other, so that a panel of B and the sums stay in L2; the
    additions on C are made on the task's own sums. Weights take 7/4 of their bytes. Rounding errors are 1.5
    to 2.3 times those of the direct product (root mean square; the largest up to 2.8 times): 1.1e-6 of the
    result's scale for normally distributed factors of depth 768, 2.2e-6 for depth 3072. An infinity or NaN
    in one row of A reaches the row half of A's rows away too.
    """
    position = product.contraction.nest.parameter(product.right.source)
    assert position is not None
    plan = _StrassenPlan(product, tile, position)
    rows, width = plan.blocks * tile.rows, tile.columns
    right = tirx.decl_buffer((plan.panels, 7, plan.half_depth, width), "float32", product.right.source.name)
    # a vector more a row: powers of two would put a tile's rows into one set of L1
    lefts = tirx.decl_buffer((7, rows, plan.half_depth + tile.lanes), "float32", "lefts")
    kept = [tirx.decl_buffer((rows, width), "float32", name) for name in ("running", "first", "second")]
    buffers = _StrassenBuffers(lefts, right, *kept)
    sums: list[ir.Var] = []
    tasks = grid((plan.panels,), lambda point: _task(plan, buffers, point[0], sums), parallel=True)
    params = list(request.function.params)
    params[position] = right
    stages = [_combine_left(plan, lefts), tasks]
    function = function_of(request.function, params, stages, [lefts, *kept, *sums])
    return function, (position, plan.packing)


def _combine_left(plan: _StrassenPlan, lefts: ir.Var) -> tirx.Stmt:
    """Fill the seven left factors. With an odd number of rows the lower half has a last row of zeros."""
    product, lanes, half = plan.product, plan.tile.lanes, plan.half_rows

    def row(i: ir.Expr, *, lower: bool) -> tirx.Stmt:
        def quarters(k: ir.Expr) -> list[ir.Expr | None]:
            return [
                product.left_at(integer(0), i + integer(r * half), k + integer(c * plan.half_depth))
                if lower or not r else None
                for r in (0, 1) for c in (0, 1)
            ]  # fmt: skip

        def factor(p: int, first: ir.Expr) -> tirx.Stmt:
            def store(k: ir.Expr) -> tirx.Stmt:
                return tirx.BufferStore(lefts, _combination(LEFT[p], quarters(k)), [integer(p), i, k])

            return vectorized(lanes, lambda lane: store(first + lane))

        def vector(v: ir.Expr) -> tirx.Stmt:
            return sequence([factor(p, v * integer(lanes)) for p in range(len(LEFT))])

        return loop(plan.half_depth // lanes, vector)

    def task(point: Point) -> tirx.Stmt:
        (i,) = point
        # with an odd number of rows the last one of the lower half does not exist
        both = row(i, lower=True)
        if product.rows % 2 == 0:
            return both
        return tirx.IfThenElse(i < integer(half - 1), both, row(i, lower=False))

    return grid((half,), task, parallel=True)


def _combination(coefficients: tuple[int, ...], values: list[ir.Expr | None]) -> ir.Expr:
    """The sum of values with coefficients 1, 0 and -1, missing ones being zero."""
    total: ir.Expr = tirx.FloatImm("float32", 0.0)
    # positive terms first: the sum starts with an addition, never with a negation
    for sign in (1, -1):
        for c, value in zip(coefficients, values, strict=True):
            if c == sign and value is not None:
                total = total + value if sign > 0 else total - value
    return total


def _task(plan: _StrassenPlan, buffers: _StrassenBuffers, panel: ir.Expr, sums: list[ir.Var]) -> tirx.Stmt:
    running, first, second = buffers.running, buffers.first, buffers.second
    zero = tirx.FloatImm("float32", 0.0)

    def fill(target: ir.Var, value: Callable[[list[ir.Expr]], ir.Expr]) -> tirx.Stmt:
        tile = plan.tile

        def element(m: ir.Expr, column: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(target, value([m, column]), [m, column])

        return loop(plan.half_rows, lambda m: unrolled(tile.width, lambda v: vectorized(
            tile.lanes, lambda lane: element(m, v * integer(tile.lanes) + lane))))  # fmt: skip

    def copy(target: ir.Var, source: ir.Var) -> tirx.Stmt:
        return fill(target, lambda at: tirx.BufferLoad(source, at))

    def add(target: ir.Var, source: ir.Var) -> tirx.Stmt:
        return fill(target, lambda at: tirx.BufferLoad(target, at) + tirx.BufferLoad(source, at))

    def product(p: ir.Expr) -> tirx.Stmt:
        def behind(numbers: tuple[int, ...], *stmts: tirx.Stmt) -> tirx.Stmt:
            return tirx.IfThenElse(_one_of(p, numbers), sequence(stmts), None)

        # which sums are kept, in the order of the module's docstring
        return sequence(
            [
                behind((1, 6), fill(running, lambda at: zero)),
                behind((3,), copy(running, first)),
                _multiply(plan, buffers, panel, p, sums),
                behind((1, 3), copy(first, running)),
                behind((4,), copy(second, running)),
                behind((6,), add(first, running), add(running, second)),
                behind((2, 5, 6, 7), _write_quarter(plan, running, panel, p)),
                behind((6,), copy(running, first)),
            ]
        )

    return loop(len(LEFT), product)


def _one_of(p: ir.Expr, numbers: tuple[int, ...]) -> ir.Expr:
    """Whether product `p`, counted from zero, is one of `numbers`, as the module's docstring counts."""
    matches = [p.equal(integer(number - 1)) for number in numbers]
    return matches[0] if len(matches) == 1 else tirx.any(*matches)


def _multiply(
    plan: _StrassenPlan, buffers: _StrassenBuffers, panel: ir.Expr, p: ir.Expr, sums: list[ir.Var]
) -> tirx.Stmt:
    """Add product `p` of the panel to the running sums."""
    tile, running = plan.tile, buffers.running

    def block(i: ir.Expr) -> tirx.Stmt:
        def at(m: int, v: ir.Expr, lane: ir.Expr) -> list[ir.Expr]:
            return [i * integer(tile.rows) + integer(m), v * integer(tile.lanes) + lane]

        def left(k: ir.Expr, m: int) -> ir.Expr:
            return tirx.BufferLoad(buffers.lefts, [p, i * integer(tile.rows) + integer(m), k])

        def right(k: ir.Expr, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(buffers.right, [panel, p, k, v * integer(tile.lanes) + lane])

        def write(sum_at: Element) -> tirx.Stmt:
            def row(m: int) -> tirx.Stmt:
                return unrolled(tile.width, lambda v: vectorized(tile.lanes, lambda lane: tirx.BufferStore(
                    running, sum_at(m, v, lane), at(m, v, lane))))  # fmt: skip

            return sequence([row(m) for m in range(tile.rows)])

        def initial(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            return tirx.BufferLoad(running, at(m, v, lane))

        stride = int(buffers.lefts.shape[-1])
        ahead = (
            prefetch_next(lambda e: right(ZERO, ZERO, e), plan.half_depth * tile.columns, i, plan.blocks),
            prefetch_next(lambda e: left(e, 0), tile.rows * stride),
        )
        body, accumulators = gemm_kernel(
            tile, plan.half_depth, GemmAccess(left, right, write, initial), ahead
        )
        sums.extend(accumulators)
        return body

    return loop(plan.blocks, block)


def _write_quarter(plan: _StrassenPlan, running: ir.Var, panel: ir.Expr, p: ir.Expr) -> tirx.Stmt:
    """The running sums through the epilogue into the quarter of C that product `p` completes."""
    product, tile, half = plan.product, plan.tile, plan.half_rows
    lower = tirx.Select(_one_of(p, (5, 6)), integer(1), integer(0))
    right = tirx.Select(_one_of(p, (6, 7)), integer(1), integer(0))
    start = (panel * integer(2) + right) * integer(tile.columns)

    def row(m: ir.Expr) -> tirx.Stmt:
        def element(column: ir.Expr, v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(running, [m, v * integer(tile.lanes) + lane])
            return product.store(integer(0), m + lower * integer(half), column, value)

        return unrolled(tile.width, lambda v: write_columns(
            start, product.columns, tile, v, lambda column, lane: element(column, v, lane)))  # fmt: skip

    rows = integer(half) if product.rows % 2 == 0 else integer(half) - lower
    # of an odd number of panels the last one has no partner
    paired = ceil_div(product.columns, tile.columns) % 2 == 0
    return when(start < integer(product.columns), loop(rows, row), always=paired)
