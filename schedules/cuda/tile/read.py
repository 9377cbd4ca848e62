"""Reading a function as one product of matrices: which iterators are batch, rows, columns and depth.

A convolution is such a product, too: of its weights and of the input's windows (implicit GEMM; Chellapilla et
al., "High performance convolutional neural networks for document processing", 2006).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from hybridc.schedules.cpu.core.micro_kernel import INDEX, integer
from hybridc.schedules.cpu.core.nest import NestBlock, loads, read_block, substitute, uses
from hybridc.schedules.cuda.core.refusal import attempt
from hybridc.schedules.cuda.core.vectors import first_step
from hybridc.schedules.cuda.tile.access import flat_index
from hybridc.schedules.cuda.tile.group import Group
from hybridc.schedules.packing import Packing

FLOATS = {"float32", "float16", "bfloat16"}
"""What factors may be stored as: they become float32 on their way into shared memory."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A parameter whose layout is chosen when compiling."""

    position: int
    """Among the function's parameters."""
    packing: Packing
    buffer: ir.Var
    """The parameter in its place."""


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
    weights: tuple[PackedWeight, ...] = ()
    """Factors that `left` and `right` read as they are packed."""

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
    values: dict[ir.Var, ir.Expr] = {v: integer(0) for v, e in sums.extents.items() if e == 1}
    extents = {v: extent for v, extent in sums.extents.items() if extent > 1}
    factors = [substitute(f, values) for f in (summand.b.a, summand.b.b)]
    for axis in sums.spatial:
        split = grouped(axis, extents, factors)
        if split is not None:
            number, member, size = split
            values[axis] = number * integer(size) + member
            extents |= {number: extents.pop(axis) // size, member: size}
            factors = [simplified(substitute(f, values), extents) for f in factors]
    # the last block goes through the points of the sum's buffer
    points = dict(zip(last.spatial, (substitute(i, values) for i in sums.indices), strict=True))
    store = tirx.BufferStore(
        last.buffer, substitute(last.value, points), [substitute(i, points) for i in last.indices]
    )
    types = {str(load.source.dtype) for factor in factors for load in loads(factor)}
    if not types <= FLOATS or str(sums.buffer.dtype) != "float32":
        return None
    spatial = [v for v in extents if v not in sums.reduce]
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
        return Group(tuple(axes), tuple(extents[v] for v in axes))

    return Product(
        left=factors[1 - right],
        right=factors[right],
        batch=group(shared),
        rows=group(own[1 - right]),
        columns=group(in_order),
        depth=group([v for v in sums.reduce if v in extents]),
        total=sums.buffer,
        store=store,
    )


def grouped(
    axis: ir.Var, extents: Mapping[ir.Var, int], factors: Sequence[ir.Expr]
) -> tuple[ir.Var, ir.Var, int] | None:
    """The axes that an output channel of a grouped convolution is made of, its group and its number there,
    and how many a group has: one factor reads the quotient of the channel by that number alone."""
    if axis not in extents or not all(uses(factor, axis) for factor in factors):
        return None
    sizes = {int(q.b) for f in factors for q in _quotients(f) if q.a.same_as(axis)}
    for size in sorted(sizes):
        if extents[axis] % size == 0 and 1 < size < extents[axis]:
            group, member = (tirx.Var(f"{axis.name}_{part}", INDEX) for part in ("group", "member"))
            inside = {v: e for v, e in extents.items() if v is not axis}
            inside |= {group: extents[axis] // size, member: size}
            point = {axis: group * integer(size) + member}
            if not all(uses(simplified(substitute(f, point), inside), member) for f in factors):
                return group, member, size
    return None


def _quotients(value: ir.Expr) -> list[tirx.FloorDiv]:
    """Quotients by constants."""
    found: list[tirx.FloorDiv] = []
    tvm_ffi.structural_walk(value, (tirx.FloorDiv, found.append))
    return [quotient for quotient in found if isinstance(quotient.b, tirx.IntImm)]


def simplified(value: ir.Expr, extents: Mapping[ir.Var, int]) -> ir.Expr:
    """With simple indices, wherever they stand: a condition is not used to simplify what it guards."""
    analyzer = sym.Analyzer()
    for axis, extent in extents.items():
        analyzer.bind(axis, ir.Range(integer(0), integer(extent)))

    def load(node: ir.TensorLoad) -> ir.Expr:
        return tirx.BufferLoad(node.source, [analyzer.simplify(index) for index in node.indices])

    return tvm_ffi.structural_map(value, (ir.TensorLoad, load))


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
