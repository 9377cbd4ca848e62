"""Reductions of rows that are contiguous in memory, and what is made of them, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tvm_ffi
from tvm import ir, sym, tirx

from hybridc.ir.graph import dtype_bits
from hybridc.schedules.cpu.core.nest import loads, substitute, uses
from hybridc.schedules.cpu.reduction.read import ReductionStage, RowReductions, read_rows
from hybridc.schedules.cuda.core.kernel import integer
from hybridc.schedules.cuda.core.launch import cuda_target, finish_function
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import (
    MANY_READERS,
    VECTOR_BITS,
    VECTOR_DTYPES,
    Lanes,
    address_of,
    moved,
    size_bytes,
)
from hybridc.schedules.cuda.reduction.row_kernel import RowInLanes, row_kernel, shares_of
from hybridc.schedules.rule import Request, Scheduled, schedule_rule

SHORTEST = 32
"""Elements of a row below which a thread for each row is at least as good."""
FEW_ROWS, LONG_ROW = 64, 1 << 16
"""So few rows, which are so long, leave most of a GPU idle if each has but one block."""
RESULTS = ("float32", "int32")
"""Types that warps exchange."""


@schedule_rule(family="reduction")
def rows(request: Request) -> Scheduled | None:
    """Accepts softmax, norms, sums, means and extrema of rows that are contiguous in memory.

    Tiling: a warp has a row, or a block has if rows are long or few. A row is loaded once, as vectors into
    registers; all reductions, exchanged by shuffles, and all results are computed from there. Rows that
    registers have no room for are read again for each reduction.
    """
    found = attempt(rows.__name__, lambda: read_rows(request.function))
    if found is None or found.reduced_length < SHORTEST:
        return None
    if found.row_count < FEW_ROWS and found.reduced_length >= LONG_ROW:
        return None
    if any(str(r.result.ty.dtype) not in RESULTS for stage in found.stages for r in stage.reductions):
        return None
    row = _row_in_lanes(found)
    if row is None:
        return None
    function = row_kernel(request.function, row, shares_of(row))
    return finish_function(function, rows.__name__, cuda_target(request.target))


def _row_in_lanes(found: RowReductions) -> RowInLanes | None:
    """The row by the widest vectors that its accesses allow, which may have one element."""
    read = [load.source for value in found.element_values for load in loads(value)]
    bits = {dtype_bits(str(buffer.dtype)) for buffer in read if str(buffer.dtype) in VECTOR_DTYPES}
    # of the widest operand two accesses make a vector, which is what TVM has a type for
    widths = [VECTOR_BITS // b for b in sorted(bits) if max(bits) <= 2 * b]
    for width in [*(w for w in widths if found.reduced_length % w == 0), 1]:
        row = _in_lanes(found, width)
        if row is not None:
            return row
    return None


def _in_lanes(found: RowReductions, width: int) -> RowInLanes | None:
    """The row by vectors of `width`; None if a large operand or the result cannot be accessed by them."""
    lanes = Lanes.of(found.reduced_length, width)
    for var, extent in zip(found.row, found.row_extents, strict=True):
        lanes.analyzer.bind(var, ir.Range(integer(0), integer(extent)))
    point = dict(zip(found.reduced, lanes.point(lanes.lane, found.reduced_extents), strict=True))
    along: list[ir.Expr] = []

    def load(node: ir.TensorLoad) -> ir.Expr:
        begin = _begin(node, found, lanes.analyzer)
        if begin is None:
            return node
        # as TVM need not simplify it: all indices but the last are zero
        position = begin + lanes.vector * integer(width) + lanes.lane
        along.append(tirx.BufferLoad(node.source, [*(integer(0) for _ in node.indices[1:]), position]))
        return along[-1]

    def in_lane(value: ir.Expr) -> ir.Expr:
        return substitute(tvm_ffi.structural_map(value, (ir.TensorLoad, load)), point)

    row = replace(found, stages=tuple(_mapped(s, in_lane) for s in found.stages), value=in_lane(found.value))
    begin = None
    if found.writes_elements:
        begin = _begin(tirx.BufferLoad(found.output, list(found.indices)), found, lanes.analyzer)
        if begin is None or (width > 1 and str(found.output.dtype) not in VECTOR_DTYPES):
            return None
        row = replace(row, indices=(begin,))
    values = [*(v for stage in row.stages for v in stage.values), row.value]
    operands: list[ir.Expr] = []
    for node in (n for value in values for n in moved(value)):
        if _is_one_of(node, along) and not _is_one_of(node, operands) and _is_vector(node, lanes):
            operands.append(node)
    in_order = operands if width > 1 else along
    elements = found.row_count * found.reduced_length
    for node in (n for value in values for n in loads(value)):
        varies = uses(address_of(node), lanes.vector) or uses(address_of(node), lanes.lane)
        if varies and not _is_one_of(node, in_order) and size_bytes(node.source) * MANY_READERS > elements:
            return None
    return RowInLanes(row, lanes, tuple(operands))


def _begin(load: ir.TensorLoad, found: RowReductions, analyzer: sym.Analyzer) -> ir.Expr | None:
    """Where a row begins in a buffer that has its elements one after the other; None for another order."""
    address = address_of(load)
    begin = analyzer.simplify(substitute(address, {var: integer(0) for var in found.reduced}))
    position: ir.Expr = integer(0)
    for var, extent in zip(found.reduced, found.reduced_extents, strict=True):
        position = position * integer(extent) + var
    return begin if analyzer.can_prove_equal(address, begin + position) else None


def _mapped(stage: ReductionStage, in_lane: Callable[[ir.Expr], ir.Expr]) -> ReductionStage:
    return ReductionStage(
        tuple(replace(kept, value=in_lane(kept.value)) for kept in stage.kept),
        tuple(replace(r, operand=in_lane(r.operand)) for r in stage.reductions),
    )


def _is_vector(load: ir.Expr, lanes: Lanes) -> bool:
    assert isinstance(load, ir.TensorLoad)
    return lanes.width == 1 or (str(load.source.dtype) in VECTOR_DTYPES and lanes.is_contiguous(load))


def _is_one_of(node: ir.Expr, others: Sequence[ir.Expr]) -> bool:
    return any(tvm_ffi.structural_equal(node, other) for other in others)
