"""Positions of maxima and minima."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_equal

from hybridc.schedules.cpu.core.nest import Nest, NestBlock, finish, read_block, replace_loads
from hybridc.schedules.cpu.reduction.contiguous import schedule_contiguous
from hybridc.schedules.cpu.reduction.read import RowReductions, rows_of
from hybridc.schedules.rule import Request, Scheduled, schedule_rule


@schedule_rule(family="reduction")
def arg_extremum(request: Request) -> Scheduled | None:
    """Accepts `out = epilogue(first k where x[k] is the maximum, or the minimum, of x)` along the last axis.

    TVM carries value and position along together, one element at a time. Here they are two reductions with
    vectors along the row (`contiguous.py`): the maximum, and the least position of what equals it, while the
    row is in the cache. A row of nothing but NaN, which equals nothing, gives its last position.
    """
    rows = _read(request.function)
    if rows is None:
        return None
    function = schedule_contiguous(request.function, rows, request.target.isa, request.threads)
    return None if function is None else finish(function, arg_extremum.__name__)


def _read(function: tirx.PrimFunc) -> RowReductions | None:
    schedule = s_tir.Schedule(function)
    originals = [schedule.get(rv) for rv in schedule.get_child_blocks(schedule.get_sblock("root"))]
    if not originals:
        return None
    first, *others = originals
    pair = _as_two_reductions(first)
    rest = [read_block(block) for block in others]
    if pair is None or not rest or any(block is None or not block.writes_identity for block in rest):
        return None
    extremum, position, carried = pair
    length = position.extents[position.reduce[0]]

    def value_at(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr | None:
        if not buffer.same_as(carried):
            return None
        # a row of NaN equals nothing and leaves `length`, which is no position
        found = tirx.min(tirx.BufferLoad(position.buffer, indices), tirx.const(length - 1, "int32"))
        return tirx.Cast(str(carried.dtype), found)

    blocks = [
        NestBlock(
            b.name, b.spatial, b.reduce, b.extents, b.buffer, b.indices, replace_loads(b.value, value_at)
        )
        for b in rest
        if b is not None
    ]
    identities = {position.buffer: tirx.const(length, "int32"), extremum.buffer: _identity(extremum)}
    return rows_of(Nest(function, (extremum, position, *blocks)), identities)


def _identity(extremum: NestBlock) -> ir.Expr:
    dtype = str(extremum.buffer.dtype)
    is_maximum = isinstance(extremum.value, tirx.Max)
    if "float" in dtype:
        return tirx.FloatImm(dtype, float("-inf") if is_maximum else float("inf"))
    return tirx.min_value(dtype) if is_maximum else tirx.max_value(dtype)


def _as_two_reductions(block: s_tir.SBlock) -> tuple[NestBlock, NestBlock, ir.Var] | None:
    """The extremum, its position, and the buffer in which TVM carries the position."""
    statements = list(block.body) if isinstance(block.body, tirx.SeqStmt) else []
    reduce = [v for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.CommReduce]
    if [type(s) for s in statements] != [tirx.Bind, tirx.Bind, tirx.BufferStore, tirx.BufferStore] or len(
        reduce
    ) != 1:
        return None
    best, (_, _, carried, value) = statements[1].value, statements
    if not isinstance(best, tirx.Select) or not isinstance(best.condition, tirx.GT | tirx.LT):
        return None
    k, operand, own = reduce[0].var, best.false_value, best.true_value
    index = tirx.BufferLoad(carried.buffer, carried.indices)
    compare = type(best.condition)
    earlier = tirx.And(tirx.EQ(own, operand), tirx.LT(index, k))
    expected = tirx.Select(tirx.Or(compare(own, operand), earlier), index, k)
    if not structural_equal(statements[0].value, expected) or not structural_equal(
        best.condition, compare(own, operand)
    ):
        return None
    combine = tirx.Max if compare is tirx.GT else tirx.Min
    spatial = tuple(v.var for v in block.iter_vars if int(v.iter_type) == tirx.IterVar.DataPar)
    extents = {v.var: int(v.dom.extent) for v in block.iter_vars}
    length = tirx.const(extents[k], "int32")
    positions = tirx.decl_buffer(carried.buffer.shape, "int32", "position")
    here = tirx.Select(tirx.EQ(operand, own), tirx.Cast("int32", k), length)
    least = tirx.Min(tirx.BufferLoad(positions, carried.indices), here)

    def reduction(name: str, buffer: ir.Var, value: ir.Expr) -> NestBlock:
        return NestBlock(name, spatial, (k,), extents, buffer, tuple(carried.indices), value)

    extremum = reduction("extremum", value.buffer, combine(own, operand))
    return extremum, reduction("position", positions, least), carried.buffer
