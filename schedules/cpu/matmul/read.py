"""Reading matrix products: which iterators are batch, rows, columns and depth; where results go.

Their blocks are those of Relax's legalisation, of any number of batch axes and with transpositions fused in
front and behind, so that only the indices say which iterators are rows, columns and depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import ir, s_tir, tirx

from hybridc.schedules.cpu.core.micro_kernel import integer
from hybridc.schedules.cpu.core.nest import Contraction, Nest, read_contraction, read_nest, substitute, uses
from hybridc.schedules.padding.elements import inner_extents
from hybridc.schedules.rule import Request, Rows
from hybridc.schedules.shapes import shape_of

Values = Mapping[ir.Var, ir.Expr]


@dataclass(frozen=True, slots=True)
class Product:
    """`out[batch, rows, column] = epilogue(sum over k of left[batch, rows, k] * right[batch, k, column])`.

    The indices of `left` and `right` may be any expressions of these iterators: a transposition in front of
    the product is part of them. One behind it is `permuted`.
    """

    contraction: Contraction
    left: ir.TensorLoad
    right: ir.TensorLoad
    batch: tuple[ir.Var, ...]
    row: tuple[ir.Var, ...]
    column: ir.Var
    k: ir.Var
    output: ir.Var
    """The parameter that is written."""
    permuted: tuple[int | None, ...]
    """For each axis of `output` the axis of the product that it is; None for an axis of one element."""

    def extent(self, *iterators: ir.Var) -> int:
        return math.prod(self.contraction.anchor.extents[v] for v in iterators)

    @property
    def batches(self) -> int:
        return self.extent(*self.batch)

    @property
    def rows(self) -> int:
        return self.extent(*self.row)

    @property
    def columns(self) -> int:
        return self.extent(self.column)

    @property
    def depth(self) -> int:
        return self.extent(self.k)

    @property
    def multiply_adds(self) -> int:
        return self.batches * self.rows * self.columns * self.depth

    def rows_at(self, batch: ir.Expr, row: ir.Expr) -> dict[ir.Var, ir.Expr]:
        """The iterators of a row, which is counted through all its axes."""
        return {**self._unflatten(batch, self.batch), **self._unflatten(row, self.row)}

    @property
    def row_axes(self) -> Rows:
        """What numbers of rows go through; empty if the result has not an axis for each of them."""
        point = {v: v for v in (*self.batch, *self.row, self.column)}
        indices = self.contraction.store({**point, self.k: integer(0)}, self.left).indices
        own = [None if axis is None else indices[axis] for axis in self.permuted]
        inner = inner_extents(shape_of(self.output))
        found = []
        for row in self.row:
            places = [i for i, index in enumerate(own) if index is not None and index.same_as(row)]
            if not places:
                return ()
            found.append((self.extent(row), inner[places[0]]))
        return tuple(found)

    def left_at(self, batch: ir.Expr, row: ir.Expr, k: ir.Expr) -> ir.Expr:
        return _load(self.left, {**self.rows_at(batch, row), self.k: k})

    def right_at(self, batch: ir.Expr, k: ir.Expr, column: ir.Expr) -> ir.Expr:
        return _load(self.right, {**self._unflatten(batch, self.batch), self.k: k, self.column: column})

    def store(self, batch: ir.Expr, row: ir.Expr, column: ir.Expr, accumulated: ir.Expr) -> tirx.Stmt:
        """Write one element of the result, given its sum."""
        point = {**self.rows_at(batch, row), self.column: column, self.k: integer(0)}
        stored = self.contraction.store(point, accumulated)
        indices = [integer(0) if axis is None else stored.indices[axis] for axis in self.permuted]
        return tirx.BufferStore(self.output, stored.value, indices)

    def _unflatten(self, flat: ir.Expr, iterators: tuple[ir.Var, ...]) -> dict[ir.Var, ir.Expr]:
        point: dict[ir.Var, ir.Expr] = {}
        for var in reversed(iterators):
            extent = self.extent(var)
            point[var] = integer(0) if extent == 1 else tirx.floormod(flat, integer(extent))
            if var is iterators[0]:
                point[var] = flat
            flat = tirx.floordiv(flat, integer(extent))
        return point


def is_constant_matrix(request: Request, product: Product) -> bool:
    """Whether B is known when compiling, and has no axes but K and N."""
    position = product.contraction.nest.parameter(product.right.source)
    return position in request.constants and len(product.right.source.shape) == 2


def _load(load: ir.TensorLoad, point: Values) -> ir.Expr:
    return tirx.BufferLoad(load.source, [substitute(i, point) for i in load.indices])


def read_product(
    function: tirx.PrimFunc, read: Callable[[tirx.PrimFunc], Contraction | None] = read_contraction
) -> Product | None:
    """A function that is one matrix product, transpositions in front and behind, and an epilogue.

    `read` tells which numbers it may multiply: by default float32 ones.
    """
    nest = read_nest(function)
    # a last block that only permutes is skipped: results go to its places at once
    permuted = nest and _final_transposition(nest)
    contraction = read(_without_last_block(nest) if nest and permuted else function)
    if contraction is None or len(contraction.anchor.reduce) != 1 or not contraction.anchor.spatial:
        return None
    assert nest is not None
    anchor, output = contraction.anchor, nest.blocks[-1].buffer
    # transpositions before the product become part of the indices
    factors = [contraction.nest.inlined(load) for load in (contraction.left, contraction.right)]
    (k,), column = anchor.reduce, anchor.spatial[-1]
    for left, right in (factors, factors[::-1]):
        if not isinstance(left, ir.TensorLoad) or not isinstance(right, ir.TensorLoad):
            return None
        direct = all(any(i.same_as(v) for i in right.indices) for v in (column, k))
        if direct and not _uses(left, column) and _uses(left, k):
            batch = tuple(v for v in anchor.spatial[:-1] if _uses(right, v))
            row = tuple(v for v in anchor.spatial[:-1] if not _uses(right, v))
            axes = permuted or tuple(range(len(output.shape)))
            return Product(contraction, left, right, batch, row, column, k, output, axes)
    return None


def _uses(load: ir.TensorLoad, var: ir.Var) -> bool:
    return any(uses(index, var) for index in load.indices)


def _final_transposition(nest: Nest) -> tuple[int | None, ...] | None:
    """`Product.permuted` if the last block only permutes axes, and the last axis stays where it is."""
    last = nest.blocks[-1]
    source = last.value
    if last.reduce or not isinstance(source, ir.TensorLoad) or nest.producer(source.source) is None:
        return None
    order = tuple(next((j for j, i in enumerate(source.indices) if i.same_as(v)), None) for v in last.indices)
    wide = {j for j, extent in enumerate(source.source.shape) if int(extent) > 1}
    return order if order and order[-1] == len(source.indices) - 1 and wide <= set(order) else None


def _without_last_block(nest: Nest) -> tirx.PrimFunc:
    """The function that ends with what its last block copies."""
    function, last = nest.function, nest.blocks[-1]
    root = function.body.block
    written = last.value.source
    params = [written if p.same_as(last.buffer) else p for p in function.params]
    kept = [b for b in root.alloc_buffers if not b.same_as(written)]
    stages = list(root.body)[:-1]
    body = stages[0] if len(stages) == 1 else tirx.SeqStmt(stages)
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=kept)
    realize = s_tir.SBlockRealize([], True, block)
    return tirx.PrimFunc(params, realize, function.ret_type, function.attrs)
