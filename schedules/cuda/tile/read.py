"""Reading a function as one product of matrices: which iterators are batch, rows, columns and depth.

A convolution is such a product, too: of its weights and of the input's windows (implicit GEMM; Chellapilla et
al., "High performance convolutional neural networks for document processing", 2006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, s_tir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import NestBlock, loads, read_block, substitute, uses
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.tile.access import first_step, flat_index
from hybridc.schedules.cuda.tile.group import Group

FLOATS = {"float32", "float16", "bfloat16"}
"""What factors may be stored as: they become float32 on their way into shared memory."""


@dataclass(frozen=True, slots=True)
class Product:
    """`store` at every point of batch, rows and columns, in which `total` stands for the sum over depth of
    `left * right`. `left` does not depend on columns, nor `right` on rows."""

    left: ir.Expr
    right: ir.Expr
    batch: Group
    rows: Group
    columns: Group
    depth: Group
    total: ir.Var
    """Buffer of the sum, which only `store` reads."""
    store: tirx.BufferStore

    @property
    def results(self) -> int:
        return self.batch.size * self.rows.size * self.columns.size


def read_product(function: tirx.PrimFunc, anchor: str) -> Product | None:
    """The product, in float32, whose sum is the block `anchor`, or None.

    All other blocks have to be element-wise: those in front become part of the factors, those behind of the
    store, transpositions and reshapes too.
    """
    found = attempt("reading a product", lambda: _blocks(function, anchor))
    if found is None:
        return None
    sums, last = found
    summand = sums.value
    if not isinstance(summand, tirx.Add) or not isinstance(summand.b, tirx.Mul) or len(last.spatial) == 0:
        return None
    units = {v: integer(0) for v, extent in sums.extents.items() if extent == 1}
    factors = [substitute(f, units) for f in (summand.b.a, summand.b.b)]
    # the last block goes through the points of the sum's buffer
    points = dict(zip(last.spatial, (substitute(i, units) for i in sums.indices), strict=True))
    store = tirx.BufferStore(
        last.buffer, substitute(last.value, points), [substitute(i, points) for i in last.indices]
    )
    types = {str(load.source.dtype) for factor in factors for load in loads(factor)}
    if not types <= FLOATS or str(sums.buffer.dtype) != "float32":
        return None
    spatial = [v for v in sums.spatial if v not in units]
    reads = {v: tuple(uses(factor, v) for factor in factors) for v in spatial}
    own = [[v for v in spatial if reads[v] == which] for which in ((True, False), (False, True))]
    shared = [v for v in spatial if reads[v] == (True, True)]
    if not all(own) or len(own[0]) + len(own[1]) + len(shared) < len(spatial):
        return None
    # columns are what lies side by side in the result
    flat = flat_index(store.buffer, store.indices)
    strides = {v: first_step(flat, v, spatial) or math.inf for v in spatial}
    right = min((0, 1), key=lambda side: min(strides[v] for v in own[side]))
    in_order = sorted(own[right], key=lambda v: -strides[v])

    def group(axes: list[ir.Var]) -> Group:
        return Group(tuple(axes), tuple(sums.extents[v] for v in axes))

    return Product(
        left=factors[1 - right],
        right=factors[right],
        batch=group(shared),
        rows=group(own[1 - right]),
        columns=group(in_order),
        depth=group([v for v in sums.reduce if v not in units]),
        total=sums.buffer,
        store=store,
    )


def _blocks(function: tirx.PrimFunc, anchor: str) -> tuple[NestBlock, NestBlock] | None:
    """The reduction, with everything in front of it inlined, and the one block behind it."""
    schedule = s_tir.Schedule(function)
    others = [
        block
        for block in schedule.get_child_blocks(schedule.get_sblock("root"))
        if schedule.get(block).name_hint != anchor
    ]
    outputs = {*function.params}
    for block in others:
        if not any(write.source in outputs for write in schedule.get(block).writes):
            schedule.compute_inline(block)
    local = schedule.cache_write(schedule.get_sblock(anchor), 0, "local")
    for consumer in schedule.get_consumers(local):
        schedule.reverse_compute_inline(consumer)
    left = [schedule.get(b) for b in schedule.get_child_blocks(schedule.get_sblock("root"))]
    if len(left) != 2:
        return None
    sums, last = (read_block(block) for block in left)
    if sums is None or last is None or len(last.spatial) != len(sums.indices):
        return None
    return sums, last
