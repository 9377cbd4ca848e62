"""Products of a few rows with weights of 4 bits, which become numbers in registers.

The frontend writes their sum, and says how the codes lie (`hybridc/frontend/expand/packed_product.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from hybridc.schedules.cpu.core.micro_kernel import Point, function_of, grid, integer, loop, sequence
from hybridc.schedules.cpu.core.nest import (
    Contraction,
    Nest,
    NestBlock,
    finish,
    is_pointwise,
    loads,
    read_nest,
)
from hybridc.schedules.cpu.core.register_tile import RegisterTile, reduction, register_tile
from hybridc.schedules.rule import Request, Scheduled, schedule_rule
from hybridc.targets import Isa

_NAME = "packed_product"
Column = Callable[[ir.Expr, ir.Expr], ir.Expr]
"""Of a panel, by vector and lane."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows [M, K], codes [panels, K / 2, lanes], steps [2, panels, blocks, lanes]; what follows."""

    nest: Nest
    anchor: NestBlock
    rows: ir.TensorLoad
    codes: ir.Var
    steps: ir.Var

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Rows, depth, blocks of the depth, columns of a panel."""
        rows, depth = (int(e) for e in self.rows.source.shape)
        return rows, depth, int(self.steps.shape[2]), int(self.codes.shape[2])

    def row_at(self, m: ir.Expr, k: ir.Expr) -> ir.Expr:
        return tirx.BufferLoad(self.rows.source, [m, k])

    def store(self, m: int, column: ir.Expr, value: ir.Expr) -> tirx.Stmt:
        row, n = self.anchor.spatial
        point = {row: integer(m), n: column, self.anchor.reduce[0]: integer(0)}
        return Contraction(self.nest, self.anchor, self.rows, self.rows).store(point, value)


@schedule_rule(family="matmul")
def packed_gemm(request: Request) -> Scheduled | None:
    """Accepts the sum that `packed_product` is, and an epilogue.

    A task is a panel of columns: each byte gives two codes of one column, half a block apart, which are
    multiplied as they are; at a block's end the sums are scaled, and what the zero adds is the sum of the
    block's row. That is computed once for all tasks.
    """
    packed = _read(request.function)
    if packed is None:
        return None
    rows, _, blocks, _ = packed.extents
    totals = tirx.decl_buffer((rows, blocks), "float32", "totals")
    panels = int(packed.codes.shape[0])
    body = grid((panels,), lambda point: _panel(packed, totals, point[0], request.target.isa), parallel=True)
    stages = [_summed(packed, totals), body]
    function = function_of(request.function, list(request.function.params), stages, [totals])
    return finish(function, packed_gemm.__name__)


def _read(function: tirx.PrimFunc) -> Packed | None:
    nest = read_nest(function)
    if nest is None or len(nest.reductions) != 1 or not nest.reductions[0].name.startswith(_NAME):
        return None
    anchor = nest.reductions[0]
    sources = {(str(load.source.dtype), len(load.source.shape)): load for load in loads(anchor.value)[1:]}
    kinds = (("float32", 2), ("uint8", 3), ("float32", 4))
    found = [sources[kind] for kind in kinds if kind in sources]
    if len(found) < len(kinds) or any(nest.parameter(load.source) is None for load in found):
        return None
    if not is_pointwise(nest, anchor) or nest.parameter(nest.blocks[-1].buffer) is None:
        return None
    return Packed(nest, anchor, found[0], found[1].source, found[2].source)


def _summed(packed: Packed, totals: ir.Var) -> tirx.Stmt:
    """The sum of each block of each row."""
    rows, depth, blocks, _ = packed.extents
    block = depth // blocks

    def total(m: ir.Expr, b: ir.Expr) -> tirx.Stmt:
        def add(k: ir.Expr) -> tirx.Stmt:
            value = tirx.BufferLoad(totals, [m, b]) + packed.row_at(m, b * integer(block) + k)
            return tirx.BufferStore(totals, value, [m, b])

        return sequence([tirx.BufferStore(totals, tirx.const(0, "float32"), [m, b]), loop(block, add)])

    return loop(rows, lambda m: loop(blocks, lambda b: total(m, b)))


def _panel(packed: Packed, totals: ir.Var, panel: ir.Expr, isa: Isa) -> tirx.Stmt:
    rows, _, _, columns = packed.extents
    lanes = isa.lanes()
    # sums of a block and those of all blocks share the registers
    most = min(isa.vector_registers // (2 * rows), columns // lanes)
    vectors = max(v for v in (1, 2, 4, 8) if v <= max(most, 1))
    parts = columns // (vectors * lanes)
    return loop(parts, lambda part: _part(packed, totals, (panel, part), (vectors, lanes)))


def _part(packed: Packed, totals: ir.Var, at: tuple[ir.Expr, ir.Expr], width: tuple[int, int]) -> tirx.Stmt:
    rows, depth, blocks, columns = packed.extents
    (panel, part), (vectors, lanes) = at, width
    sums, inner = (register_tile(rows, vectors, lanes) for _ in range(2))

    def column(v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        return part * integer(vectors * lanes) + v * integer(lanes) + lane

    def block(b: ir.Expr) -> tirx.Stmt:
        def scaled(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
            scale, offset = (
                tirx.BufferLoad(packed.steps, [integer(i), panel, b, column(v, lane)]) for i in (0, 1)
            )
            total = tirx.BufferLoad(totals, [integer(m), b])
            return sums.sum_at(m, v, lane) + scale * inner.sum_at(m, v, lane) - offset * total

        half = depth // blocks // 2

        def step(point: Point) -> tirx.Stmt:
            return _multiplied(packed, inner, (panel, b, point[0]), half, column)

        return inner.within([inner.clear(), reduction([half], inner, step), sums.set(scaled)])

    def stored(m: int, v: ir.Expr, lane: ir.Expr) -> tirx.Stmt:
        place = panel * integer(columns) + column(v, lane)
        return packed.store(m, place, sums.sum_at(m, v, lane))

    return sums.within([sums.clear(), loop(blocks, block), sums.each(stored)])


def _multiplied(
    packed: Packed, inner: RegisterTile, at: tuple[ir.Expr, ir.Expr, ir.Expr], half: int, column: Column
) -> tirx.Stmt:
    """The two codes of each byte, times the elements of the rows that they belong to."""
    panel, b, j = at

    def value(m: int, v: ir.Expr, lane: ir.Expr) -> ir.Expr:
        pair = tirx.BufferLoad(packed.codes, [panel, b * integer(half) + j, column(v, lane)]).astype("int32")
        low, high = ((pair & 15).astype("float32"), (pair >> 4).astype("float32"))
        first = b * integer(2 * half) + j
        left = packed.row_at(integer(m), first)
        right = packed.row_at(integer(m), first + integer(half))
        return inner.sum_at(m, v, lane) + left * low + right * high

    return inner.set(value)
